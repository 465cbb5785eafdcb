"""A trainer's model, made ready for these sharders and for deduplicated batches."""

from __future__ import annotations

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
from recd_plugins.interfaces.model_tables import EmbeddingModule, embedding_modules
from recd_plugins.planning.choosing import prepare
from recd_plugins.planning.prepared import Prepared
from recd_plugins.sharding.build import build_sharders
from recd_plugins.sharding.sharders import fused_params

logger = logging.getLogger(__name__)

# Kinds that count: those that a model is prepared by, and the rows that they look at.
_COUNTS = {"dataset", "converter", "pooling", "sharding", "cache", "optimizer"}


@dataclass(frozen=True)
class Wrapped(Prepared):
    """The model, its sharders and planner, and deduplication of a loader's batches.

    Attributes:
        dedup: called with a loader of the trainer's, it returns one of deduplicated batches.
    """

    dedup: Dedup = field(kw_only=True)

    def sharders(
        self,
        base: Sequence[ModuleSharder[nn.Module]] = (),
        *,
        fused_params: Mapping[str, Any] | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
    ) -> list[ModuleSharder[nn.Module]]:
        """Return the trainer's sharders, with exact ones in place of TorchRec's two.

        Arguments are those of ``Prepared.sharders``. The tables' optimizer is the trainer's, as
        TorchRec takes it: brought by their parameters, by ``fused_params`` or by those of ``base``,
        or FBGEMM's default. The one of a registry file counts if the file names it.

        Raises:
            SetupError: two sharders are for one module type, or cannot be joined.
        """
        return build_sharders(
            self,
            base,
            fused_params=fused_params,
            qcomm_codecs_registry=qcomm_codecs_registry,
            defaults=self._defaults,
        )

    @property
    def _defaults(self) -> dict[str, Any]:
        training = self.registry.training
        return fused_params(training) if "optimizer" in training.model_fields_set else {}


def wrap(
    model: nn.Module,
    registry: str | Path | None = None,
    *,
    batch_size: int | None = None,
    plugins_dir: str | Path | None = None,
    topology: str | Path | None = None,
    device: torch.device | None = None,
) -> Wrapped:
    """Make a trainer's model ready for exact sharders and deduplicated batches.

    Args:
        model: not sharded. Its modules stay as they are, but for what a registry names.
        registry: a registry file, for sharding entries, caches and poolings; ``dataset`` and
            ``converter`` may be left out, where no entry needs to see rows.
        batch_size: rows in a batch of one rank, by which the planner reckons; of the registry's
            ``training``, 512 if it says nothing, without it.
        plugins_dir: a folder of plugin files besides the installed ones.
        topology: the cluster, as ``training.topology`` takes it, in place of the registry's.
        device: where tables will be trained, which entries of a registry decide by; a GPU where the
            model is on one or its ranks talk by NCCL, else the CPU, without it.

    Raises:
        SetupError: the model has no embedding module, an entry needs rows and there is no
            dataset.
        RegistryError: something is wrong with the registry file, or does not suit the model.

    Example::

        ready = recd_plugins.wrap(model)
        sharders = ready.sharders(get_default_sharders())
        ...
        for batch in ready.dedup(loader): ...
    """
    parsed = (
        registry_without_file()
        if registry is None
        else load_registry(registry, plugins_dir=plugins_dir, needs_data=False)
    )
    if batch_size is not None:
        parsed = parsed.with_training({"batch_size": batch_size})
    if topology is not None:
        parsed = parsed.with_training({"topology": str(topology)})
    modules = list(embedding_modules(model))
    _warn_of_subclasses(modules)
    if registry is not None:
        _tell_what_does_not_count(parsed)
    dedup = Dedup(model, modules=modules)  # before plugins replace modules
    prepared = prepare(parsed, model, device=device)
    if prepared.chosen is not None and _speaks():
        unseen = isinstance(parsed.dataset, NoDataset)
        logger.warning(
            "%s%s",
            prepared.chosen,
            "; the registry has no dataset, so no rows are taken to be equal" if unseen else "",
        )
    return Wrapped(**vars(prepared), dedup=dedup)


def _speaks() -> bool:
    return not (dist.is_initialized() and dist.get_rank())


def _tell_what_does_not_count(parsed: RunConfig) -> None:
    """Name the sections of a file that are for ``recd run``, and change nothing here."""
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
    if training.device == "cpu":  # entries decide for it, whatever ranks talk by
        counts.add("device")
    fields = sorted(training.model_fields_set - counts)
    unused = [*dict.fromkeys(sections), *(f"training.{each}" for each in fields)]
    if unused and _speaks():
        logger.warning(
            "%s: %s: for recd run, or for ready.dataloader and ready.train_pipeline; they change "
            "nothing in a trainer's own loader and pipeline",
            *(parsed.path, ", ".join(unused)),
        )


def _warn_of_subclasses(modules: Sequence[EmbeddingModule]) -> None:
    """Warn of modules that stay whole on every rank, and cannot train there on CPU."""
    for module in modules:
        # Set by torch.distributed.optim._apply_optimizer_in_backward.
        if module.is_subclass and any(
            hasattr(parameter, "_optimizer_classes") for parameter in module.shardable.parameters()
        ):
            logger.warning(
                "%s, so it is whole on every rank. Its tables bring an optimizer for the backward "
                "pass, with which torch's DistributedDataParallel fails on CPU (Cannot access "
                "accelerator device): give them to the dense optimizer, or make it a plain one",
                module.why_left,
            )
