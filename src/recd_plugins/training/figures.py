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

# Of a test split; beyond it, a feature usually tells the label.
_BEST_AUC = 0.99
_OVERFITS = "the model overfits: use more data, fewer epochs or regularisation"
# Validations in a row that are worse than the best: one alone may be noise.
_WORSE_VALIDATIONS = 2


def worse_than_base_rate(
    entropy: float, split: str, whose: str = "", train: float | None = None
) -> str:
    """Return advice if predictions are worse than the base rate or all labels are equal.

    Else return an empty string.

    Args:
        entropy: normalized entropy; NaN where all labels are the same.
        split: the split that it was measured on.
        whose: the run that predicted, where there are several.
        train: normalized entropy of the training rows, where it is known.
    """
    if entropy <= 1:
        return ""
    whose = f"of {whose} " if whose else ""
    if math.isnan(entropy):
        return (
            f"All labels {whose}of the {split} split are the same: normalized entropy and AUC say "
            "nothing of it. Of a log of positives, a ranking of all items does"
        )
    longer = "Train longer, or with another training.learning_rate"
    if split == "train":
        advice = longer
    elif train is None:
        advice = f"If training rows are predicted better, {_OVERFITS}. If not: {longer.lower()}"
    elif train < 1:
        advice = f"Training rows are predicted better ({train:.5f}): {_OVERFITS}"
    else:
        advice = f"{longer}; or the {split} split differs from training"
    return (
        f"The normalized entropy {whose}on the {split} split, {entropy:.5f}, is above 1: worse "
        f"than predicting the base rate, the mean label, for every row. {advice}"
    )


def overfitting(values: Mapping[str, Any], whose: str = "") -> str:
    """Return advice where validations got worse while training went on; else an empty string.

    Args:
        values: of a run, as ``Result.as_json`` gives them.
        whose: the run, where there are several.
    """
    curve, train, test = values.get("validation"), values["train"], values["test"]
    if not (curve and train and test) or curve["best_step"] is None:
        return ""
    best = curve["steps"].index(curve["best_step"])
    better = train["normalized_entropy"], test["normalized_entropy"]
    stale = len(curve["steps"]) - 1 - best
    if stale < _WORSE_VALIDATIONS or None in better or not better[0] < better[1]:
        return ""
    return (
        f"Overfitting: {curve['metric']} {f'of {whose} ' if whose else ''}on the test split was "
        f"best at step {curve['best_step']}; training rows are predicted better (normalized "
        f"entropy {better[0]:.5f} against {better[1]:.5f}). Use more data, fewer epochs or "
        "regularisation."
    )


def suspiciously_good(auc: float, whose: str = "") -> str:
    """Return a warning if a test AUC is suspiciously high, else an empty text.

    Args:
        auc: of the test split.
        whose: run to name in the warning, if there are several.
    """
    if not auc > _BEST_AUC:
        return ""
    of_run = f" of {whose}" if whose else ""
    return (
        f"The test AUC{of_run}, {auc:.4f}, is suspiciously high: is a feature known only after the "
        "label, or are test rows among the training rows?"
    )


def quality_advice(values: Mapping[str, Any], whose: str = "") -> list[str]:
    """Return advice on the test figures of a run, if there is any.

    Args:
        values: of a run, as ``Result.as_json`` gives them.
        whose: the run, where there are several.
    """
    test = values["test"]
    if test is None:
        return []
    train, entropy, auc = values["train"] or {}, test["normalized_entropy"], test["auc"]
    told = overfitting(values, whose)
    if not told and entropy is not None:
        told = worse_than_base_rate(entropy, "test", whose, train.get("normalized_entropy"))
    return [each for each in (told, suspiciously_good(auc or 0.0, whose)) if each]


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
