"""Models prepared for sharding, and the dataset with its wrappers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any, Never, Self

import numpy as np

from recd_plugins.config import Entry, RunConfig, at_entry
from recd_plugins.config.entries import PluginStrategy
from recd_plugins.interfaces import (
    Choice,
    Dataset,
    DatasetWrapper,
    FeatureLookups,
    FeatureSchema,
    Lookups,
    PlanContext,
    PluginOptions,
    Rows,
    Sharding,
    Table,
    TableStrategy,
)
from recd_plugins.interfaces.batch import Placement
from recd_plugins.interfaces.dataset import WithSessions
from recd_plugins.interfaces.plugin import plugin_call
from recd_plugins.runtime.errors import ExactnessError, SetupError

if TYPE_CHECKING:
    from torch import nn

    from recd_plugins.data.preprocess import Preprocess
    from recd_plugins.interfaces.model_tables import EmbeddingModule


def plan_placement(registry: RunConfig, schema: FeatureSchema) -> Placement:
    """Return the features of each ModelInput tensor. Pooling entries match sequence features."""
    # Imported here, since readers do not need torchrec.
    from recd_plugins.interfaces.model_tables import table_name

    if registry.entries("model"):
        raise SetupError(
            f"{registry.path}: the features of a model plugin are unknown until prepare() has run. "
            "Call prepare(), then prepared.dataloader()"
        )
    sequence = registry.claim("pooling", schema.sparse)
    sharding = registry.claim("sharding", [table_name(feature) for feature in schema.sparse])
    replicated = {
        feature
        for feature in schema.sparse
        if feature not in sequence
        and (entry := sharding.get(table_name(feature))) is not None
        and entry.plugin.replicates
    }
    return Placement(
        pooled=tuple(f for f in schema.sparse if f not in sequence and f not in replicated),
        replicated=tuple(f for f in schema.sparse if f in replicated),
        sequence=tuple(f for f in schema.sparse if f in sequence),
    )


def placement_of(modules: Iterable[EmbeddingModule], sharding: Mapping[str, Sharding]) -> Placement:
    """Return the features of each ModelInput tensor: pooled, replicated and sequence features.

    ``modules`` are the ``embedding_modules`` of the model; ``sharding`` has a plugin per table
    name.

    Raises:
        ExactnessError: some tables of a module are replicated, and others are not.
    """
    pooled: list[str] = []
    replicated: list[str] = []
    sequence: list[str] = []
    for module in modules:
        bags = [table for table in module.tables if table.pooled]
        copies = [
            table.name
            for table in bags
            if (plugin := sharding.get(table.name)) is not None and plugin.replicates
        ]
        if copies and len(copies) < len(bags):
            raise ExactnessError(
                f"module {module.path!r}: tables {', '.join(map(repr, copies))} are replicated on "
                "every rank, but the other tables of this module are not. Move the replicated "
                "tables to a separate EmbeddingBagCollection with input "
                "batch.replicated_features, or use another sharding"
            )
        for table in module.tables:
            if not table.pooled:
                sequence.extend(table.features)
            else:
                (replicated if copies else pooled).extend(table.features)
    return Placement(*(tuple(dict.fromkeys(each)) for each in (pooled, replicated, sequence)))


@dataclass(frozen=True)
class PreparedModel:
    """An unsharded model with its config, after sharding plugins have modified modules.

    Attributes:
        registry: the parsed ``registry.yaml``.
        model: unsharded model. Sharding and pooling plugins may have replaced modules.
        placement: names of the features in each ModelInput tensor.
        num_embeddings: maps the feature name to its table's number of rows.
        tables: original tables of the model, before sharding plugins replaced tables.
        parts: table strategies of ``sharding`` and ``cache`` entries, keyed by entry location.
        coalesced: names of tables whose ids are deduplicated before the all-to-all.
        batch_parts: ``parts`` that dataset wrappers use. A baseline run has the ``parts`` of the
            run that it is compared with, so that both train the same batches.
        context: plan context passed to sharding plugins; None for a baseline run.
        chosen: result of the sharding chooser; None without a chooser.
    """

    registry: RunConfig
    model: nn.Module
    placement: Placement
    num_embeddings: Mapping[str, int]
    tables: tuple[Table, ...] = ()
    parts: Mapping[str, TableStrategy] = field(default_factory=dict)
    coalesced: frozenset[str] = frozenset()
    batch_parts: Mapping[str, TableStrategy] | None = None
    context: PlanContext | None = None
    chosen: Choice | None = None

    @property
    def plugin_strategies(self) -> tuple[PluginStrategy, ...]:
        """Return the table strategies, with wrappers that add the registry.yaml entry to errors."""
        registry = self.registry
        entries = {entry.field: entry for entry in (*registry.sharding, *registry.cache)}
        return tuple(
            PluginStrategy(registry.path, entries[field], part)
            for field, part in self.parts.items()
        )

    @property
    def lookups(self) -> RegistryLookups:
        """Return an object with which dataset wrappers query the ids that samples look up."""
        parts = self.parts if self.batch_parts is None else self.batch_parts
        return RegistryLookups(self.registry, self.tables, tuple(parts.values()))

    @property
    def wrapped_dataset(self) -> Dataset:
        """Return the dataset with its wrappers, which can query the model's tables."""
        return self.registry.wrap_dataset(self.lookups)

    def with_training(self, overrides: Mapping[str, Any]) -> Self:
        """Return a copy with options of the ``training`` section replaced."""
        return replace(self, registry=self.registry.with_training(overrides))

    def check_wrappers(self) -> None:
        """Call ``DatasetWrapper.check`` of each dataset wrapper."""
        dataset = self.wrapped_dataset
        for entry in reversed(self.registry.wrappers):
            assert isinstance(dataset, DatasetWrapper), "each entry is one wrapper"
            with at_entry(self.registry.path, entry):
                dataset.check()
            dataset = dataset.inner


class RegistryLookups(Lookups):
    """Computes the ids that samples look up in tables, after preprocessing. Picklable.

    ``tables`` is None if no model is prepared. ``parts`` are strategies of sharding and cache
    entries.
    """

    def __init__(
        self,
        registry: RunConfig,
        tables: Sequence[Table] | None = None,
        parts: Sequence[TableStrategy] = (),
    ) -> None:
        self._registry = registry
        self._tables = tables
        self._parts = parts

    @property
    def tables(self) -> Sequence[Table]:
        if self._tables is None:
            raise _NotPrepared
        return self._tables

    @property
    def parts(self) -> Sequence[TableStrategy]:
        return self._parts if self.tables is not None else ()

    def of(self, rows: Rows, features: Sequence[str]) -> Mapping[str, FeatureLookups]:
        """Return the preprocessed ids of ``rows``, keyed by feature."""
        import torch

        from recd_plugins.data.arrow import dictionary_column, sparse_column
        from recd_plugins.interfaces.batch import Batch
        from recd_plugins.sparse.from_columns import ikjts_from_dictionaries, kjt_from_columns

        dictionaries, columns = {}, {}
        for name in features:
            if (dictionary := dictionary_column(rows, name)) is not None:
                dictionaries[name] = dictionary
            else:
                columns[name] = sparse_column(rows, name)
        nothing = torch.empty(len(rows), 0)
        batch = self._preprocess(
            Batch(
                nothing,
                nothing.sum(1),
                kjt_from_columns(columns, len(rows)) if columns else None,
                ikjts_from_dictionaries(
                    [{name: column} for name, column in dictionaries.items()], len(rows)
                ),
            )
        )
        tensors: list[tuple[Any, Any]] = [] if batch.kjt is None else [(batch.kjt, None)]
        for ikjt in batch.ikjts:
            tensors.append((ikjt.to_unique_kjt(), ikjt.inverse_lookup().long().numpy()))
        found = {}
        for kjt, inverse in tensors:
            for name, stored in kjt.to_dict().items():
                lengths = stored.lengths().numpy()
                offsets = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
                found[name] = FeatureLookups(stored.values().numpy(), offsets, inverse)
        return found

    @cached_property
    def _preprocess(self) -> Preprocess:
        from recd_plugins.data.preprocess import Preprocess, fitted_steps

        return Preprocess(fitted_steps(self._registry, self._registry.dataset.schema()))


class _NotPrepared(SetupError):
    """Raised if a dataset wrapper queries lookups before the model is prepared."""

    def __init__(self) -> None:
        super().__init__(
            "a dataset wrapper needs the model's tables, but prepare() has not run. Call prepare() "
            "first"
        )


class UnknownLookups(Lookups):
    """Placeholder for lookups while the model is not prepared. ``of`` raises SetupError."""

    def of(self, *_: object) -> Never:
        """Raise SetupError, since the model is not prepared."""
        raise _NotPrepared

    tables = parts = property(of)


@dataclass(frozen=True)
class FirstRows:
    """The first batch of the training split, the same on every rank.

    ``left_out`` are the entries of dataset wrappers that were not applied to ``dataset``, since
    they need a prepared model.
    """

    rows: Rows
    dataset: Dataset
    left_out: tuple[Entry[DatasetWrapper], ...] = ()

    def batches(self, count: int) -> Iterator[Rows]:
        """Yield the ``count - 1`` training batches that follow ``rows``, of the same size."""
        with plugin_call(self.dataset, "reader"):
            yield from islice(self.dataset.sample(len(self.rows)), 1, count)


def read_first_rows(registry: RunConfig) -> FirstRows:
    """Read the first training batch, without dataset wrappers that need a prepared model."""
    for count in range(len(registry.wrappers), -1, -1):
        inner = replace(registry, wrappers=registry.wrappers[:count])
        dataset = inner.wrap_dataset(UnknownLookups())
        try:
            with plugin_call(dataset, "reader"):
                rows = next(iter(dataset.sample(registry.training.batch_size)))
        except _NotPrepared:
            continue
        return FirstRows(rows, dataset, registry.wrappers[count:])
    raise AssertionError("a dataset without wrappers needs no model")


def wrapped_dataset(registry: RunConfig) -> Dataset:
    """Return the dataset with its wrappers, before a model is prepared."""
    return registry.wrap_dataset(RegistryLookups(registry))


def with_sessions(dataset: Dataset) -> tuple[Entry[DatasetWrapper], ...]:
    """Return the wrapper that adds session columns; empty if there are no sessions."""
    if dataset.session_keys() is None or type(dataset).session_reader is Dataset.session_reader:
        return ()
    return (Entry(WithSessions(PluginOptions()), (), "dataset", 0),)


def session_column(dataset: Dataset) -> str | None:
    """Return the column that metrics group by if ``with_sessions`` wraps the dataset, else None."""
    keys = dataset.session_keys() if isinstance(dataset, WithSessions) else None
    return None if keys is None else keys.group


def smallest_batch(dataset: Dataset) -> int:
    """Return the number of rows that every training batch size must be a multiple of."""
    size = 1
    while isinstance(dataset, DatasetWrapper):
        size *= dataset.rows_together
        dataset = dataset.inner
    return size
