"""Figures of a run: their names, units and words, and advice on them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rich.table import Table

from recd_plugins.interfaces import Section
from recd_plugins.interfaces.callback import Quality
from recd_plugins.interfaces.step_cost import StageTimes
from recd_plugins.runtime.text import bytes_text
from recd_plugins.training.breakdown import StepMemory
from recd_plugins.training.data_report import GroupReport, StallReport
from recd_plugins.training.evaluation import ValidationReport

_TITLES = {
    "step_seconds": "step time (median)",
    "predicted_step_seconds": "  as predicted",
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
# A test AUC beyond it usually means that a feature tells the label.
_BEST_AUC = 0.99
_OVERFITS = "the model overfits: use more data, fewer epochs or regularisation"
# Validations in a row that are worse than the best: one alone may be noise.
_WORSE_VALIDATIONS = 2


@dataclass(frozen=True)
class Result:
    """Figures of a run, the same on every rank. None where the run was too short to tell.

    Attributes:
        samples_per_second: of all ranks, reading included, after the first steps.
        step_seconds: median wall time of a step, likewise.
        collective_bytes: bytes that all ranks together send in one step, by kind of collective.
        ids_looked_up: ids that enter embedding lookups in one step, on all ranks.
        peak_memory_bytes: while training, of the rank that needs most.
        losses: the mean over ranks of each step, from the run's first step, resumed or not; NaN if
            the trainer before kept none.
        train: quality of what training steps predicted before they learned from their samples, of
            the newest ones since the run was started or resumed. None if it was resumed at its end.
        test: quality on the test split, of the best step if the run was validated.
        metrics: figures of the registry's metrics on the test split, by name.
        stages: seconds of a step by stage, the mean over ranks; None unless profiled.
        step_memory: bytes of a step above those at its start, of the rank that needs most;
            likewise.
        sections: reports of table parts, by name.
        groups: batches by the groups that a wrapper of the dataset sorts rows into, if any.
        stalls: what the timed steps waited for data.
        ingestion: figures of the ingestion by rank, of the training split; None without one.
        validation: of the test split while training went on, if there was one.
        first_step: the step of the checkpoint that it was resumed at; 0 if it was started.
        predicted_step_seconds: by the measured costs of the topology, if there are any.
    """

    samples_per_second: float | None
    step_seconds: float | None
    collective_bytes: dict[str, float]
    ids_looked_up: float | None
    peak_memory_bytes: int
    losses: list[float]
    train: Quality | None
    test: Quality | None
    metrics: Mapping[str, float] = field(default_factory=dict)
    stages: StageTimes | None = None
    step_memory: StepMemory | None = None
    sections: Mapping[str, Section] = field(default_factory=dict)
    groups: GroupReport | None = None
    stalls: StallReport | None = None
    ingestion: list[Mapping[str, float]] | None = None
    validation: ValidationReport | None = None
    first_step: int = 0
    predicted_step_seconds: float | None = None

    def as_json(self) -> dict[str, Any]:
        """Return JSON values; each section under its name, metrics within ``test``."""
        reports = {
            **self.sections,
            "groups": self.groups,
            "stalls": self.stalls,
            "validation": self.validation,
        }
        shown = {name: report and report.as_json() for name, report in reports.items()}
        values = asdict(replace(self, sections={}))
        del values["sections"], values["metrics"]
        if self.test is not None:
            values["test"] |= self.metrics
        return {**values, **shown}

    def table(self) -> Table:
        """Show the figures."""
        table = Table(title=f"{len(self.losses)} steps")
        table.add_column("", overflow="fold")
        table.add_column("value", justify="right", overflow="fold")
        for name, (value, unit) in figures_of(self.as_json()).items():
            table.add_row(figure_words(name), figure_text(value, unit))
        if self.first_step:
            table.caption = (
                f"resumed at step {self.first_step}: train figures and speed are of the "
                f"{len(self.losses) - self.first_step} steps since"
            )
        return table


def figures_of(values: Mapping[str, Any]) -> dict[str, tuple[float | None, str]]:
    """Return value and unit of each figure by name.

    Args:
        values: of a run, as ``Result.as_json`` gives them.
    """
    found: dict[str, tuple[float | None, str]] = {
        "samples_per_second": (values["samples_per_second"], "samples/s"),
        "step_seconds": (values["step_seconds"], "s"),
    }
    if (predicted := values.get("predicted_step_seconds")) is not None:
        found["predicted_step_seconds"] = (predicted, "s")
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
    """Return a figure's name as tables show it."""
    if name in _TITLES:
        return _TITLES[name]
    if name.endswith("_bytes"):
        return f"  {name.removesuffix('_bytes')}"
    return name.replace("_", " ").replace("auc", "AUC")


def figure_text(value: float | None, unit: str) -> str:
    """Return a figure's value as tables show it."""
    if value is None or math.isnan(value):
        return "-"
    if unit == "B":
        return bytes_text(value)
    if unit == "loss":
        return f"{value:.5f}"
    if unit == "s":
        return f"{value * 1e3:.1f} ms"
    return f"{value:,.0f}"


def quality_advice(values: Mapping[str, Any], whose: str = "") -> list[str]:
    """Return advice on the test figures of a run, if there is any.

    Args:
        values: of a run, as ``Result.as_json`` gives them.
        whose: the run, if there are several.
    """
    test = values["test"]
    if test is None:
        return []
    train, entropy, auc = values["train"] or {}, test["normalized_entropy"], test["auc"] or 0.0
    told = _overfitting(values, whose)
    if not told and entropy is not None:
        told = worse_than_base_rate(entropy, "test", whose, train.get("normalized_entropy"))
    too_good = ""
    if auc > _BEST_AUC:
        of_run = f" of {whose}" if whose else ""
        too_good = (
            f"The test AUC{of_run}, {auc:.4f}, is suspiciously high: is a feature known only after "
            "the label, or are test rows among the training rows?"
        )
    return [each for each in (told, too_good) if each]


def worse_than_base_rate(
    entropy: float, split: str, whose: str = "", train: float | None = None
) -> str:
    """Return advice if predictions are worse than the base rate or all labels are equal.

    Args:
        entropy: normalized entropy; NaN if all labels are equal.
        split: that it was measured on.
        whose: the run, if there are several.
        train: normalized entropy of the training rows, if known.
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


def _overfitting(values: Mapping[str, Any], whose: str) -> str:
    """Return advice if validations got worse while training went on."""
    curve, train, test = values.get("validation"), values["train"], values["test"]
    if not (curve and train and test) or curve["best_step"] is None:
        return ""
    better = train["normalized_entropy"], test["normalized_entropy"]
    stale = len(curve["steps"]) - 1 - curve["steps"].index(curve["best_step"])
    if stale < _WORSE_VALIDATIONS or None in better or not better[0] < better[1]:
        return ""
    return (
        f"Overfitting: {curve['metric']} {f'of {whose} ' if whose else ''}on the test split was "
        f"best at step {curve['best_step']}; training rows are predicted better (normalized "
        f"entropy {better[0]:.5f} against {better[1]:.5f}). Use more data, fewer epochs or "
        "regularisation."
    )
