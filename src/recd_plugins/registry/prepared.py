"""A model that a registry has prepared, and the methods by which a trainer goes on from there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from recd_plugins.interfaces import Dataset, DatasetWrapper, Split, Table
from recd_plugins.registry.entries import at_entry

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim import Optimizer
    from torchrec.distributed.planner import Topology
    from torchrec.distributed.planner.types import ParameterConstraints
    from torchrec.distributed.types import ModuleSharder, QuantizedCommCodecs

    from recd_plugins.data.loader import DataLoader
    from recd_plugins.data.lookups import RegistryLookups
    from recd_plugins.data.model_input import Placement
    from recd_plugins.distributed.lookup_kernels import LookupKernels
    from recd_plugins.interfaces import TablePart
    from recd_plugins.planning.checked_part import CheckedPart
    from recd_plugins.planning.planner import RegistryPlanner
    from recd_plugins.planning.profile import DataProfile
    from recd_plugins.registry.registry import Registry
    from recd_plugins.training.pipeline import CheckedTrainPipeline


@dataclass(frozen=True)
class Prepared:
    """What ``Registry.prepare`` returns: the model, and what batches and plan need to suit it.

    Attributes:
        registry: that prepared it.
        model: with poolings, and what sharding plugins replaced; not sharded.
        placement: which features the model looks up how.
        num_embeddings: rows of the table of each feature.
        tables: of the model, before sharding plugins replaced any.
        parts: what sharding and cache entries do to the tables, by ``Entry.field``.
        coalesced: names of tables whose ids are made unique before they are sent.
        batch_parts: what wrappers of the dataset are told of the tables in place of ``parts``, as a
            baseline is fed the batches of the model that it is compared with.
    """

    registry: Registry
    model: nn.Module
    placement: Placement
    num_embeddings: Mapping[str, int]
    tables: tuple[Table, ...] = ()
    parts: Mapping[str, TablePart] = field(default_factory=dict)
    coalesced: frozenset[str] = frozenset()
    batch_parts: Mapping[str, TablePart] | None = None

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Say where the module is to who takes this for one."""
            if name in vars(Prepared):
                return object.__getattribute__(self, name)  # a property raised it: again
            raise AttributeError(
                f"what Registry.prepare returns has no attribute {name}; the module is its "
                "attribute model: prepared = registry.prepare(model); prepared.model"
            )

    @property
    def table_parts(self) -> tuple[TablePart, ...]:
        """What entries do to the tables, in the order of the file."""
        return tuple(self.parts.values())

    @property
    def checked_parts(self) -> tuple[CheckedPart, ...]:
        """The same, whose errors name their entries: how the framework asks them."""
        from recd_plugins.planning.checked_part import CheckedPart

        registry = self.registry
        entries = {entry.field: entry for entry in (*registry.sharding, *registry.cache)}
        return tuple(
            CheckedPart(registry.path, entries[field], part) for field, part in self.parts.items()
        )

    @property
    def lookup_kernels(self) -> tuple[LookupKernels, ...]:
        """The lookup kernels of the tables that TorchRec's kernels are not to look up."""
        from recd_plugins.planning.checked_part import asked_together, by_class

        classes = by_class(self.checked_parts).values()
        kernels = (asked_together(parts, "kernels") for parts in classes)
        return tuple(each for each in kernels if each is not None)

    @property
    def lookups(self) -> RegistryLookups:
        """What wrappers of the dataset may ask."""
        from recd_plugins.data.lookups import RegistryLookups

        parts = self.parts if self.batch_parts is None else self.batch_parts
        return RegistryLookups(self.registry, self.tables, tuple(parts.values()))

    @property
    def wrapped_dataset(self) -> Dataset:
        """The dataset in its wrappers, which know the model: what training and evaluation read."""
        return self.registry.wrap_dataset(self.lookups)

    def with_training(self, overrides: Mapping[str, Any]) -> Prepared:
        """The same model and parts, with fields of the ``training`` section set.

        Raises:
            RegistryError: a value is not allowed, or not together with the others.
        """
        return replace(self, registry=self.registry.with_training(overrides))

    def check_wrappers(self) -> None:
        """Let each wrapper of the dataset see whether it suits the model.

        Raises:
            RegistryError: it does not; names the line of its entry.
        """
        dataset = self.wrapped_dataset
        for entry in reversed(self.registry.wrappers):
            assert isinstance(dataset, DatasetWrapper), "each entry is one wrapper"
            with at_entry(self.registry.path, entry):
                dataset.check()
            dataset = dataset.inner

    def expected_groups(self) -> Mapping[str, float]:
        """The share of samples that the outermost wrapper expects of each group."""
        dataset = self.wrapped_dataset
        return dataset.expected_groups() if isinstance(dataset, DatasetWrapper) else {}

    def planner(
        self,
        topology: Topology | None = None,
        *,
        profile: DataProfile | None = None,
        activation_bytes: int = 0,
        world_size: int | None = None,
        local_world_size: int | None = None,
        device: torch.device | None = None,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        replicate: bool = False,
    ) -> RegistryPlanner:
        """TorchRec's planner, told of sharding, caches and deduplication.

        :func:`recd_plugins.planning.build_planner` describes the arguments.

        Raises:
            DataError: without a ``profile``: the data is missing or wrong.
            SetupError: plugins or ``constraints`` contradict each other. From ``plan``: there is
                no plan; says why.
        """
        from recd_plugins.planning import build_planner

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

        :func:`recd_plugins.distributed.build_sharders` describes the arguments.

        Raises:
            SetupError: two sharders are for one module type, or cannot be joined.
        """
        from recd_plugins.distributed import build_sharders

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
    ) -> CheckedTrainPipeline:
        """TorchRec's pipelined training loop over ``dmp``.

        Its first ``progress`` raises RecdError where an embedding module is not pipelined.
        """
        from recd_plugins.training.pipeline import build_train_pipeline

        return build_train_pipeline(dmp, optimizer, device)
