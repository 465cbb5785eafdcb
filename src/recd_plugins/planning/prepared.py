"""A model prepared by a registry, as a trainer uses it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from recd_plugins.data.prepared import PreparedModel
from recd_plugins.interfaces import Split

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim import Optimizer
    from torchrec.distributed.planner import Topology
    from torchrec.distributed.planner.types import ParameterConstraints
    from torchrec.distributed.types import ModuleSharder, QuantizedCommCodecs

    from recd_plugins.data.loader import DataLoader
    from recd_plugins.interfaces import TrainPipeline
    from recd_plugins.planning.planner import RegistryPlanner
    from recd_plugins.values.data_profile import DataProfile

logger = logging.getLogger(__name__)


class Prepared(PreparedModel):
    """What ``prepare`` returns: the model, and the parts of a trainer that suit it."""

    def planner(
        self,
        topology: Topology | None = None,
        *,
        profile: DataProfile | None = None,
        activation_bytes: int | Callable[[], int] = 0,
        world_size: int | None = None,
        local_world_size: int | None = None,
        device: torch.device | None = None,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        replicate: bool = False,
    ) -> RegistryPlanner:
        """TorchRec's planner, told of sharding, caches and deduplication; it checks the model.

        Args:
            topology: the ranks and their memory, as ``to_torchrec()`` of what
                ``recd_plugins.api.load_topology`` returns; without it that of
                ``training.topology``, or ``recd_plugins.api.default_topology``, of the
                three arguments after ``activation_bytes``.
            profile: lengths and dedupe factors of the features; without it they are measured, on
                the first rows of the data.
            activation_bytes: to leave free on each rank for what a forward pass keeps beside
                lookups; or what finds it out, called by the rank that plans.
            world_size: ranks; those of the process group, else of the registry, without it.
            local_world_size: ranks a node; ``LOCAL_WORLD_SIZE``, else all ranks, without it; the
                registry's where its ``world_size`` counts.
            device: of the tables; that which the model was prepared for, without it.
            constraints: TorchRec's, by table name, as a trainer would give them to its planner.
                They go before what is known of the data, and must not contradict plugins.
            replicate: whether small tables may be data-parallel where nobody asked for it. Such a
                table trains with the trainer's dense optimizer, so say it only where that has the
                rule of ``training:``, as ``recd_plugins.api.build_optimizer`` makes it.
                Tables whose parameters bring an optimizer never are.

        Raises:
            DataError: without a ``profile``: the data is missing or wrong.
            SetupError: plugins or ``constraints`` contradict each other. From ``plan``: there is
                no plan, a module has no sharder, or a table would lose its optimizer; says why.
        """
        from recd_plugins.planning.planner import build_planner

        for entry in () if replicate else self.registry.sharding:
            if entry.plugin.may_replicate:
                logger.warning(
                    "%s:%d %s: %s may have small tables on every rank, where the trainer's dense "
                    "optimizer has the rule of training: planner(replicate=True) says that it has; "
                    "without it these tables are sharded",
                    *(self.registry.path, entry.line, entry.field, entry.plugin.name),
                )
        return build_planner(
            self,
            topology,
            profile=profile,
            activation_bytes=activation_bytes,
            world_size=world_size,
            local_world_size=local_world_size,
            device=device,
            constraints=constraints,
            replicate=replicate,
        )

    def sharders(
        self,
        base: Sequence[ModuleSharder[nn.Module]] = (),
        *,
        fused_params: Mapping[str, Any] | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
    ) -> list[ModuleSharder[nn.Module]]:
        """Sharders of TorchRec's modules, exact on CPU too, and those of the sharding plugins.

        The tables' optimizer runs inside the backward pass, as ``training:`` says, unless
        ``fused_params`` or the parameter of a table (``apply_optimizer_in_backward``) name another;
        TorchRec lets the parameter's win.

        Args:
            base: sharders of a trainer, as it would give them to DistributedModelParallel. Those of
                TorchRec for EmbeddingBagCollection and EmbeddingCollection lend their fused_params,
                qcomm_codecs_registry and use_index_dedup to the exact ones; others have their own,
                or where they have none what is said here. Module types that it lacks stay
                unsharded, but for those that plugins bring. Without it: TorchRec's defaults.
            fused_params: FBGEMM's; they go before those of ``training:``, and with an ``optimizer``
                in their place.
            qcomm_codecs_registry: TorchRec's, for all modules.

        Raises:
            SetupError: sharders of two types are for one module type, one of ``base`` cannot be
                joined with the exact one, or an argument is there twice.
        """
        from recd_plugins.sharding.build import build_sharders

        return build_sharders(
            self, base, fused_params=fused_params, qcomm_codecs_registry=qcomm_codecs_registry
        )

    def dataloader(
        self,
        rank: int,
        world_size: int,
        split: Split = "train",
        device: torch.device | None = None,
    ) -> DataLoader:
        """A resumable loader of this rank's share of a split, whose batches suit the model.

        Batches are in host memory, pinned where ``device`` is a CUDA device.

        Raises:
            DataError: the data is missing or wrong.
            RegistryError: a pattern matches no feature.
        """
        from recd_plugins.data.loader import build_dataloader

        return build_dataloader(self.registry, rank, world_size, split, device, prepared=self)

    def train_pipeline(
        self, dmp: nn.Module, optimizer: Optimizer, device: torch.device
    ) -> TrainPipeline:
        """TorchRec's pipelined training loop over ``dmp``, or that of the section ``pipeline``.

        The first ``progress`` of TorchRec's raises RecdError where an embedding module is not
        pipelined.
        """
        from recd_plugins.sharding.pipeline import build_train_pipeline

        return build_train_pipeline(dmp, optimizer, device, self.registry)
