"""``prepare``: put poolings and what sharding plugins replace into a model."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from recd_plugins.compat.torchrec_internals import refuse_other_versions
from recd_plugins.config import RunConfig
from recd_plugins.interfaces import PlanContext
from recd_plugins.interfaces.model_tables import refuse_shared_tables
from recd_plugins.planning.choosing import choose
from recd_plugins.planning.prepared import Prepared, prepare_entries
from recd_plugins.planning.setting import setting_of

logger = logging.getLogger(__name__)


def prepare(
    registry: RunConfig,
    model: nn.Module,
    setting: PlanContext | None = None,
    *,
    topology: str | Path | None = None,
    device: torch.device | None = None,
) -> Prepared:
    """Put poolings, and what sharding plugins replace, into ``model``; each change is logged.

    Args:
        registry: says what goes where.
        model: any model with EmbeddingBagCollections (fed ``batch.sparse_features``) and
            EmbeddingCollections (fed ``batch.sequence_features`` and pooled by SequencePooling).
            Not sharded; may stand on the meta device. It is changed in place.
        setting: the ranks that it will be sharded for; those that this process is one of, or
            would start, without it.
        topology: the cluster, as ``training.topology`` takes it, in place of the registry's.
        device: where tables will be trained, which entries decide by; a GPU where the model is
            on one or its ranks talk by NCCL, else the CPU, without it.

    Raises:
        RegistryError: a pattern matches no table or feature, or two entries claim one.
        RecdError: a sequence feature has no pooling.
        ExactnessError: a combination that cannot be exact.
        SetupError: modules share a table; or TorchRec, FBGEMM or torch lacks what this package
            relies on; or nothing that a chooser may choose fits.
    """
    if topology is not None:
        registry = registry.with_training({"topology": str(topology)})
    refuse_other_versions()
    refuse_shared_tables(model)
    # Who says nothing may still train on a GPU, where there is one.
    device_type = None if torch.cuda.is_available() else "cpu"
    if setting is not None:
        device_type = setting.device_type
    else:
        device_type = device.type if device else device_type
        setting = setting_of(registry, model, device=device or _device_of(registry, model))
    registry, setting, chosen = choose(registry, model, setting)
    prepared = prepare_entries(registry, model, setting, device_type)
    claims = registry.claim("sharding", [table.name for table in prepared.tables])
    for entry in registry.sharding:
        names = [table.name for table in prepared.tables if claims.get(table.name) is entry]
        logger.info("%s shards %s", entry.plugin.name, ", ".join(names))
    return replace(prepared, chosen=chosen)


def _device_of(registry: RunConfig, model: nn.Module) -> torch.device:
    """Where a trainer will have its tables, as far as that shows before the model is sharded."""
    if registry.training.device == "cpu":
        return torch.device("cpu")
    there = any(parameter.is_cuda for parameter in model.parameters())
    talks = torch.cuda.is_available() and dist.is_initialized()
    by_nccl = talks and "nccl" in str(dist.get_backend_config())
    return torch.device("cuda" if there or by_nccl else "cpu")
