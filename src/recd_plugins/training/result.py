"""Figures of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from recd_plugins.interfaces import Section
from recd_plugins.interfaces.callback import Quality
from recd_plugins.training.breakdown import StepMemory
from recd_plugins.training.drift import Prediction
from recd_plugins.training.group_report import GroupReport
from recd_plugins.training.stall_report import StallReport
from recd_plugins.training.validation import ValidationReport
from recd_plugins.values.stages import StageTimes


@dataclass(frozen=True)
class Result:
    """Figures of a run, the same on every rank.

    Attributes:
        samples_per_second: of all ranks, reading included, after the first steps; None for a run
            too short to tell.
        step_seconds: median wall time of a step, likewise.
        collective_bytes: bytes that all ranks together send in one step, by kind of collective;
            empty for a run too short to tell.
        ids_looked_up: ids that enter embedding lookups in one step, on all ranks; likewise None.
        peak_memory_bytes: while training, of the rank that needs most.
        losses: by step, the mean over ranks, from the run's first step, resumed or not; NaN where
            the trainer that it goes on from kept none.
        train: quality of what training steps predicted before they learned from their samples, of
            the newest ones since the run was started or resumed; earlier epochs may have trained on
            them. None where it was resumed at its end.
        test: quality on the test split, of the best step where the run was validated; None where
            there is no such split.
        metrics: figures of the registry's metrics on the test split, by name.
        stages: seconds of a step by stage, the mean over ranks; None unless it was asked for, and
            for a run too short to tell.
        step_memory: bytes of a step above those at its start, of the rank that needs most; likewise
            None.
        sections: what table parts report, by name.
        groups: batches by the groups that a wrapper of the dataset sorts rows into, if any.
        stalls: what the timed steps waited for data; None for a run too short to tell.
        ingestion: figures of the ingestion by rank, of the training split; None without one.
        validation: of the test split while training went on; None where there was none.
        first_step: the step of the checkpoint that it was resumed at; 0 where it was started.
        prediction: of a step, next to what was timed; None where no costs were measured.
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
    prediction: Prediction | None = None

    def as_json(self) -> dict[str, Any]:
        """JSON values; each section under its name, metrics beside the quality of the split."""
        reports = {
            **self.sections,
            "groups": self.groups,
            "stalls": self.stalls,
            "validation": self.validation,
            "prediction": self.prediction,
        }
        shown = {name: report and report.as_json() for name, report in reports.items()}
        values = asdict(replace(self, sections={}))
        del values["sections"], values["metrics"]
        if self.test is not None:
            values["test"] |= self.metrics
        return {**values, **shown}
