"""The parts that a registry file chooses, and the methods by which a trainer takes them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, overload

from pydantic import ValidationError

from recd_plugins.errors import PluginError, Problem, RecdError, RegistryError
from recd_plugins.interfaces import (
    Cache,
    Converter,
    Dataset,
    Plugin,
    Pooling,
    Preprocessing,
    Sharding,
    Split,
)
from recd_plugins.manager import KINDS, PluginManager
from recd_plugins.registry.loader import read_yaml, render
from recd_plugins.registry.resolve import Resolved, did_you_mean, resolve, shortened
from recd_plugins.registry.schema import FeatureEntrySpec, ModelSpec, RegistrySpec, TrainingSpec
from recd_plugins.registry.variants import with_sharding

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim import Optimizer
    from torchrec.distributed.planner import Topology
    from torchrec.distributed.types import ModuleSharder

    from recd_plugins.data.loader import DataLoader
    from recd_plugins.data.model_input import Placement
    from recd_plugins.interfaces import Setting
    from recd_plugins.planning.planner import RegistryPlanner
    from recd_plugins.planning.profile import DataProfile
    from recd_plugins.planning.tiers.plan import TableTiers, TierPlan
    from recd_plugins.training.pipeline import CheckedTrainPipeline

P = TypeVar("P", bound=Plugin, covariant=True)


@dataclass(frozen=True)
class Entry(Generic[P]):
    """An entry of a list section.

    Attributes:
        plugin: the plugin, made with the entry's options.
        patterns: names or globs of features or tables.
        field: where it stands in the file, as ``sharding[0]``.
        line: 1-based line in the file.
    """

    plugin: P
    patterns: tuple[str, ...]
    field: str
    line: int

    def matches(self, name: str) -> bool:
        """Whether a pattern matches ``name``; case counts."""
        return any(fnmatchcase(name, pattern) for pattern in self.patterns)


@contextmanager
def at_entry(path: Path, entry: Entry[Plugin]) -> Iterator[None]:
    """A context in which a plugin works for its entry: what it refuses names the entry's line.

    Raises:
        RegistryError: a RecdError was raised; a PluginError, which names the plugin, stays one.
    """
    try:
        yield
    except (PluginError, RegistryError):
        raise
    except RecdError as error:
        raise RegistryError([Problem(str(path), entry.line, entry.field, str(error))]) from error


@dataclass(frozen=True)
class Prepared:
    """What ``Registry.prepare`` learnt of a model, so that batches and plan suit it.

    Attributes:
        placement: which features the model looks up how.
        num_embeddings: rows of the table of each feature.
        tier_plans: of sharding entries whose plugins have tiers of rows, by ``Entry.field``.
    """

    placement: Placement
    num_embeddings: Mapping[str, int]
    tier_plans: Mapping[str, TierPlan] = field(default_factory=dict)

    @property
    def tiers(self) -> dict[str, TableTiers]:
        """The tiers of each table that has some, by its name."""
        return {table.name: table for plan in self.tier_plans.values() for table in plan.tables}


@dataclass
class Registry:
    """What a registry file says, with its plugins made. Entries that are not enabled are left out.

    Relative paths in options are relative to the current directory.

    Attributes:
        prepared: what ``prepare`` learnt of the model it saw last.
        converter_fitted: whether the converter has seen its sample.
    """

    path: Path
    spec: RegistrySpec
    dataset: Dataset
    converter: Converter
    preprocessing: tuple[Entry[Preprocessing], ...]
    pooling: tuple[Entry[Pooling], ...]
    sharding: tuple[Entry[Sharding], ...]
    cache: tuple[Entry[Cache], ...]
    prepared: Prepared | None = None
    converter_fitted: bool = False

    @property
    def model(self) -> ModelSpec | None:
        """Sizes of the built-in model, None where the file has no ``model`` section."""
        return self.spec.model

    @property
    def tiers(self) -> dict[str, TableTiers]:
        """The tiers of the tables of the model that ``prepare`` saw last, by table name."""
        return self.prepared.tiers if self.prepared else {}

    @property
    def training(self) -> TrainingSpec:
        """How training runs."""
        return self.spec.training

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
        return replace(self, spec=self.spec.model_copy(update={"training": training}))

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

    def claim(self, kind: str, names: Iterable[str]) -> Any:
        """Which entry is for which of ``names``; a name that no entry matches is left out.

        Of preprocessing a name may have several entries, in the order of the file; of the other
        kinds one.

        Raises:
            RegistryError: a pattern matches no name, or two entries match one name.
        """
        names = list(names)
        entries: tuple[Entry[Plugin], ...] = getattr(self, kind)
        what = "feature" if kind in ("preprocessing", "pooling") else "table"
        problems = [
            Problem(
                str(self.path),
                entry.line,
                f"{entry.field}.{what}s",
                f"{pattern} matches no {what}"
                + (did_you_mean(pattern, names) or f"; the {what}s: {shortened(names)}"),
            )
            for entry in entries
            for pattern in entry.patterns
            if not any(fnmatchcase(name, pattern) for name in names)
        ]
        claims = {
            name: claimants
            for name in names
            if (claimants := tuple(entry for entry in entries if entry.matches(name)))
        }
        if kind != "preprocessing":
            problems += self._conflicts(claims, what)
        if problems:
            raise RegistryError(problems)
        if kind == "preprocessing":
            return claims
        return {name: claimants[0] for name, claimants in claims.items()}

    def _conflicts(self, claims: dict[str, tuple[Entry[Plugin], ...]], what: str) -> list[Problem]:
        together: dict[tuple[Entry[Plugin], ...], list[str]] = {}
        for name, claimants in claims.items():
            if len(claimants) > 1:
                together.setdefault(claimants, []).append(name)
        return [
            Problem(
                str(self.path),
                claimants[-1].line,
                claimants[-1].field,
                f"{what} {shortened(claimed)} is claimed by "
                + " and ".join(f"{entry.field} (line {entry.line})" for entry in claimants)
                + f"; narrow the patterns of one, or give it enabled: false: a {what} has one "
                f"{claimants[-1].plugin.kind} entry",
            )
            for claimants, claimed in together.items()
        ]

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
    ) -> RegistryPlanner:
        """TorchRec's planner, told of sharding, caches and deduplication.

        :func:`recd_plugins.planning.build_planner` describes the arguments.

        Raises:
            RegistryError: a pattern matches no table of ``model``, or two entries claim one.
            DataError: without a ``profile``: the data is missing or wrong.
            SetupError: plugins contradict each other. From ``plan``: there is no plan; says why.
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
        )

    def sharders(self) -> list[ModuleSharder[nn.Module]]:
        """Sharders of TorchRec's modules, exact on CPU too, and those of the sharding plugins.

        Raises:
            SetupError: two sharders are for one module type.
        """
        from recd_plugins.distributed import build_sharders

        return build_sharders(self)

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


def load_registry(
    path: str | Path, *, plugins_dir: str | Path | None = None, sharding: str | None = None
) -> Registry:
    """Read a registry file, find its plugins and check all of it. Reads no data.

    Args:
        path: the file.
        plugins_dir: a folder of plugin files besides the installed ones.
        sharding: a plugin that takes the tables of the first sharding entry that is enabled, in
            place of that entry's.

    Raises:
        RegistryError: everything that is wrong with the file, with lines.
        PluginError: an installed plugin does not load.
    """
    document = read_yaml(Path(path))
    if sharding is not None:
        document = with_sharding(document, sharding)
    spec, resolved = resolve(document, PluginManager(plugins_dir))
    by_kind: dict[str, list[Resolved]] = {kind: [] for kind in KINDS}
    for item in resolved:
        by_kind[item.kind].append(item)

    def entries(kind: str) -> tuple[Entry[Any], ...]:
        return tuple(
            Entry(
                item.plugin,
                tuple(entry.features if isinstance(entry, FeatureEntrySpec) else entry.tables),
                render(item.location),
                document.lines[item.location],
            )
            for item, entry in zip(by_kind[kind], getattr(spec, kind), strict=True)
            if entry.enabled
        )

    dataset = by_kind["dataset"][0].plugin
    converter = by_kind["converter"][0].plugin
    assert isinstance(dataset, Dataset), "the manager checked its kind"
    assert isinstance(converter, Converter), "the manager checked its kind"
    return Registry(
        path=Path(path),
        spec=spec,
        dataset=dataset,
        converter=converter,
        preprocessing=entries("preprocessing"),
        pooling=entries("pooling"),
        sharding=entries("sharding"),
        cache=entries("cache"),
    )
