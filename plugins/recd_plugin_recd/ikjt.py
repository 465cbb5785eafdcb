"""Converter plugins that build deduplicated (RecD, section 4.2) or plain KeyedJaggedTensors."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Literal

from pydantic import Field, field_validator

from recd_plugins.api import (
    Converter,
    DataError,
    FeatureSchema,
    PlainConverter,
    PluginOptions,
    Rows,
    text_utils,
)

if TYPE_CHECKING:
    from torch import Tensor

    from recd_plugins.api import Batch, InverseKeyedJaggedTensor, dedup

_logger = logging.getLogger(__name__)

#: auto compares neighbours only if that stores at most this many times the ids of comparing all.
_NEARLY_ALL = 1.01


@dataclass(frozen=True)
class DedupGroup:
    """Features that repeat in the same rows, so that they share one tensor of inverse indices.

    Attributes:
        features: names of the features.
        dedupe_factor: ids in the sample divided by ids in its unique rows; 1.0 without ids.
        deduplicated: whether the features are stored in an InverseKeyedJaggedTensor. Otherwise they
            stay in a plain KeyedJaggedTensor.
    """

    features: tuple[str, ...]
    dedupe_factor: float
    deduplicated: bool


class IkjtConverter(Converter):
    """Converts batches to InverseKeyedJaggedTensors, which store equal rows only once."""

    name = "recd.ikjt"

    class Options(PluginOptions):
        """Options of the plugin ``recd.ikjt``."""

        groups: Literal["auto"] | list[list[str]] = Field(
            default="auto",
            description="Lists of features to deduplicate together. Other features stay plain. "
            "auto: group features that repeat in the same rows of the first batch.",
        )
        min_dedupe_factor: float = Field(
            default=1.5,
            ge=1.0,
            description="With auto, groups with a lower DedupeFactor (ids divided by ids in unique "
            "rows) stay plain.",
        )
        compare: Literal["auto", "neighbours", "all"] = Field(
            default="auto",
            description="Rows to compare. neighbours: each row only with the previous row, which "
            "is faster. all: all rows of a batch. auto: neighbours, unless all finds many more "
            "equal rows in the first batch.",
        )

        user_features: Literal["auto"] | list[str] = Field(
            default="auto",
            description="Features that are equal for all candidates of a request, sparse or dense. "
            "Models compute layers of these features once per run of equal rows. auto: choose "
            "from the first batch.",
        )

        @field_validator("groups")
        @classmethod
        def _no_feature_twice(cls, groups: str | list[list[str]]) -> str | list[list[str]]:
            names = list(chain(*groups)) if isinstance(groups, list) else []
            if twice := sorted({name for name in names if names.count(name) > 1}):
                raise ValueError(
                    "option 'groups' has these features more than once: "
                    f"{', '.join(map(repr, twice))}. Put each feature into one group."
                )
            return groups

    options: Options

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._groups: tuple[DedupGroup, ...] | None = None

    @cached_property
    def _deduplicate(self) -> dedup.Deduplicator:
        from recd_plugins.api import dedup

        return dedup.Deduplicator(neighbours_only=self.options.compare == "neighbours")

    def fit(self, sample: Rows, schema: FeatureSchema) -> None:
        """Choose the groups of features to deduplicate, based on a sample of rows."""
        groups, least = self.options.groups, 0.0
        if groups == "auto":
            groups, least = self._coinciding(sample, schema), self.options.min_dedupe_factor
        else:
            check_features(f"{self.name}: groups", chain(*groups), schema.sparse)
        factors = [ikjt.dedupe_factor() for ikjt in self._deduplicated(sample, groups)]
        self._groups = tuple(
            DedupGroup(tuple(group), factor, factor >= least)
            for group, factor in zip(groups, factors, strict=True)
        )
        if self.options.compare == "auto":
            self._compare_neighbours_if_enough(sample)
        names = self.options.user_features
        features = (*schema.sparse, *schema.dense)
        columns = self._columns(sample, schema)
        if names == "auto":
            names = self._repeating(columns)
        else:
            check_features(f"{self.name}: user_features", names, features, "feature")
            self._warn_if_changing(columns, names)
        user = set(chain(*columns)).intersection(names)
        self.user_features = tuple(name for name in features if name in user)

    def report(self) -> tuple[DedupGroup, ...]:
        """Return the groups that ``fit`` chose. Empty before ``fit``."""
        return self._groups or ()

    @property
    def neighbours_only(self) -> bool:
        """Return whether each row is compared only with the previous row, to find equal rows."""
        return self._deduplicate.neighbours_only

    def dedupe_factors(self) -> Mapping[str, float]:
        return {
            feature: group.dedupe_factor
            for group in self.report()
            if group.deduplicated
            for feature in group.features
        }

    def convert(self, rows: Rows, schema: FeatureSchema) -> Batch:
        """Convert rows to a batch. Calls ``fit`` with these rows if it was never called."""
        from recd_plugins.api import Batch, arrow, from_columns

        if self._groups is None:
            self.fit(rows, schema)
        groups = [group.features for group in self.report() if group.deduplicated]
        grouped = set(chain(*groups))
        plain = {
            name: arrow.sparse_column(rows, name) for name in schema.sparse if name not in grouped
        }
        user = set(self.user_features)
        return Batch(
            dense_features=arrow.dense_features(rows, schema.dense),
            labels=arrow.labels(rows, schema),
            kjt=from_columns.kjt_from_columns(plain, len(rows)) if plain else None,
            ikjts=self._deduplicated(rows, groups),
            user_features=tuple(name for name in chain(*groups) if name in user),
            user_dense_columns=tuple(n for n, name in enumerate(schema.dense) if name in user),
        )

    def _deduplicated(
        self, rows: Rows, groups: Sequence[Sequence[str]]
    ) -> tuple[InverseKeyedJaggedTensor, ...]:
        from recd_plugins.api import arrow, from_columns

        columns = [{name: arrow.sparse_column(rows, name) for name in group} for group in groups]
        return from_columns.ikjts_from_columns(columns, len(rows), self._deduplicate)

    def _compare_neighbours_if_enough(self, sample: Rows) -> None:
        """Compare each row only with the previous row if that finds most equal rows of a sample."""
        from recd_plugins.api import dedup

        groups = [group.features for group in self.report() if group.deduplicated]
        compare_all, all_equal = self._deduplicate, self._deduplicated(sample, groups)
        self._deduplicate = dedup.Deduplicator(neighbours_only=True)
        neighbours = self._deduplicated(sample, groups)
        for more, ikjt in zip(neighbours, all_equal, strict=True):
            if more.values().numel() > _NEARLY_ALL * ikjt.values().numel():
                self._deduplicate = compare_all

    def _columns(self, sample: Rows, schema: FeatureSchema) -> dict[tuple[str, ...], Tensor]:
        """Return values to compare rows of a sample by, ``[B]``, per group and dense feature."""
        from recd_plugins.api import arrow

        groups = [group.features for group in self.report() if group.deduplicated]
        columns: dict[tuple[str, ...], Tensor] = {
            tuple(ikjt.keys()): ikjt.inverse_lookup() for ikjt in self._deduplicated(sample, groups)
        }
        dense = arrow.dense_features(sample, schema.dense)
        return columns | {
            (name,): column for name, column in zip(schema.dense, dense.unbind(1), strict=True)
        }

    def _warn_if_changing(
        self, columns: Mapping[tuple[str, ...], Tensor], names: Iterable[str]
    ) -> None:
        user = {name: column for each, column in columns.items() for name in each if name in names}
        runs = {name: _num_runs([column]) for name, column in user.items()}
        num_rows = max(map(len, user.values()), default=0)
        if user and _num_runs(user.values()) * self.options.min_dedupe_factor > num_rows:
            _logger.warning(
                "%s: user_features change in nearly every row of the first batch, so layers of "
                "user features save little. %r changes most often: is it a feature of candidates?",
                self.name,
                max(runs, key=runs.__getitem__),
            )

    def _repeating(self, columns: Mapping[tuple[str, ...], Tensor]) -> list[str]:
        """Return the features whose common runs of equal rows save most.

        Features with long runs come first. A feature is left out if it shortens the common runs so
        much that the number of features times the number of saved rows falls.
        """
        runs = {names: _num_runs([column]) for names, column in columns.items()}
        num_rows = max(map(len, columns.values()), default=0)
        chosen: list[str] = []
        kept: list[Tensor] = []
        most_saved = 0
        for names in sorted(columns, key=runs.__getitem__):
            if runs[names] * self.options.min_dedupe_factor > num_rows:
                break
            num_saved = num_rows - _num_runs([*kept, columns[names]])
            if (saved := (len(chosen) + len(names)) * num_saved) > most_saved:
                most_saved = saved
                kept.append(columns[names])
                chosen += names
        return chosen

    def _coinciding(self, sample: Rows, schema: FeatureSchema) -> list[list[str]]:
        """Group features that have the same inverse indices in the sample."""
        groups: dict[bytes, list[str]] = {}
        for ikjt in self._deduplicated(sample, [[name] for name in schema.sparse]):
            groups.setdefault(ikjt.inverse_lookup().numpy().tobytes(), []).extend(ikjt.keys())
        return list(groups.values())


def _num_runs(columns: Iterable[Tensor]) -> int:
    from recd_plugins.api import jagged

    return jagged.runs_of_equal_rows([*columns])[0].numel()


def check_features(
    option: str, names: Iterable[str], known: Sequence[str], kind: str = "sparse feature"
) -> None:
    """Raise DataError if a name is not in ``known``. ``option`` names the option in errors."""
    for name in names:
        if name not in known:
            hint = text_utils.did_you_mean(name, known) or "."
            raise DataError(
                f"{option}: {name!r} is not a {kind}{hint} Use one of: "
                f"{', '.join(map(repr, known))}."
            )


class ListDictConverter(IkjtConverter):
    """Like ``recd.ikjt``, but reads columns in the layout list_dict without comparing ids.

    list_dict stores each distinct list once per row group. If a batch spans two row groups, equal
    lists of the two groups become separate unique rows. In columns with other layouts, ids are
    compared.
    """

    name = "recd.list_dict"

    def _deduplicated(
        self, rows: Rows, groups: Sequence[Sequence[str]]
    ) -> tuple[InverseKeyedJaggedTensor, ...]:
        from recd_plugins.api import BrokenListError, arrow, from_columns

        stored, by_ids = {}, []
        for number, group in enumerate(groups):
            columns = {name: arrow.dictionary_column(rows, name) for name in group}
            found = {name: column for name, column in columns.items() if column is not None}
            if len(found) == len(group):
                stored[number] = found
            else:
                by_ids.append(number)
        try:
            passed_on = from_columns.ikjts_from_dictionaries(list(stored.values()), len(rows))
        except BrokenListError as error:
            names = list(chain.from_iterable(stored.values()))
            raise arrow.broken_list(rows, names[error.column]) from error
        compared = super()._deduplicated(rows, [groups[number] for number in by_ids])
        ikjts = dict(zip([*stored, *by_ids], [*passed_on, *compared], strict=True))
        return tuple(ikjts[number] for number in range(len(groups)))


class KjtConverter(PlainConverter):
    """Converts batches to plain KeyedJaggedTensors, without deduplication."""

    name = "recd.kjt"
