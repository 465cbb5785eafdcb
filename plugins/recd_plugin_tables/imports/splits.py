"""Which rows of an import are for training and which for the test."""

from __future__ import annotations

from datetime import date, datetime
from typing import Any, Literal, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import Field, field_validator, model_validator

from recd_plugin_tables.columns import ColumnOptions, Unit
from recd_plugin_tables.plan import REQUEST, ROW, SESSION, TIME
from recd_plugin_tables.values.cells import Cells
from recd_plugin_tables.values.hashing import mixed
from recd_plugin_tables.values.times import microseconds
from recd_plugins.api import DataError, PluginOptions

# Times that are kept to find where the test split begins.
_MOST_TIMES = 1 << 22


class SplitOptions(PluginOptions):
    """How rows are split into those for training and those for the test."""

    by: Literal["time", "session", "row"] = Field(
        default="time",
        description="The last ones by time; whole sessions; or rows, those of a request together. "
        "Sessions and rows are drawn by a hash, the same each time.",
    )
    test: float = Field(default=0.1, gt=0, lt=1, description="Share of the test split.")
    test_from: str | int | float | None = Field(
        default=None, description="With by: time, the first time of the test split in its place."
    )

    @field_validator("test_from", mode="before")
    @classmethod
    def _as_text(cls, given: Any) -> Any:
        """YAML reads 2024-05-01 as a date."""
        return str(given) if isinstance(given, date | datetime) else given

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        if self.test_from is not None and (self.by != "time" or "test" in self.model_fields_set):
            raise ValueError("test_from is for by: time, in place of test")
        return self


class Splitter:
    """Sees all rows, and then says of each whether it is of the test split.

    Args:
        options: how; None makes no test split.
        unit: of the table's times, where they are numbers.
    """

    def __init__(self, options: SplitOptions | None, unit: Unit | None) -> None:
        self._options = options
        self._salt = 1
        self._times: list[NDArray[np.int64]] = []
        self._num_times, self._level = 0, 0
        self._cut: int | None = None
        if options is not None and options.test_from is not None:
            self._cut = _time(options.test_from, unit)

    def see(self, batch: pa.RecordBatch) -> None:
        """Rows, in any order; all of them before ``test_rows`` is asked."""
        if self._options is None or self._options.by != "time" or self._cut is not None:
            return
        times = np.stack([batch[TIME].to_numpy(), batch[ROW].to_numpy()])
        self._times.append(self._thinned(times))
        self._num_times += self._times[-1].shape[1]
        while self._num_times > _MOST_TIMES:
            self._level += 1
            self._times = [self._thinned(np.concatenate(self._times, axis=1))]
            self._num_times = self._times[0].shape[1]

    def test_rows(self, batch: pa.RecordBatch) -> NDArray[np.bool_]:
        """Which rows are of the test split, bool ``[B]``."""
        if self._options is None:
            return np.zeros(batch.num_rows, np.bool_)
        if self._options.by == "time":
            if self._cut is None:
                self._cut = self._found_cut(self._options.test)
            return batch[TIME].to_numpy() >= self._cut
        # A row without a request is one of its own.
        key = SESSION if self._options.by == "session" else REQUEST
        share = mixed(batch[key].to_numpy(), self._salt) / 2.0**64
        return share < self._options.test

    def _thinned(self, times: NDArray[np.int64]) -> NDArray[np.int64]:
        """One of 2^level rows, by a hash of its number."""
        bits = mixed(times[1]) & np.uint64((1 << self._level) - 1)
        return times[:, bits == 0]

    def _found_cut(self, share: float) -> int:
        if not self._num_times:
            return 0
        times = np.concatenate(self._times, axis=1)[0]
        at = min(len(times) - 1, int(np.ceil(len(times) * (1 - share))))
        return int(np.partition(times, at)[at])


def _time(given: str | float, unit: Unit | None) -> int:
    text = isinstance(given, str)
    values = pa.array([given], pa.string() if text else None)
    cells = Cells(values, lambda _: "option split.test_from")
    use = ColumnOptions.model_validate({"as": "time"})
    found = microseconds(cells, None if text else (unit or use.unit))
    if found[0].as_py() is None:
        raise DataError(f"option split.test_from: {given} is no time")
    return int(found[0].as_py())
