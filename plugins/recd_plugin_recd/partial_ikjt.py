"""The converter plugin ``recd.partial_ikjt`` for partial deduplication (RecD, section 7)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, model_validator

from recd_plugin_recd.ikjt import IkjtConverter, ListDictConverter, check_features
from recd_plugins.api import Converter, FeatureSchema, PluginOptions, Rows

if TYPE_CHECKING:
    from recd_plugins.api import Batch, PartialInverseKeyedJaggedTensor, RowPacker, dedup


@dataclass(frozen=True)
class Choice:
    """Storage of a feature, chosen by ``fit`` from a sample of rows.

    Attributes:
        exact, partial: DedupeFactor (ids divided by stored ids) of exact and partial deduplication.
        stored_partially: whether the feature uses partial deduplication.
    """

    exact: float
    partial: float
    stored_partially: bool


class PartialIkjtConverter(Converter):
    """Converts batches to PartialInverseKeyedJaggedTensors.

    These tensors store ids that two consecutive rows share only once.
    """

    name = "recd.partial_ikjt"

    class Options(PluginOptions):
        """Options of the plugin ``recd.partial_ikjt``."""

        features: Literal["auto"] | list[str] = Field(
            default="auto",
            description="Features with partial deduplication. auto: features for which it stores "
            "clearly fewer ids in the first batch.",
        )
        max_shift: int = Field(
            default=8,
            ge=0,
            le=64,
            description="Maximum number of positions by which equal ids may shift from one row to "
            "the next.",
        )
        min_gain: float = Field(
            default=1.2,
            ge=1.0,
            description="With features: auto, the minimum ratio of the partial to the exact "
            "DedupeFactor (ids divided by stored ids).",
        )
        min_dedupe_factor: float = Field(
            default=1.5,
            ge=1.0,
            description="With auto, features and groups with a lower DedupeFactor stay plain.",
        )
        groups: Literal["auto"] | list[list[str]] = Field(
            default="auto",
            description="Groups of exactly deduplicated features, as in recd.ikjt; [] for none.",
        )

        @model_validator(mode="after")
        def _no_feature_in_both(self) -> Self:
            IkjtConverter.Options(groups=self.groups)
            named = set() if self.features == "auto" else set(self.features)
            if both := sorted(named & _named(self.groups)):
                raise ValueError(
                    f"options 'features' and 'groups' both contain {', '.join(map(repr, both))}. "
                    "Remove each of these features from one of the options."
                )
            return self

    options: Options

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        exact = {"groups": options.groups, "min_dedupe_factor": options.min_dedupe_factor}
        self._exact = ListDictConverter(ListDictConverter.Options.model_validate(exact))
        self._choices: dict[str, Choice] | None = None

    @cached_property
    def _pack(self) -> RowPacker:
        from recd_plugins.api import RowPacker

        return RowPacker(self.options.max_shift)

    def fit(self, sample: Rows, schema: FeatureSchema) -> None:
        """Choose the storage of each feature, based on a sample of rows."""
        from recd_plugins.api import arrow

        if self.options.features != "auto":
            check_features(f"{self.name}: features", self.options.features, schema.sparse)
        check_features(f"{self.name}: groups", sorted(_named(self.options.groups)), schema.sparse)
        columns = {name: arrow.sparse_column(sample, name) for name in schema.sparse}
        self._choices = self._choose(columns, len(sample))
        self._exact.fit(sample, self._rest(schema))
        self.user_features = self._exact.user_features

    def report(self) -> Mapping[str, Choice]:
        """Return a dict from feature to the storage that ``fit`` chose. Empty before ``fit``."""
        return self._choices or {}

    def dedupe_factors(self) -> Mapping[str, float]:
        choices = self.report()
        partial = {name: choices[name].partial for name in choices if self._is_partial(name)}
        return partial | dict(self._exact.dedupe_factors())

    def convert(self, rows: Rows, schema: FeatureSchema) -> Batch:
        """Convert rows to a batch. Calls ``fit`` with these rows if it was never called."""
        if self._choices is None:
            self.fit(rows, schema)
        batch = self._exact.convert(rows, self._rest(schema))
        names = [name for name in schema.sparse if self._is_partial(name)]
        return replace(batch, partials=self._packed(rows, names))

    def _packed(
        self, rows: Rows, names: Sequence[str]
    ) -> tuple[PartialInverseKeyedJaggedTensor, ...]:
        """Return the tensors of partially deduplicated features."""
        from recd_plugins.api import BrokenListError, arrow, from_columns

        found = {name: arrow.dictionary_column(rows, name) for name in names}
        stored = {name: column for name, column in found.items() if column is not None}
        others = {name: arrow.sparse_column(rows, name) for name in names if name not in stored}
        partials = []
        if stored:
            try:
                partials.append(
                    from_columns.partial_from_dictionaries(stored, len(rows), self._pack)
                )
            except BrokenListError as error:
                raise arrow.broken_list(rows, list(stored)[error.column]) from error
        if others:
            partials.append(from_columns.partial_from_columns(others, len(rows), self._pack))
        return tuple(partials)

    def _choose(self, columns: dict[str, dedup.JaggedColumn], num_rows: int) -> dict[str, Choice]:
        from recd_plugins.api import dedup

        if not columns:
            return {}
        stored = self._pack(list(columns.values()), num_rows).sizes
        unique = dedup.Deduplicator()([[column] for column in columns.values()], num_rows)
        choices = {}
        for (name, (_, offsets)), size, exact in zip(columns.items(), stored, unique, strict=True):
            ids = int(offsets[-1] - offsets[0])
            factors = (ids / exact.values[0].size, ids / size) if ids else (1.0, 1.0)
            choices[name] = Choice(*factors, self._gains(name, *factors))
        return choices

    def _gains(self, name: str, exact: float, partial: float) -> bool:
        if self.options.features != "auto":
            return name in self.options.features
        if name in _named(self.options.groups):
            return False
        return partial >= max(self.options.min_dedupe_factor, self.options.min_gain * exact)

    def _is_partial(self, name: str) -> bool:
        return self.report()[name].stored_partially

    def _rest(self, schema: FeatureSchema) -> FeatureSchema:
        return replace(
            schema, sparse=tuple(name for name in schema.sparse if not self._is_partial(name))
        )


def _named(groups: Literal["auto"] | Sequence[Sequence[str]]) -> set[str]:
    return set() if groups == "auto" else {name for group in groups for name in group}
