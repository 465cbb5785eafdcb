"""Figures of a run by name, and the words and units that show them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from recd_plugins.byte_sizes import bytes_text

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


def worse_than_base_rate(entropy: float, split: str, whose: str = "") -> str:
    """A sentence where predictions are of no use; else an empty one.

    Args:
        entropy: normalized entropy; NaN where all labels are the same.
        split: that it is of.
        whose: predictions, if it has to be said.
    """
    if entropy <= 1:
        return ""
    whose = f"of {whose} " if whose else ""
    if math.isnan(entropy):
        return (
            f"All labels {whose}of the {split} split are the same: normalized entropy and AUC say "
            "nothing of it. Of a log of positives, a ranking of all items does"
        )
    return (
        f"The normalized entropy {whose}on the {split} split, {entropy:.5f}, is above 1: worse "
        "than predicting the base rate, the mean label, for every row. Train longer, or with "
        "another training.learning_rate; or what the columns say does not hold for the "
        f"{split} split"
    )


def figures_of(values: Mapping[str, Any]) -> dict[str, tuple[float | None, str]]:
    """Value and unit by name.

    Args:
        values: of a run, as ``Result.as_json`` gives them.
    """
    found: dict[str, tuple[float | None, str]] = {
        "samples_per_second": (values["samples_per_second"], "samples/s"),
        "step_seconds": (values["step_seconds"], "s"),
    }
    for stage, seconds in (values["stages"] or {}).items():
        found[f"{stage}_seconds"] = (seconds, "s")
    sent = values["collective_bytes"]
    for kind, num_bytes in sent.items():
        found[f"{kind}_bytes"] = (num_bytes, "B")
    found["collective_bytes"] = (sum(sent.values()) if sent else None, "B")
    found["ids_looked_up"] = (values["ids_looked_up"], "")
    found["peak_memory_bytes"] = (values["peak_memory_bytes"], "B")
    if (memory := values["step_memory"]) is not None:
        found["step_peak_bytes"] = (memory["peak"], "B")
        found["step_mean_bytes"] = (memory["mean"], "B")
    found["last_loss"] = (values["losses"][-1] if values["losses"] else None, "loss")
    for split in ("train", "test"):
        quality = dict(values[split] or {})
        if quality:
            found[f"{split}_samples"] = (quality.pop("num_samples"), "")
        found |= {f"{split}_{name}": (value, "loss") for name, value in quality.items()}
    return found


def figure_words(name: str) -> str:
    """A figure's name as tables show it."""
    if name in _TITLES:
        return _TITLES[name]
    if name.endswith("_bytes"):
        return f"  {name.removesuffix('_bytes')}"
    return name.replace("_", " ").replace("auc", "AUC")


def figure_text(value: float | None, unit: str) -> str:
    """A figure's value as tables show it."""
    if value is None or math.isnan(value):
        return "-"
    if unit == "B":
        return bytes_text(value)
    if unit == "loss":
        return f"{value:.5f}"
    if unit == "s":
        return f"{value * 1e3:.1f} ms"
    return f"{value:,.0f}"
