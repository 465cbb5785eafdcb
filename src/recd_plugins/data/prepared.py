"""What a model that a registry has prepared is read and planned by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

from recd_plugins.data.wrapped_dataset import RegistryLookups
from recd_plugins.interfaces import (
    Choice,
    Dataset,
    DatasetWrapper,
    LookupKernels,
    PlanContext,
    Table,
)
from recd_plugins.registry import RunConfig, at_entry
from recd_plugins.registry.checked_part import CheckedPart, by_class, call_class

if TYPE_CHECKING:
    from torch import nn

    from recd_plugins.interfaces import TableStrategy
    from recd_plugins.values.batch import Placement


@dataclass(frozen=True)
class PreparedModel:
    """A model that is ready to be sharded, and what batches and plan need to suit it.

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
        setting: what sharding plugins decided by; None of a baseline.
        chosen: what a chooser came to, and why; None without one.
    """

    registry: RunConfig
    model: nn.Module
    placement: Placement
    num_embeddings: Mapping[str, int]
    tables: tuple[Table, ...] = ()
    parts: Mapping[str, TableStrategy] = field(default_factory=dict)
    coalesced: frozenset[str] = frozenset()
    batch_parts: Mapping[str, TableStrategy] | None = None
    setting: PlanContext | None = None
    chosen: Choice | None = None

    @property
    def table_parts(self) -> tuple[TableStrategy, ...]:
        """What entries do to the tables, in the order of the file."""
        return tuple(self.parts.values())

    @property
    def checked_parts(self) -> tuple[CheckedPart, ...]:
        """The same, whose errors name their entries: how the framework asks them."""
        registry = self.registry
        entries = {entry.field: entry for entry in (*registry.sharding, *registry.cache)}
        return tuple(
            CheckedPart(registry.path, entries[field], part) for field, part in self.parts.items()
        )

    @property
    def lookup_kernels(self) -> tuple[LookupKernels, ...]:
        """The lookup kernels of the tables that TorchRec's kernels are not to look up.

        Of two for one table the first make its kernel: those of the cache.
        """
        caches = {entry.field for entry in self.registry.cache}
        parts = sorted(self.checked_parts, key=lambda part: part.entry.field not in caches)
        found = (call_class(of_class, "kernels") for of_class in by_class(parts).values())
        return tuple(kernels for kernels in found if kernels is not None)

    @property
    def lookups(self) -> RegistryLookups:
        """What wrappers of the dataset may ask."""
        parts = self.parts if self.batch_parts is None else self.batch_parts
        return RegistryLookups(self.registry, self.tables, tuple(parts.values()))

    @property
    def wrapped_dataset(self) -> Dataset:
        """The dataset in its wrappers, which know the model: what training and evaluation read."""
        return self.registry.wrap_dataset(self.lookups)

    def with_training(self, overrides: Mapping[str, Any]) -> Self:
        """The same model and parts, with fields of the ``training`` section set."""
        return replace(self, registry=self.registry.with_training(overrides))

    def check_wrappers(self) -> None:
        """Let each wrapper of the dataset see whether it suits the model."""
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
