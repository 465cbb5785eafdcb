"""Choice of the rows to cache and of the batch size, which share memory (SCARS, section II)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from recd_plugin_scars.planning.load import TableLoad
from recd_plugins.api import SetupError


@dataclass(frozen=True)
class StepCosts:
    """Costs of training, all in one unit such as seconds.

    Attributes:
        sample: cost per sample, without fetching rows.
        step: fixed cost per training step (tau in the SCARS paper).
        byte: cost per byte of a row that is fetched because it is not cached.
    """

    sample: float = 1.0
    step: float = 0.0
    byte: float = 1.0


@dataclass(frozen=True)
class Memory:
    """Memory in bytes, shared by cached rows and the batch.

    Attributes:
        total: total memory (M in the SCARS paper).
        sample: memory of one sample (a in the SCARS paper).
        least_batch: minimum batch size.
        largest_batch: maximum batch size.
    """

    total: float
    sample: float
    least_batch: float = 1.0
    largest_batch: float = np.inf

    def batch_size(self, cached: float) -> float:
        """Return the largest batch size if cached rows take ``cached`` bytes of the memory."""
        return min(self.largest_batch, (self.total - cached) / self.sample)


@dataclass(frozen=True)
class Optimum:
    """The best number of rows to cache, ``place``, with the batch size and the cost per sample."""

    place: int
    batch_size: float
    cost: float


class RowOrder:
    """The rows of several tables, sorted by the traffic saved per byte of cache, largest first.

    A byte of cache saves u, the probability that a batch of b samples reads the row. With l lookups
    per sample that read the row with probability P, ``u = 1 - exp(b * l * log(1 - P))``, so the
    order is the same for all b. The first ``place`` rows of this order are cached.
    """

    def __init__(self, loads: Sequence[TableLoad], row_bytes: Sequence[float]) -> None:
        segments = [load.segments for load in loads]
        with np.errstate(divide="ignore"):
            rates = [
                -load.lookups * np.log1p(-each.probabilities)
                for load, each in zip(loads, segments, strict=True)
            ]
        tables = [np.full(len(rate), index) for index, rate in enumerate(rates)]
        all_rates = np.concatenate(rates)
        order = np.argsort(-all_rates, kind="stable")
        self._rates = all_rates[order]
        self._tables = np.concatenate(tables)[order]
        self._row_bytes = np.asarray(row_bytes, dtype=np.float64)[self._tables]
        num_rows = np.concatenate([each.num_rows for each in segments])[order]
        self._bytes = num_rows * self._row_bytes
        self._ends = np.concatenate([[0], np.cumsum(num_rows)])
        self._byte_ends = np.concatenate([[0.0], np.cumsum(self._bytes)])
        self._num_tables = len(loads)
        self.num_rows = int(self._ends[-1])

    def rows(self, place: int) -> list[int]:
        """Return how many rows of each table are among the first ``place`` rows."""
        segment, part = self._at(place)
        counts = np.bincount(
            self._tables[:segment],
            weights=np.diff(self._ends[: segment + 1]),
            minlength=self._num_tables,
        ).astype(np.int64)
        if part:
            counts[self._tables[segment]] += part
        return [int(count) for count in counts]

    def bytes(self, place: int) -> float:
        """Return the total bytes of the first ``place`` rows."""
        segment, part = self._at(place)
        return float(self._byte_ends[segment]) + (part * self._row_bytes[segment] if part else 0.0)

    def fitting(self, num_bytes: float) -> int:
        """Return the largest number of rows that fit into ``num_bytes``."""
        segment = int(np.searchsorted(self._byte_ends, num_bytes, "right")) - 1
        if segment == len(self._bytes):
            return self.num_rows
        part = (num_bytes - self._byte_ends[segment]) // self._row_bytes[segment]
        return int(self._ends[segment]) + int(part)

    def useful(self, samples: float) -> int:
        """Return the number of rows expected to be read more than once in ``samples`` samples."""
        return int(self._ends[np.searchsorted(-self._rates, -1 / samples, "left")])

    def fetched_bytes(self, place: int, batch_size: float) -> float:
        """Return the bytes of a batch's distinct rows if the first ``place`` rows are cached."""
        segment, part = self._at(place)
        seen = -np.expm1(-batch_size * self._rates[segment:])
        fetched = float(seen @ self._bytes[segment:])
        return fetched - part * float(seen[0] * self._row_bytes[segment]) if part else fetched

    def cost(self, place: int, memory: Memory, costs: StepCosts) -> float:
        """Return the cost per sample if the first ``place`` rows are cached.

        Computes ``f = sample + (tau + byte * sum of d * u) / b`` (SCARS, section II): ``sample`` is
        the cost per sample, ``tau`` the fixed cost per step, ``byte`` the cost per fetched byte,
        ``d`` and ``u`` are the bytes and the fetch probability of each row that is not cached, and
        ``b`` is the batch size that fits beside the cache.
        """
        return costs.sample + self._of_step(place, memory, costs)

    def _of_step(self, place: int, memory: Memory, costs: StepCosts) -> float:
        batch_size = memory.batch_size(self.bytes(place))
        fetched = self.fetched_bytes(place, batch_size)
        return (costs.step + costs.byte * fetched) / batch_size

    def best(self, memory: Memory, costs: StepCosts, last: int | None = None) -> Optimum:
        """Return the number of cached rows with the least cost per sample, at most ``last``.

        Raises:
            SetupError: the smallest batch does not fit into memory, even without cached rows.
        """
        room = memory.total - memory.sample * memory.least_batch
        if room < 0:
            raise SetupError(
                f"the memory of {memory.total:,.0f} bytes is too small for a batch of "
                f"{memory.least_batch:,.0f} samples of {memory.sample:,.0f} bytes each. Raise "
                "the memory (--memory), or lower the bytes per sample (--sample-bytes)."
            )
        most = min(self.fitting(room), self.num_rows if last is None else last)
        # Excludes the constant cost per sample, which would round small differences away.
        place = least(lambda place: self._of_step(place, memory, costs), most)
        return Optimum(place, memory.batch_size(self.bytes(place)), self.cost(place, memory, costs))

    def _at(self, place: int) -> tuple[int, int]:
        """Return the segment that contains row ``place``, and the row's index in the segment."""
        segment = int(np.searchsorted(self._ends, place, "right")) - 1
        return segment, place - int(self._ends[segment])


def least(function: Callable[[int], float], last: int) -> int:
    """Return an argument from 0 to ``last`` that minimises ``function``, in O(log last) calls.

    Meant for functions with few local minima. Evaluates ``function`` near both ends and at evenly
    spaced points, then bisects around each local minimum.
    """
    function = cache(function)
    parts = max(1, last.bit_length())
    near_an_end = [min(last, 1 << power) for power in range(parts)]
    evenly = [last * part // parts for part in range(parts + 1)]
    places = sorted({*near_an_end, *(last - place for place in near_an_end), *evenly})
    values = [function(place) for place in places]
    found = set(places)
    for index, value in enumerate(values):
        before, after = max(index - 1, 0), min(index + 1, len(places) - 1)
        if value <= values[before] and value <= values[after]:
            found.add(_by_halves(function, places[before], places[after]))
    return min(found, key=lambda place: (function(place), place))


def _by_halves(function: Callable[[int], float], low: int, high: int) -> int:
    while low < high:
        middle = (low + high) // 2
        if function(middle + 1) < function(middle):
            low = middle + 1
        else:
            high = middle
    return low
