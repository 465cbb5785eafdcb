"""Figures and tables of what was measured of cells."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence

from recd_plugin_recd.benchmarks.network.grid import Cell, Side
from recd_plugin_recd.benchmarks.network.link_trace import LinkTrace
from recd_plugin_recd.benchmarks.network.ranks import Measured
from recd_plugins.testing.benchmark import Detail, Figure, largest

_LOST = ("lookup", "gemm", "other", "all_to_all", "all_reduce")
HEADINGS = [
    "",
    "ms a step",
    "least",
    "most",
    "stock's best over it",
    "MB of a link",
    "MB a node sends",
    "counted by us",
    "MB predicted",
    "share of rate",
    "link, ms",
    "processors, ms",
    "predicted, ms",
]


class CellFigures:
    """One cell.

    Args:
        cell: where it was measured.
        sides: that count.
        found: by name of the side.
    """

    def __init__(self, cell: Cell, sides: Sequence[Side], found: Mapping[str, Measured]) -> None:
        self._cell = cell
        self.name = cell.name
        there = [side for side in sides if side.name in found]
        lost = [s.name for s in there if not all(map(math.isfinite, found[s.name].losses))]
        trained = [s for s in there if s.name not in lost and found[s.name].stock_seconds]
        self._found = {side.name: found[side.name] for side in trained}
        self._failures = {
            side.name: found[side.name].failure for side in there if found[side.name].failure
        } | dict.fromkeys(lost, "its loss became no finite number")
        self._ours = [side.name for side in trained if side.group != "stock"]
        self._deduplicated = {side.name: side.deduplicated for side in trained}
        #: Names of the sides that choose by themselves.
        self.autos = [side.name for side in trained if side.group == "auto"]

    def figures(self) -> Iterator[Figure]:
        """How much the best side, and ``auto``, gain over stock's best; and how links are used."""
        if not self._ours:
            return
        name = self._cell.name.replace(" ", "_")
        best = max(self._ours, key=self.speedup)
        yield Figure.of(f"{name}_speedup_best", self._speedups(best), unit="ratio", better="higher")
        for auto in self.autos:
            yield from self._of_auto(name, auto)
        if (shares := self._shares(best)) is not None:
            yield Figure.of(f"{name}_share_of_rate", shares, unit="share", better="higher")
        if (counted := self.counted_over_link().get(best)) is not None:
            figure = f"{name}_counted_over_link_bytes"
            yield Figure.of(figure, [counted], unit="ratio", better="higher")
        yield Figure.of(
            f"{name}_loss_max_abs_diff", [self._loss_diff()], unit="loss", better="lower"
        )

    def _of_auto(self, cell: str, side: str) -> Iterator[Figure]:
        """How near ``auto`` is to the best side, and to its prediction."""
        name = f"{cell}_{'ikjt' if self._deduplicated[side] else 'kjt'}_auto"
        yield Figure.of(f"{name}_speedup", self._speedups(side), unit="ratio", better="higher")
        if (best := self.best_beside(side)) is not None:
            over = self._over(side, best)
            yield Figure.of(f"{name}_over_best", over, unit="ratio", better="lower")
        found = self._found[side]
        if found.predicted_seconds is not None:
            factors = [found.predicted_seconds / seconds for seconds in found.seconds]
            yield Figure.of(f"{name}_predicted_over_step", factors, unit="ratio", better="lower")

    def best_beside(self, side: str) -> str | None:
        """The fastest other side, of plain batches where this one's are; None without another."""
        others = [
            other
            for other, deduplicated in self._deduplicated.items()
            if other != side and (self._deduplicated[side] or not deduplicated)
        ]
        return max(others, key=self.speedup, default=None)

    def over(self, side: str, other: str) -> float:
        """The step of a side over another's, in the median turn."""
        return statistics.median(self._over(side, other))

    def speedup(self, side: str) -> float:
        """The step of stock's best over that of a side, in the median turn."""
        return statistics.median(self._speedups(side))

    def predicted_over_step(self) -> dict[str, float]:
        """By side, of the median turn; of those that have a prediction."""
        return {
            name: found.predicted_seconds / self._median(name)
            for name, found in self._found.items()
            if found.predicted_seconds is not None
        }

    def counted_over_link(self) -> dict[str, float]:
        """By side, what we count of what a node sends over what its interface does."""
        return self._over_link({name: f.payload_between for name, f in self._found.items()})

    def predicted_over_link(self) -> dict[str, float]:
        """Likewise of predicted bytes; of those sides that have them."""
        return self._over_link({name: f.predicted_between for name, f in self._found.items()})

    def table(self) -> Detail:
        """All sides, the fastest first."""
        rows: list[list[str | float]] = []
        for name in sorted(self._found, key=self._median):
            found = self._found[name]
            link = found.link_bytes
            rate = self._cell.bytes_per_second
            shares = self._shares(name)
            rows.append(
                [
                    name,
                    1e3 * self._median(name),
                    1e3 * min(found.seconds),
                    1e3 * max(found.seconds),
                    self.speedup(name),
                    link / 1e6,
                    found.link_payload / 1e6,
                    found.payload_between / 1e6,
                    "" if found.predicted_between is None else found.predicted_between / 1e6,
                    "" if shares is None else statistics.median(shares),
                    "" if rate is None else 1e3 * link / rate,
                    1e3 * statistics.median(found.processor_seconds) / (os.cpu_count() or 1),
                    "" if found.predicted_seconds is None else 1e3 * found.predicted_seconds,
                ]
            )
        return Detail(self._cell.name, HEADINGS, rows)

    def lost(self) -> Detail | None:
        """Where a traced step leaves the link unused, the mean of all ranks; None without any."""
        rate = self._cell.bytes_per_second
        rows: list[list[str | float]] = []
        for name, found in self._found.items():
            if rate is None or not found.traces:
                continue
            lost = [trace.lost(rate) for trace in found.traces]
            step = statistics.mean(trace.end for trace in found.traces)
            by_stage = [statistics.mean(each.get(s, 0.0) for each in lost) for s in _LOST]
            hidden = statistics.mean(trace.hidden() for trace in found.traces)
            rows.append([name, step, step - sum(by_stage), *by_stage, hidden])
        headings = ["ms of a traced step", "step", "link at its rate"]
        headings += [f"less than that in {stage}" for stage in _LOST]
        headings.append("share carried while ranks compute")
        return Detail(f"{self._cell.name}: the link", headings, rows) if rows else None

    def traces(self) -> dict[str, tuple[LinkTrace, float]]:
        """The first rank's step of each traced side, and the rate of its link."""
        rate = self._cell.bytes_per_second
        return {
            f"{self._cell.name}: {name}": (found.traces[0], rate)
            for name, found in self._found.items()
            if rate is not None and found.traces
        }

    def notes(self) -> list[str]:
        """What could not be trained."""
        return [
            f"{self._cell.name}: {name} is left out: {why}" for name, why in self._failures.items()
        ]

    def _over_link(self, sent: Mapping[str, float | None]) -> dict[str, float]:
        return {
            name: num_bytes / link
            for name, num_bytes in sent.items()
            if num_bytes is not None and (link := self._found[name].link_payload)
        }

    def _median(self, name: str) -> float:
        return statistics.median(self._found[name].seconds)

    def _speedups(self, name: str) -> list[float]:
        """The step of stock's best over that of a side, by turn."""
        found = self._found[name]
        pairs = zip(found.stock_seconds, found.seconds, strict=True)
        return [stock / own for stock, own in pairs]

    def _over(self, side: str, other: str) -> list[float]:
        """Of sides of two runs, by what stock's best took in each."""
        pairs = zip(self._speedups(side), self._speedups(other), strict=False)
        return [others / own for own, others in pairs]

    def _shares(self, name: str) -> list[float] | None:
        rate = self._cell.bytes_per_second
        if rate is None:
            return None
        found = self._found[name]
        return [found.link_bytes / rate / seconds for seconds in found.seconds]

    def _loss_diff(self) -> float:
        """The largest difference of the losses of one step, in two rounds of the batches."""
        sides = [found for found in self._found.values() if found.losses]
        # Files of before that was kept have steps alone, of each side as many as it had turns.
        is_known = all(each.num_batches for each in sides)
        of_rounds = (each.losses[: 2 * each.num_batches or None] for each in sides)
        return largest(largest(step) - min(step) for step in zip(*of_rounds, strict=is_known))
