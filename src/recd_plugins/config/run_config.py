"""The run configuration parsed from ``registry.yaml``."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn, Self

from pydantic import ValidationError

from recd_plugins.config import built_in_kinds
from recd_plugins.config.document import Document, Location
from recd_plugins.config.entries import Entry, claim, matched
from recd_plugins.config.manager import PluginManager
from recd_plugins.config.schema import ModelSpec, RegistrySpec, TrainingSpec
from recd_plugins.interfaces import (
    Cache,
    Converter,
    Dataset,
    DatasetWrapper,
    Ingestion,
    Kind,
    Lookups,
    Plugin,
    Pooling,
    Preprocessing,
    Reader,
    Sharding,
)
from recd_plugins.interfaces.plugin import plugin_call
from recd_plugins.interfaces.rows import FeatureSchema, table_name
from recd_plugins.runtime.errors import Problem, RegistryError, SetupError
from recd_plugins.runtime.plugin_modules import modules_of_files
from recd_plugins.runtime.text import did_you_mean, shortened

#: Kinds that have their own attribute in RunConfig.
TYPED_KINDS = frozenset(
    {"dataset", "converter", "preprocessing", "ingestion", "pooling", "sharding", "cache"}
)
_CALLED = {"ids": "sparse features", "numbers": "dense features"}

Steps = dict[str, tuple[Preprocessing, ...]]


@dataclass(frozen=True)
class RunConfig:
    """Parsed ``registry.yaml`` with its plugin objects. Disabled entries are omitted.

    Paths in plugin options are relative to the current directory.

    Attributes:
        dataset: dataset without wrappers.
        wrappers: entries of ``dataset.wrap``, innermost wrapper first.
        ingestion: entry of the ingestion plugin, which produces batches in other processes.
        kinds: maps the name of a plugin kind to the kind.
        further: entries of kinds without an attribute in this class, keyed by kind.
        offering: sharding plugins that a chooser may select; empty without a chooser.
        document: parsed YAML with line numbers; None without a file.
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
    kinds: Mapping[str, Kind] = field(default_factory=lambda: dict(built_in_kinds.BY_NAME))
    further: Mapping[str, tuple[Entry[Any], ...]] = field(default_factory=dict)
    offering: tuple[type[Sharding], ...] = ()
    document: Document | None = field(default=None, repr=False)

    @property
    def text(self) -> str | None:
        """Content of ``registry.yaml``; None if the run has no such file."""
        return self.document.text if self.document else None

    def problem(self, location: Location, message: str) -> Problem:
        """Create a ``Problem``, one error of the file, with the line number of ``location``."""
        document = self.document or Document(str(self.path), {}, {})
        return document.problem(location, message)

    @property
    def model(self) -> ModelSpec | None:
        """Options of the built-in model; None if the file does not use the built-in model."""
        return self.spec.model

    @property
    def has_model(self) -> bool:
        """Whether ``registry.yaml`` has a section ``model``."""
        return self.model is not None or bool(self.entries("model"))

    @property
    def training(self) -> TrainingSpec:
        """Options of the section ``training``."""
        return self.spec.training

    def wrap_dataset(self, lookups: Lookups) -> Dataset:
        """Return the dataset with wrappers (``dataset.wrap``), which get ids from ``lookups``."""
        dataset = self.dataset
        for entry in self.wrappers:
            dataset = entry.plugin.over(dataset, lookups)
        return dataset

    def with_training(self, overrides: Mapping[str, Any]) -> Self:
        """Return a copy with options of ``training`` replaced. Raises RegistryError if invalid."""
        try:
            training = TrainingSpec.model_validate(
                {**self.training.model_dump(exclude_unset=True), **overrides}
            )
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

    def claim(self, kind: str, names: Iterable[str]) -> Any:
        """Return a dict from feature or table name to the entry that matches the name.

        For preprocessing and other kinds with several entries per feature, the dict values are
        tuples of entries in file order.

        Raises:
            RegistryError: a pattern matches no name, or two entries match one name.
            KeyError: the kind is unknown.
            TypeError: entries of the kind have no name patterns.
        """
        return claim(self.path, self._kind(kind), self.entries(kind), names)

    def entries(self, kind: str) -> tuple[Entry[Any], ...]:
        """Return the enabled entries of a plugin kind. Raises KeyError for unknown kinds."""
        if kind not in TYPED_KINDS:
            return self.further.get(self._kind(kind).name, ())
        own = getattr(self, kind)
        if isinstance(own, Plugin):
            return (Entry(own, (), kind, 0),)
        return own if isinstance(own, tuple) else () if own is None else (own,)

    def _kind(self, name: str) -> Kind:
        return self.kinds.get(name) or PluginManager().kinds[name]


def two_readers(ingestion: str, workers: int) -> str:
    return (
        f"{workers} workers and ingestion plugin {ingestion!r} would both read the data. Set "
        "training.workers: 0, or remove the ingestion: section"
    )


def check_dataset(config: RunConfig) -> None:
    """Raise RegistryError if the dataset's options contradict the columns of its data."""
    with plugin_call(config.dataset, "mistakes"):
        mistakes = list(config.dataset.mistakes())
    problems = [config.problem(("dataset", "options", *option), what) for option, what in mistakes]
    if config.dataset.is_stream:
        asked = {
            ("dataset", "wrap"): bool(config.wrappers),
            ("ingestion",): config.ingestion is not None,
            ("training", "workers"): config.training.workers > 0,
            ("training", "epochs"): config.training.epochs > 1,
        }
        problems += [
            config.problem(
                key,
                f"dataset {config.dataset.name!r} is a stream, which does not support this key. "
                "Remove the key.",
            )
            for key, used in asked.items()
            if used
        ]
    if problems:
        raise RegistryError(problems)


def feature_steps(registry: RunConfig, schema: FeatureSchema) -> Steps:
    """Return a dict from feature name to its preprocessing steps, in file order.

    A pattern matches only features that the step supports, which are sparse features for steps on
    ids and dense features for steps on numbers.

    Raises:
        RegistryError: a pattern matches no feature that its step supports. The error also lists
            patterns of ``model.tables`` without a table, since a renamed column causes both errors.
    """
    problems = []
    of_kind = {"ids": schema.sparse, "numbers": schema.dense}
    names = dict.fromkeys((*schema.sparse, *schema.dense))
    taken: dict[str, set[str]] = {}
    for entry in registry.preprocessing:
        takes = entry.plugin.takes
        taken[entry.field] = {name for kind in takes for name in of_kind[kind]}
        for pattern in entry.patterns:
            found = matched(pattern, names)
            if found and taken[entry.field].isdisjoint(found):
                kind = "sparse (ids)" if found[0] in schema.sparse else "dense (numbers)"
                message = (
                    f"{entry.plugin.name!r} supports {' and '.join(_CALLED[k] for k in takes)}, "
                    f"but {pattern!r} matches only {', '.join(map(repr, found))}: {kind}. Remove "
                    "it from 'features', or change the role of the column"
                )
                where = str(registry.path), entry.line, f"{entry.field}.features"
                problems.append(Problem(*where, message))
    claims = {}
    try:
        claims = registry.claim("preprocessing", names)
    except RegistryError as error:
        problems += error.problems
    if problems:
        raise RegistryError([*problems, *table_problems(registry, schema)])
    chains = {
        name: tuple(entry.plugin for entry in entries if name in taken[entry.field])
        for name, entries in claims.items()
    }
    return {name: steps for name, steps in chains.items() if steps}


def table_problems(registry: RunConfig, schema: FeatureSchema) -> list[Problem]:
    """Return a problem for each pattern of ``model.tables`` that matches no table."""
    if registry.model is None:
        return []
    names = [table_name(feature) for feature in schema.sparse]
    dense = {table_name(feature) for feature in schema.dense}
    return [
        registry.problem(
            ("model", "tables", pattern),
            "the feature is a number, so it has no table. Remove this line"
            if pattern in dense
            else "the pattern matches no table"
            + (did_you_mean(pattern, names) or f". Use one of: {shortened(names)}"),
        )
        for pattern in registry.model.tables
        if not matched(pattern, frozenset(names))
    ]


def num_embeddings(spec: ModelSpec, features: Iterable[str]) -> dict[str, int]:
    """Return a dict from feature to its table's row count in ``spec.tables``, or the default."""
    names = {table_name(feature): feature for feature in features}
    rows: dict[str, int] = {}
    for pattern, table in spec.tables.items():
        for name in matched(pattern, names):
            rows.setdefault(names[name], table.num_embeddings)
    return {feature: rows.get(feature, spec.num_embeddings) for feature in names.values()}


def check_num_ids(registry: RunConfig, schema: FeatureSchema, rows: Mapping[str, int]) -> None:
    """Raise RegistryError if preprocessing makes more ids of a feature than its table has rows."""
    for feature, steps in feature_steps(registry, schema).items():
        made = steps[-1].num_ids
        if made is not None and made > rows.get(feature, made):
            message = (
                f"{steps[-1].name!r} produces up to {made:,} ids of feature {feature!r}, but "
                f"the table has {rows[feature]:,} rows. Raise num_embeddings, or lower the number "
                "of ids"
            )
            where = steps[-1].stands_at or (str(registry.path), 0, "preprocessing")
            raise RegistryError([Problem(*where, message)])


def plugin_versions(config: RunConfig) -> dict[str, str]:
    """Return a dict from plugin name to distribution and version, or to a digest of its file."""
    sections = [config.wrappers, *map(config.entries, config.kinds)]
    plugins: list[Plugin] = [entry.plugin for section in sections for entry in section]
    manager = PluginManager()
    versions = {}
    for plugin in plugins:
        top = type(plugin).__module__.partition(".")[0]
        if file := modules_of_files([type(plugin)]).get(top):
            version = _version_of(file)
        elif top == "recd_plugins":
            version = top
        else:
            found = manager.find(plugin.kind, plugin.name)
            version = found.origin if found is not None else top
        versions[plugin.name] = version
    return versions


def _version_of(file: Path) -> str:
    if file.name != "__init__.py":
        return f"{file.name} {hashlib.sha256(file.read_bytes()).hexdigest()[:12]}"
    digest = hashlib.sha256()
    modules = (path for path in file.parent.rglob("[!.]*.py") if path.is_file())
    for module in sorted(modules):
        digest.update(f"{module.relative_to(file.parent)}\0".encode(errors="surrogateescape"))
        digest.update(hashlib.sha256(module.read_bytes()).digest())
    return f"{file.parent.name} {digest.hexdigest()[:12]}"


class NoDataset(Dataset):
    """Placeholder if registry.yaml has no dataset. Raises SetupError when rows are read."""

    name = "none"

    def prepare(self) -> NoReturn:
        raise SetupError(
            "this command needs training data, but the registry file has no dataset. Add the "
            "sections dataset: and converter: to the registry file"
        )

    def schema(self) -> FeatureSchema:
        self.prepare()

    def reader(self, **_: Any) -> Reader:
        self.prepare()


class NoConverter(Converter):
    """Placeholder if registry.yaml has no converter, because a script creates the batches."""

    name = "none"

    def convert(self, *_: Any) -> NoReturn:
        raise AssertionError("without a dataset there is nothing to convert")
