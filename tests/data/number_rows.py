"""A dataset of numbers, and plugins that show whether other processes have the trainer's state."""

from __future__ import annotations

import os
import random
from collections.abc import Generator, Iterator

import pyarrow as pa
from torch import Tensor

from recd_plugins.data.reader import Piece, PlannedReader, ReadPlan, Unit
from recd_plugins.interfaces import (
    Converter,
    Dataset,
    FeatureSchema,
    Origin,
    PluginOptions,
    Preprocessing,
    Reader,
    Rows,
    Split,
)
from recd_plugins.interfaces.batch import Batch
from recd_plugins.runtime.errors import DataError

_FILE = "numbers.log"
_ROWS, _UNIT = 112, 20


class Numbers(Dataset):
    """A dataset whose item is the row number. The three rows of a session have equal visits."""

    name = "contract.numbers"

    class Options(PluginOptions):
        broken_row: int | None = None
        shuffle: bool = True

    options: Options

    def prepare(self) -> None:
        pass

    def schema(self) -> FeatureSchema:
        return FeatureSchema(("item", "visits"), ("number",), "label")

    def splits(self) -> tuple[Split, ...]:
        return ("train", "test")

    def reader(self, *, rank: int, world_size: int, batch_size: int, split: Split) -> Reader:
        num_rows = _ROWS if split == "train" else _ROWS // 2
        units = [
            Unit(0, group, first, min(_UNIT, num_rows - first))
            for group, first in enumerate(range(0, num_rows, _UNIT))
        ]
        plan = ReadPlan(tuple(units), batch_size, self.options.shuffle)
        what, ranks = f"the {split} split of {_FILE}", {"rank": rank, "world_size": world_size}
        return PlannedReader(plan, self._read, data={"split": split}, what=what, **ranks, ahead=0)

    def _read(self, pieces: Iterator[Piece]) -> Generator[Rows, None, None]:
        for piece in pieces:
            first = piece.unit.first_row + piece.skip
            numbers = range(first, first + piece.num_rows)
            if self.options.broken_row in numbers:
                raise DataError(f"{_FILE}: row {self.options.broken_row} is broken")
            visits = [[row // 3, 7][: row // 3 % 3] for row in numbers]
            columns = {
                "item": pa.array(numbers, pa.int64()),
                "visits": pa.array(visits, pa.list_(pa.int64())),
                "number": pa.array(numbers, pa.float32()),
                "label": pa.array([row % 2 for row in numbers], pa.int8()),
            }
            origin = Origin(_FILE, first, piece.num_rows)
            yield Rows(pa.RecordBatch.from_pydict(columns), (origin,))


class Unrepeatable(Converter):
    """A converter that deduplicates ``visits``. Only the trainer can fit it, and only once."""

    name = "contract.unrepeatable"

    class Options(PluginOptions):
        trainer: int

    options: Options

    def fit(self, sample: Rows, schema: FeatureSchema) -> None:
        if os.getpid() != self.options.trainer or hasattr(self, "_kept"):
            raise DataError("the converter was fitted again, by a reader")
        self._kept = random.random()

    def convert(self, rows: Rows, schema: FeatureSchema) -> Batch:
        from recd_plugins.data.arrow import dense_features, labels, sparse_column
        from recd_plugins.sparse.dedup import Deduplicator
        from recd_plugins.sparse.from_columns import ikjts_from_columns, kjt_from_columns

        if not hasattr(self, "_kept"):
            raise DataError("the reader's converter is not fitted")
        visits = {"visits": sparse_column(rows, "visits")}
        return Batch(
            dense_features(rows, schema.dense),
            labels(rows, schema.label),
            kjt_from_columns({"item": sparse_column(rows, "item")}, len(rows)),
            ikjts_from_columns([visits], len(rows), Deduplicator()),
        )


class Noise(Preprocessing):
    """A preprocessing that adds a random number per object to ids, and fails at one id."""

    name = "contract.noise"

    class Options(PluginOptions):
        fails_at: int | None = None

    options: Options

    def __init__(self, options: PluginOptions) -> None:
        super().__init__(options)
        self._added = random.SystemRandom().randrange(2**40)

    def transform(self, values: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        if self.options.fails_at is not None and bool((values == self.options.fails_at).any()):
            raise ValueError("this id brings bad luck")
        return values + self._added, offsets
