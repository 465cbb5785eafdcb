"""Report of ``recd run`` on TinyLFU caches: counted and predicted traffic."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from torch import nn

from recd_plugin_scars.api import CacheStrategy, cache_traffic
from recd_plugins.api import Section, TableStrategy, TrainedRun

Figures = Mapping[str, Mapping[str, float]]


class TinyLfuStrategy(CacheStrategy):
    """Table strategy of tables cached with TinyLFU. Adds a section to the run report."""

    @classmethod
    def observe(cls, parts: Sequence[TableStrategy], model: nn.Module, steps: int) -> Figures:
        """Return this rank's mean counts per step, keyed by table name."""
        return {
            table: {
                "hits": traffic.hits / steps,
                "bytes": (traffic.bytes_read + traffic.bytes_written) / steps,
                **{name: traffic.by_policy[name] / steps for name in ("admitted", "rejected")},
            }
            for table, traffic in cache_traffic(model).items()
            if steps and any(table in part.caches for part in parts)
        }

    @classmethod
    def sections(cls, parts: Sequence[TableStrategy], run: TrainedRun) -> Sequence[Section]:
        counted: dict[str, Counter[str]] = {}
        for rank in run.observed:
            for table, figures in rank.items():
                counted.setdefault(table, Counter()).update(figures)
        predicted = {
            table: {"hits": cached.traffic.hits, "bytes": cached.traffic.bytes}
            for part in parts
            for table, cached in part.expected.items()
        }
        return [Admissions(counted, predicted)]


class Admissions(Section):
    """Report section with cache counts per step, summed over ranks, for each table."""

    name = "tiny_lfu"

    def __init__(self, counted: Figures, predicted: Figures) -> None:
        self._counted, self._predicted = counted, predicted

    def as_json(self) -> Any:
        return {
            table: {"counted": dict(figures), "predicted": self._predicted[table]}
            for table, figures in self._counted.items()
        }

    def shown(self, run: str) -> Sequence[Table]:
        shown = Table(title=f"{run} TinyLFU: counts per step, all ranks".strip())
        for heading in ("table", "hits", "predicted", "bytes", "predicted", "admitted", "rejected"):
            shown.add_column(heading)
        for table, counted in self._counted.items():
            expected = self._predicted[table]
            figures = [
                *(counted["hits"], expected["hits"], counted["bytes"], expected["bytes"]),
                *(counted["admitted"], counted["rejected"]),
            ]
            shown.add_row(table, *(f"{figure:,.0f}" for figure in figures))
        return [shown]
