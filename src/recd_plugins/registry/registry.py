"""The parts that a registry file chooses, and the methods by which a trainer takes them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from pydantic import ValidationError

from recd_plugins import built_in_kinds
from recd_plugins.errors import PluginError, Problem, RegistryError
from recd_plugins.interfaces import (
    Cache,
    Converter,
    Dataset,
    DatasetWrapper,
    Ingestion,
    Kind,
    Plugin,
    Pooling,
    Preprocessing,
    Sharding,
    Split,
    Table,
)
from recd_plugins.interfaces.table_part import by_class
from recd_plugins.registry.entries import Entry, at_entry, claim
from recd_plugins.registry.resolve import did_you_mean, two_readers
from recd_plugins.registry.schema import ModelSpec, RegistrySpec, TrainingSpec

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim import Optimizer
    from torchrec.distributed.planner import Topology
    from torchrec.distributed.planner.types import ParameterConstraints
    from torchrec.distributed.types import ModuleSharder, QuantizedCommCodecs

    from recd_plugins.data.loader import DataLoader
    from recd_plugins.data.model_input import Placement
    from recd_plugins.distributed.lookup_kernels import LookupKernels
    from recd_plugins.interfaces import Setting, TablePart
    from recd_plugins.planning.planner import RegistryPlanner
    from recd_plugins.planning.profile import DataProfile
    from recd_plugins.training.pipeline import CheckedTrainPipeline

#: Kinds that a registry has an attribute for, of the same name.
TYPED_KINDS = frozenset(
    {"dataset", "converter", "preprocessing", "ingestion", "pooling", "sharding", "cache"}
)


@dataclass(frozen=True)
class Prepared:
    """What ``Registry.prepare`` learnt of a model, so that batches and plan suit it.

    Attributes:
        placement: which features the model looks up how.
        num_embeddings: rows of the table of each feature.
        parts: what sharding and cache entries do to the tables, by ``Entry.field``.
        tables: of the model, before sharding plugins replaced any.
        coalesced: names of those whose ids are made unique before they are sent.
    """

    placement: Placement
    num_embeddings: Mapping[str, int]
    parts: Mapping[str, TablePart] = field(default_factory=dict)
    tables: tuple[Table, ...] = ()
    coalesced: frozenset[str] = frozenset()


@dataclass
class Registry:
    """What a registry file says, with its plugins made. Entries that are not enabled are left out.

    Relative paths in options are relative to the current directory.

    Attributes:
        dataset: without its wrappers.
        wrappers: of the dataset; each stands around those before it. Their patterns are empty.
        ingestion: who makes batches, None for the ranks; its patterns are empty.
        prepared: what ``prepare`` learnt of the model it saw last.
        batches_of: the registry whose batches this one's loaders read, where that is another one:
            its wrappers ask that one what samples look up.
        converter_fitted: whether the converter has seen its sample.
        kinds: that sections of the file may be of, by name.
        further: entries of the kinds that have no attribute here, by kind.
    """

    path: Path
    spec: RegistrySpec
    dataset: Dataset
    converter: Converter
    preprocessing: tuple[Entry[Preprocessing], ...]
    pooling: tuple[Entry[Pooling], ...]
    sharding: tuple[Entry[Sharding], ...]
    cache: tuple[Entry[Cache], ...]
    wrappers: tuple[Entry[DatasetWrapper], ...] = ()
    ingestion: Entry[Ingestion] | None = None
    batches_of: Registry | None = None
    prepared: Prepared | None = None
    converter_fitted: bool = False
    kinds: Mapping[str, Kind] = field(default_factory=lambda: dict(built_in_kinds.BY_NAME))
    further: Mapping[str, tuple[Entry[Any], ...]] = field(default_factory=dict)

    @property
    def model(self) -> ModelSpec | None:
        """Sizes of the built-in model, None where the file has no ``model`` section."""
        return self.spec.model

    @property
    def parts(self) -> tuple[TablePart, ...]:
        """What entries do to the tables of the model that ``prepare`` saw last."""
        return tuple(self.prepared.parts.values()) if self.prepared else ()

    @property
    def lookup_kernels(self) -> tuple[LookupKernels, ...]:
        """Those of the tables of that model that TorchRec's kernels are not to look up."""
        kernels = (cls.kernels(parts) for cls, parts in by_class(self.parts).items())
        return tuple(each for each in kernels if each is not None)

    @property
    def tables(self) -> tuple[Table, ...]:
        """Those of the model that ``prepare`` saw last, before plugins replaced any."""
        return self.prepared.tables if self.prepared else ()

    @property
    def coalesced(self) -> frozenset[str]:
        """Those tables of the model that ``prepare`` saw last whose ids are coalesced."""
        return self.prepared.coalesced if self.prepared else frozenset()

    @property
    def training(self) -> TrainingSpec:
        """How training runs."""
        return self.spec.training

    @property
    def wrapped_dataset(self) -> Dataset:
        """``dataset`` in its wrappers: what training and evaluation read."""
        from recd_plugins.access.lookups import RegistryLookups

        dataset = self.dataset
        for entry in self.wrappers:
            dataset = entry.plugin.over(dataset, RegistryLookups(self.batches_of or self))
        return dataset

    def check_wrappers(self) -> None:
        """Let each wrapper of the dataset see whether it suits the model, once one is prepared.

        Raises:
            RegistryError: it does not; names the line of its entry.
        """
        if (self.batches_of or self).prepared is None:
            return
        dataset = self.wrapped_dataset
        for entry in reversed(self.wrappers):
            assert isinstance(dataset, DatasetWrapper), "each entry is one wrapper"
            with at_entry(self.path, entry):
                dataset.check()
            dataset = dataset.inner

    def expected_groups(self) -> Mapping[str, float]:
        """The share of samples that the outermost wrapper expects of each group."""
        dataset = self.wrapped_dataset
        return dataset.expected_groups() if isinstance(dataset, DatasetWrapper) else {}

    def with_training(self, overrides: Mapping[str, Any]) -> Registry:
        """The same with fields of the ``training`` section set.

        Raises:
            RegistryError: a value is not allowed, or not together with the others.
        """
        try:
            training = TrainingSpec.model_validate({**self.training.model_dump(), **overrides})
        except ValidationError as error:
            problems = [
                Problem(
                    str(self.path),
                    0,
                    ".".join(map(str, ("training", *details["loc"]))),
                    details["msg"].removeprefix("Value error, "),
                )
                for details in error.errors()
            ]
            raise RegistryError(problems) from error
        spec = self.spec.model_copy(update={"training": training})
        if self.ingestion is not None and training.workers:
            wrong = two_readers(self.ingestion.plugin.name, training.workers)
            raise RegistryError([Problem(str(self.path), 0, "training.workers", wrong)])
        return replace(self, spec=spec)

    @overload
    def claim(
        self, kind: Literal["preprocessing"], names: Iterable[str]
    ) -> dict[str, tuple[Entry[Preprocessing], ...]]: ...
    @overload
    def claim(
        self, kind: Literal["pooling"], names: Iterable[str]
    ) -> dict[str, Entry[Pooling]]: ...
    @overload
    def claim(
        self, kind: Literal["sharding"], names: Iterable[str]
    ) -> dict[str, Entry[Sharding]]: ...
    @overload
    def claim(self, kind: Literal["cache"], names: Iterable[str]) -> dict[str, Entry[Cache]]: ...
    @overload
    def claim(self, kind: str, names: Iterable[str]) -> dict[str, Any]: ...

    def claim(self, kind: str, names: Iterable[str]) -> Any:
        """Which entry is for which of ``names``; a name that no entry matches is left out.

        Of a kind that claims several by feature, as preprocessing, a name has a tuple of entries,
        in the order of the file; of the others one entry.

        Raises:
            RegistryError: a pattern matches no name, or two entries match one name.
            PluginError: there is no such kind.
            TypeError: entries of the kind have no patterns.
        """
        return claim(self.path, self._kind(kind), self.entries(kind), names)

    def entries(self, kind: str) -> tuple[Entry[Any], ...]:
        """The entries of a kind that are enabled, in the order of the file.

        Raises:
            PluginError: there is no such kind.
        """
        if kind not in TYPED_KINDS:
            return self.further.get(self._kind(kind).name, ())
        own = getattr(self, kind)
        if isinstance(own, Plugin):
            return (Entry(own, (), kind, 0),)
        return own if isinstance(own, tuple) else () if own is None else (own,)

    def _kind(self, name: str) -> Kind:
        """The kind of that name; one that the file has no section of is looked for."""
        from recd_plugins.manager import PluginManager

        kinds = self.kinds if name in self.kinds else PluginManager().kinds
        if name not in kinds:
            raise PluginError(
                f"no package that is installed registers a kind {name}"
                + (did_you_mean(name, kinds) or f"; the kinds: {', '.join(kinds)}")
            )
        return kinds[name]

    def prepare(self, model: nn.Module, setting: Setting | None = None) -> nn.Module:
        """The model with poolings, and with what sharding plugins replace; batches then suit it.

        Args:
            model: not sharded; may stand on the meta device.
            setting: the ranks that it will be sharded for; those that this process is one of, or
                would start, without it (:func:`recd_plugins.planning.setting.setting_of`).

        Raises:
            RegistryError: a pattern matches no table or feature, or two entries claim one.
            RecdError: a sequence feature has no pooling, or a combination cannot be exact.
        """
        from recd_plugins.training.prepare import prepare_model

        return prepare_model(self, model, setting)

    def planner(
        self,
        topology: Topology | None = None,
        *,
        model: nn.Module | None = None,
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
            RegistryError: a pattern matches no table of ``model``, or two entries claim one.
            DataError: without a ``profile``: the data is missing or wrong.
            SetupError: plugins or ``constraints`` contradict each other. From ``plan``: there is
                no plan; says why.
        """
        from recd_plugins.planning import build_planner

        return build_planner(
            self,
            topology,
            model=model,
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
        """A resumable loader of this rank's share of a split, for the model ``prepare`` saw last.

        Batches are in host memory, pinned where ``device`` is a CUDA device.

        Raises:
            DataError: the data is missing or wrong.
            RegistryError: a pattern matches no feature.
        """
        from recd_plugins.data.loader import build_dataloader

        return build_dataloader(self, rank, world_size, split, device)

    def train_pipeline(
        self, dmp: nn.Module, optimizer: Optimizer, device: torch.device
    ) -> CheckedTrainPipeline:
        """TorchRec's pipelined training loop over ``dmp``.

        Its first ``progress`` raises RecdError where an embedding module is not pipelined.
        """
        from recd_plugins.training.pipeline import build_train_pipeline

        return build_train_pipeline(dmp, optimizer, device)
