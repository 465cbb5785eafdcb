"""The figures of a run with plugins next to those of the plain path."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.table import Table

from recd_plugins.byte_sizes import bytes_text
from recd_plugins.interfaces.callback import Quality
from recd_plugins.training.trainer import Result


@dataclass(frozen=True)
class ComparedFigure:
    """One row of the table: a value of each side and, where both are there, their ratio."""

    name: str
    unit: str
    baseline: float | None
    plugins: float | None

    @property
    def ratio(self) -> float | None:
        """Plugins over baseline."""
        return ratio(self.plugins, self.baseline)


@dataclass(frozen=True)
class Comparison:
    """Two runs over the same batches from the same weights."""

    baseline: Result
    plugins: Result

    @property
    def loss_max_abs_diff(self) -> float:
        """The largest difference of the two losses of one step; NaN where a loss is NaN."""
        return loss_max_abs_diff(self.plugins, self.baseline)

    def figures(self) -> list[ComparedFigure]:
        """Everything that both sides measured."""
        before, after = figures(self.baseline), figures(self.plugins)
        return [
            ComparedFigure(
                name, unit, before.get(name, (None, ""))[0], after.get(name, (None, ""))[0]
            )
            for name, unit in {
                name: unit for side in (before, after) for name, (_, unit) in side.items()
            }.items()
        ]

    def as_json(self) -> dict[str, Any]:
        """What ``recd run --compare --json`` writes; ratios are plugins over baseline."""
        return {
            "baseline": self.baseline.as_json(),
            "plugins": self.plugins.as_json(),
            "ratios": {figure.name: figure.ratio for figure in self.figures()},
            "loss_max_abs_diff": self.loss_max_abs_diff,
        }

    def table(self) -> Table:
        """The figures side by side."""
        table = Table(title="with the registry's plugins, and without: the same batches")
        table.add_column("", overflow="fold")
        for heading in ("baseline", "plugins", "plugins / baseline"):
            table.add_column(heading, justify="right")
        for figure in self.figures():
            table.add_row(
                words(figure.name),
                shown(figure.baseline, figure.unit),
                shown(figure.plugins, figure.unit),
                "" if figure.ratio is None else f"{figure.ratio:.3g}x",
            )
        table.caption = (
            f"losses of {len(self.plugins.losses)} steps agree within {self.loss_max_abs_diff:.1e}"
        )
        return table


def result_table(result: Result) -> Table:
    """The figures of one run."""
    table = Table(title=f"{len(result.losses)} steps")
    table.add_column("", overflow="fold")
    table.add_column("value", justify="right")
    for name, (value, unit) in figures(result).items():
        table.add_row(words(name), shown(value, unit))
    return table


def ratio(value: float | None, base: float | None) -> float | None:
    """``value`` over ``base``; None where one of the two is missing, or the base zero."""
    return value / base if value is not None and base else None


def loss_max_abs_diff(result: Result, other: Result) -> float:
    """The largest difference of the two losses of one step; NaN where a loss is NaN."""
    return float(np.abs(np.subtract(result.losses, other.losses)).max())


def figures(result: Result) -> dict[str, tuple[float | None, str]]:
    """Value and unit by name."""
    found: dict[str, tuple[float | None, str]] = {
        "samples_per_second": (result.samples_per_second, "samples/s"),
        "step_seconds": (result.step_seconds, "s"),
    }
    if result.stages is not None:
        for stage, seconds in result.stages.as_dict().items():
            found[f"{stage}_seconds"] = (seconds, "s")
    for kind, num_bytes in result.collective_bytes.items():
        found[f"{kind}_bytes"] = (num_bytes, "B")
    total = sum(result.collective_bytes.values()) if result.collective_bytes else None
    found["collective_bytes"] = (total, "B")
    found["ids_looked_up"] = (result.ids_looked_up, "")
    found["peak_memory_bytes"] = (float(result.peak_memory_bytes), "B")
    if result.step_memory is not None:
        found["step_peak_bytes"] = (result.step_memory.peak, "B")
        found["step_mean_bytes"] = (result.step_memory.mean, "B")
    found["last_loss"] = (result.losses[-1], "loss")
    for split, quality in (("train", result.train), ("test", result.test)):
        if quality is not None:
            found |= _quality(split, quality)
    found |= {f"test_{name}": (value, "loss") for name, value in result.metrics.items()}
    return found


def _quality(split: str, quality: Quality) -> dict[str, tuple[float | None, str]]:
    return {
        f"{split}_samples": (float(quality.num_samples), ""),
        f"{split}_normalized_entropy": (quality.normalized_entropy, "loss"),
        f"{split}_auc": (quality.auc, "loss"),
        f"{split}_log_loss": (quality.log_loss, "loss"),
        f"{split}_calibration": (quality.calibration, "loss"),
    }


_TITLES = {
    "step_seconds": "step time (median)",
    "lookup_seconds": "  lookup",
    "gemm_seconds": "  GEMM",
    "all_to_all_seconds": "  all-to-all",
    "all_reduce_seconds": "  all-reduce",
    "other_seconds": "  other",
    "collective_bytes": "bytes sent a step, all collectives",
    "ids_looked_up": "ids looked up a step",
    "peak_memory_bytes": "peak memory of a rank",
    "step_peak_bytes": "  above the start of a step, peak",
    "step_mean_bytes": "  above the start of a step, mean",
    "last_loss": "loss at the last step",
}


def words(name: str) -> str:
    """A figure's name as tables show it."""
    if name in _TITLES:
        return _TITLES[name]
    if name.endswith("_bytes"):
        return f"  {name.removesuffix('_bytes')}"
    return name.replace("_", " ").replace("auc", "AUC")


def shown(value: float | None, unit: str) -> str:
    """A figure's value as tables show it."""
    if value is None:
        return "-"
    if unit == "B":
        return bytes_text(value)
    if unit == "loss":
        return f"{value:.5f}"
    if unit == "s":
        return f"{value * 1e3:.1f} ms"
    return f"{value:,.0f}"
