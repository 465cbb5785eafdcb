"""Dataset ``dlrm.random``."""

from __future__ import annotations

from collections.abc import Generator, Iterator

from pydantic import Field, PositiveInt

from recd_plugin_dlrm.draws import stream_of
from recd_plugin_dlrm.random_rows import (
    DrawnRowOptions,
    FeatureLists,
    check_features,
    make_rows,
    schema_of,
    units_of,
)
from recd_plugins.api import Dataset, FeatureSchema, Origin, Reader, Rows, Split
from recd_plugins.api.reading import Piece, PlannedReader, ReadPlan, digest

# Raised when the same options would give other rows.
_VERSION = 1
_MOST_IDS = 1 << 53


class Random(Dataset):
    """Rows drawn by a seed, never stored: DLRM's random data."""

    name = "dlrm.random"
    free_options = frozenset({"prefetch"})

    class Options(DrawnRowOptions):
        sparse: PositiveInt | dict[str, PositiveInt] = Field(
            default=8,
            description="How many sparse features, sparse_0 and so on; or the number of ids of "
            "each by its name.",
        )
        num_ids: PositiveInt = Field(
            default=1_000_000,
            le=_MOST_IDS,
            description="Ids of each feature where sparse is a number: 0 to num_ids - 1.",
        )
        num_indices_per_lookup: PositiveInt = Field(
            default=10, le=100_000, description="Ids in a list, or the most where fixed is false."
        )
        fixed: bool = Field(
            default=True,
            description="Every list has num_indices_per_lookup ids; false draws 1 to that many.",
        )
        exponent: float = Field(
            default=0.0,
            ge=0,
            allow_inf_nan=False,
            description="0 draws ids uniformly; else id k - 1 in proportion to k^-exponent: Zipf.",
        )

    options: Options

    def prepare(self) -> None:
        """Nothing is stored; names are checked."""
        check_features(self.options, tuple(self._num_ids))

    def schema(self) -> FeatureSchema:
        return schema_of(self.options, tuple(self._num_ids))

    def splits(self) -> tuple[Split, ...]:
        return ("train", "test") if self.options.test_rows else ("train",)

    def reader(self, *, rank: int, world_size: int, batch_size: int, split: Split) -> Reader:
        options = self.options
        units = units_of(options, split, self.name)
        drawn = options.model_dump(mode="json", exclude={"prefetch", "rows", "test_rows"})
        return PlannedReader(
            ReadPlan(units, batch_size),
            self._read,
            data={"split": split, "options": digest([_VERSION, units[0].first_row, drawn])},
            what=f"{self.name} ({split})",
            rank=rank,
            world_size=world_size,
            ahead=options.prefetch,
        )

    def _read(self, pieces: Iterator[Piece]) -> Generator[Rows, None, None]:
        origin = f"{self.name}, seed {self.options.seed}"
        for piece in pieces:
            first = piece.unit.first_row + piece.skip
            lists = {
                name: self._lists(name, num_ids, first, piece.num_rows)
                for name, num_ids in self._num_ids.items()
            }
            rows = make_rows(self.options, first, piece.num_rows, lists)
            yield Rows(rows, (Origin(origin, first, piece.num_rows),))

    def _lists(self, name: str, num_ids: int, first_row: int, num_rows: int) -> FeatureLists:
        from recd_plugin_dlrm import random_kernels as kernels

        options = self.options
        offsets = kernels.list_offsets(
            stream_of(options.seed, "lengths", name),
            first_row,
            num_rows,
            options.num_indices_per_lookup,
            options.fixed,
        )
        stream = stream_of(options.seed, "ids", name)
        if options.exponent == 0:
            return FeatureLists(offsets, kernels.uniform_ids(stream, first_row, offsets, num_ids))
        ids = kernels.zipf_ids(stream, first_row, offsets, num_ids, options.exponent)
        return FeatureLists(offsets, ids)

    @property
    def _num_ids(self) -> dict[str, int]:
        sparse = self.options.sparse
        if isinstance(sparse, dict):
            return sparse
        return {f"sparse_{number}": self.options.num_ids for number in range(sparse)}
