"""Dataset ``dlrm.random`` of randomly generated rows."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import Field, NonNegativeInt, PositiveInt

from recd_plugin_dlrm import draws
from recd_plugin_dlrm.draws import stream_of
from recd_plugins.api import (
    DataError,
    Dataset,
    FeatureSchema,
    Origin,
    PluginOptions,
    Reader,
    Rows,
    Split,
    readers,
)

#: Rows that are generated, stored and read at a time.
UNIT_ROWS = 4096
LABEL = "label"


class DrawnRowOptions(PluginOptions):
    """Options of datasets with randomly generated dense features and labels."""

    rows: PositiveInt = Field(description="Rows per epoch.")
    test_rows: NonNegativeInt = Field(
        default=0, description="Rows of the test split; 0 for no test split."
    )
    seed: NonNegativeInt = Field(default=0, description="Random seed.")
    dense: NonNegativeInt = Field(
        default=13, description="Number of dense features, named dense_0 and so on."
    )
    dense_distribution: Literal["uniform", "normal"] = Field(
        default="uniform",
        description="Distribution of dense features: uniform from 0 to 1, or normal.",
    )
    dense_mean: float = Field(
        default=0.0, allow_inf_nan=False, description="Mean of normal dense features."
    )
    dense_std: float = Field(
        default=1.0,
        gt=0,
        allow_inf_nan=False,
        description="Standard deviation of normal dense features.",
    )
    labels: Literal["random", "learnable"] = Field(
        default="random",
        description=(
            "random: a rounded uniform number that cannot be predicted. learnable: "
            "probabilities that depend on dense features and on hidden effects of "
            "ids."
        ),
    )
    prefetch: NonNegativeInt = Field(
        default=4,
        description=(
            "Batches that a thread generates ahead; 0 generates them in the trainer's thread."
        ),
    )


@dataclass(frozen=True, eq=False)
class FeatureLists:
    """Ids of one feature: int32 offsets ``[rows + 1]`` and int64 ids ``[offsets[-1]]``."""

    offsets: NDArray[np.int32]
    ids: NDArray[np.int64]


def schema_of(options: DrawnRowOptions, features: tuple[str, ...]) -> FeatureSchema:
    """Return the feature schema of a random dataset with the given sparse features."""
    for name in features:
        if name in (LABEL, *_dense_names(options)):
            raise DataError(
                f"sparse feature {name!r} has the name of the label or a dense column. Rename it."
            )
    return FeatureSchema(features, _dense_names(options), LABEL)


def make_rows(
    options: DrawnRowOptions, first_row: int, num_rows: int, lists: Mapping[str, FeatureLists]
) -> pa.RecordBatch:
    """Return rows with the given id lists, random dense features (float32) and labels (int8)."""
    names = _dense_names(options)
    logit = np.zeros(num_rows, np.float64)
    dense = []
    for number in range(options.dense):
        stream = stream_of(options.seed, "dense", number)
        if options.dense_distribution == "uniform":
            drawn = draws.uniforms(stream, first_row, num_rows)
            standard, values = (drawn - 0.5) * math.sqrt(12), drawn
        else:
            standard = draws.normals(stream, first_row, num_rows)
            values = options.dense_mean + options.dense_std * standard
        logit += standard / math.sqrt(options.dense)
        dense.append(values.astype(np.float32))
    drawn = draws.uniforms(stream_of(options.seed, "label"), first_row, num_rows)
    if options.labels == "random":
        labels = drawn >= 0.5
    else:
        effects = np.zeros(num_rows, np.float64)
        for name, each in lists.items():
            draws.add_effects(
                stream_of(options.seed, "effects", name), each.offsets, each.ids, effects
            )
        logit += 2 * effects / math.sqrt(max(1, len(lists)))
        labels = drawn < 1 / (1 + np.exp(-logit))
    columns = [pa.ListArray.from_arrays(each.offsets, each.ids) for each in lists.values()]
    return pa.RecordBatch.from_arrays(
        [*columns, *map(pa.array, dense), pa.array(labels.astype(np.int8))],
        names=[*lists, *names, LABEL],
    )


def units_of(options: DrawnRowOptions, split: Split) -> tuple[readers.Unit, ...]:
    """Return the units (ranges of rows) of a split. Test rows follow the training rows."""
    start, stop = 0, options.rows
    if split == "test":
        start, stop = stop, stop + options.test_rows
    return tuple(
        readers.Unit(0, number, first, min(UNIT_ROWS, stop - first))
        for number, first in enumerate(range(start, stop, UNIT_ROWS))
    )


def _dense_names(options: DrawnRowOptions) -> tuple[str, ...]:
    return tuple(f"dense_{number}" for number in range(options.dense))


# Increase when the same options would generate other rows.
_VERSION = 1
_MOST_IDS = 1 << 53


class Random(Dataset):
    """DLRM's random dataset. Rows are generated from a seed when they are read."""

    name = "dlrm.random"
    free_options = frozenset({"prefetch"})

    class Options(DrawnRowOptions):
        sparse: PositiveInt | dict[str, PositiveInt] = Field(
            default=8,
            description=(
                "Number of sparse features, named sparse_0 and so on; or the number of "
                "ids of each feature by name."
            ),
        )
        num_ids: PositiveInt = Field(
            default=1_000_000,
            le=_MOST_IDS,
            description="If sparse is a number, the ids of each feature: 0 to num_ids - 1.",
        )
        num_indices_per_lookup: PositiveInt = Field(
            default=10, le=100_000, description="Ids per list; the maximum if fixed is false."
        )
        fixed: bool = Field(
            default=True,
            description="Every list has num_indices_per_lookup ids; false draws 1 to that many.",
        )
        exponent: float = Field(
            default=0.0,
            ge=0,
            allow_inf_nan=False,
            description=(
                "0 draws ids uniformly; otherwise Zipf: id k - 1 in proportion to k^-exponent."
            ),
        )

    options: Options

    def prepare(self) -> None:
        self.schema()

    def schema(self) -> FeatureSchema:
        return schema_of(self.options, tuple(self._num_ids))

    def splits(self) -> tuple[Split, ...]:
        return ("train", "test") if self.options.test_rows else ("train",)

    def reader(self, *, rank: int, world_size: int, batch_size: int, split: Split) -> Reader:
        options = self.options
        if split not in self.splits():
            raise DataError(f"dataset {self.name!r} has no test split. Set option 'test_rows'.")
        units = units_of(options, split)
        drawn = options.model_dump(mode="json", exclude={"prefetch", "rows", "test_rows"})
        return readers.PlannedReader(
            readers.ReadPlan(units, batch_size),
            self._read,
            data={"split": split, "options": readers.digest([_VERSION, units[0].first_row, drawn])},
            what=f"{self.name} ({split})",
            rank=rank,
            world_size=world_size,
            ahead=options.prefetch,
        )

    def _read(self, pieces: Iterator[readers.Piece]) -> Generator[Rows, None, None]:
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
        options = self.options
        offsets = draws.list_offsets(
            stream_of(options.seed, "lengths", name),
            first_row,
            num_rows,
            options.num_indices_per_lookup,
            options.fixed,
        )
        stream = stream_of(options.seed, "ids", name)
        if options.exponent == 0:
            return FeatureLists(offsets, draws.uniform_ids(stream, first_row, offsets, num_ids))
        ids = draws.zipf_ids(stream, first_row, offsets, num_ids, options.exponent)
        return FeatureLists(offsets, ids)

    @property
    def _num_ids(self) -> dict[str, int]:
        sparse = self.options.sparse
        if isinstance(sparse, dict):
            return sparse
        return {f"sparse_{number}": self.options.num_ids for number in range(sparse)}
