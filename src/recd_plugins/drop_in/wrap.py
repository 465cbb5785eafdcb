"""Prepares a custom model for this package's sharders and for deduplicated batches."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.types import ModuleSharder, QuantizedCommCodecs

from recd_plugins.config import RunConfig
from recd_plugins.config.from_file import load_registry, registry_without_file
from recd_plugins.config.run_config import NoDataset
from recd_plugins.drop_in.dedup import Dedup
from recd_plugins.planning.choosing import prepare
from recd_plugins.planning.prepared import Prepared
from recd_plugins.sharding.build import build_sharders
from recd_plugins.sharding.sharders import fused_params as training_params

logger = logging.getLogger(__name__)

# Registry sections that ``wrap`` uses: those that prepare a model, and the data they read.
_COUNTS = {"dataset", "converter", "pooling", "sharding", "cache", "optimizer"}


@dataclass(frozen=True)
class Wrapped(Prepared):
    """A prepared model with its sharders, its planner and its batch deduplication.

    Attributes:
        dedup: call it with a loader to get a loader of deduplicated batches.
    """

    dedup: Dedup = field(kw_only=True)

    def sharders(
        self,
        base: Sequence[ModuleSharder[nn.Module]] = (),
        *,
        fused_params: Mapping[str, Any] | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
    ) -> list[ModuleSharder[nn.Module]]:
        """Return sharders for DistributedModelParallel. Arguments are as in ``Prepared.sharders``.

        TorchRec's EmbeddingBagCollectionSharder and EmbeddingCollectionSharder in ``base`` are
        replaced by sharders of this package. As in TorchRec, a table's optimizer comes from
        apply_optimizer_in_backward, else from ``fused_params`` (this argument, or a sharder in
        ``base``), else from FBGEMM. An optimizer in the registry file has priority.

        Raises:
            SetupError: two sharders have the same module type, or cannot be combined.
        """
        training = self.registry.training
        has_optimizer = "optimizer" in training.model_fields_set
        return build_sharders(
            self,
            base,
            fused_params=fused_params,
            qcomm_codecs_registry=qcomm_codecs_registry,
            defaults=training_params(training) if has_optimizer else {},
        )


def wrap(
    model: nn.Module,
    registry: str | Path | Mapping[str, Any] | None = None,
    *,
    batch_size: int | None = None,
    plugins_dir: str | Path | None = None,
    topology: str | Path | None = None,
    device: torch.device | None = None,
) -> Wrapped:
    """Prepare a custom model for this package's sharders and for deduplicated batches.

    Args:
        model: an unsharded model. Only modules that the registry file selects are replaced.
        registry: a registry file (YAML) with sections such as ``sharding``, ``cache``, ``pooling``
            and ``optimizers``, or a dict with these sections; None for no plugins. Entries that
            count training ids also need ``dataset`` and ``converter``.
        batch_size: rows per batch on each rank, for the planner. Default: ``training.batch_size``
            of the registry file, or 512.
        plugins_dir: a folder of plugin files to load in addition to the installed plugins.
        topology: the cluster, in the form of ``training.topology``, which it overrides.
        device: device that will train the tables; registry entries may depend on it. Default: a GPU
            if the model is on one or the ranks use NCCL, else the CPU.

    Raises:
        SetupError: the model has no embedding module.
        RegistryError: the registry file is invalid, does not fit the model, or has no dataset for
            an entry that needs training data.

    Example::

        ready = recd_plugins.wrap(model)
        sharders = ready.sharders(get_default_sharders())
        ...
        for batch in ready.dedup(loader): ...
    """
    if registry is None:
        parsed = registry_without_file()
    elif isinstance(registry, Mapping):
        text = json.dumps({"version": 1, **registry})
        parsed = load_registry("wrap()", plugins_dir=plugins_dir, needs_data=False, text=text)
    else:
        parsed = load_registry(registry, plugins_dir=plugins_dir, needs_data=False)
    if batch_size is not None:
        parsed = parsed.with_training({"batch_size": batch_size})
    if topology is not None:
        parsed = parsed.with_training({"topology": str(topology)})
    if registry is not None:
        _warn_of_unused_sections(parsed)
    dedup = Dedup(model)  # before plugins replace modules
    prepared = prepare(parsed, model, device=device)
    if prepared.chosen is not None and _speaks():
        unseen = "; the registry file has no dataset, so the plan assumes no duplicate rows"
        why = unseen if isinstance(parsed.dataset, NoDataset) else ""
        logger.warning("%s%s", prepared.chosen, why)
    return Wrapped(**vars(prepared), dedup=dedup)


def _speaks() -> bool:
    return not (dist.is_initialized() and dist.get_rank())


def _warn_of_unused_sections(parsed: RunConfig) -> None:
    """Warn about sections of the registry file that have an effect only in ``recd run``."""
    sections = [
        kind.section
        for name, kind in parsed.kinds.items()
        if name not in _COUNTS and parsed.entries(name)
    ]
    sections += ["model"] if parsed.model is not None else []
    training = parsed.training
    counts = {"optimizer", "batch_size", "topology", "wire"}
    if "optimizer" in training.model_fields_set:
        counts |= {"learning_rate", "eps"}
    if training.device == "cpu":  # entries depend on it, whatever the group's backend is
        counts.add("device")
    fields = sorted(training.model_fields_set - counts)
    unused = [*dict.fromkeys(sections), *(f"training.{each}" for each in fields)]
    if unused and _speaks():
        logger.warning(
            "%s: the settings %s have no effect on your own data loader and train pipeline. They "
            "are used by recd run, ready.dataloader and ready.train_pipeline.",
            *(parsed.path, ", ".join(unused)),
        )
