"""Validation on the test split while training goes on, and early stopping."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from recd_plugins.errors import Problem, RecdError, RegistryError
from recd_plugins.interfaces.callback import Quality
from recd_plugins.registry import RunConfig
from recd_plugins.registry.training_spec import ValidationSpec
from recd_plugins.training.checkpoint_files import ValidationCurve
from recd_plugins.training.evaluation import Measured, splits_of


def check_evaluation(registry: RunConfig) -> None:
    """Refuse metrics and a validation that could measure nothing."""
    has_test, metrics = "test" in splits_of(registry), registry.entries("metric")
    why = f"{registry.dataset.name} has no test split"
    if not registry.training.evaluate:
        why = "training.evaluate is false"
    wrong = [
        (entry.line, entry.field, f"{entry.plugin.name} measures the test split, and {why}")
        for entry in metrics
        if not has_test
    ]
    if (spec := registry.training.validation) is not None:
        known = [field.name for field in fields(Quality) if field.name != "num_samples"]
        if not has_test:
            wrong.append((0, "training.validation", f"measures the test split, and {why}"))
        elif spec.metric not in known and not metrics:
            text = f"metric {spec.metric} is none of {', '.join(known)}, and there is no other"
            wrong.append((0, "training.validation", text))
    if wrong:
        raise RegistryError([Problem(str(registry.path), *each) for each in wrong])


@dataclass(frozen=True)
class ValidationReport:
    """The validations of a run."""

    curve: ValidationCurve
    stopped: bool

    def as_json(self) -> dict[str, Any]:
        """Return JSON values."""
        curve = asdict(self.curve)
        return {**curve, "best_step": self.curve.best_step, "stopped_early": self.stopped}

    def __str__(self) -> str:
        curve, last = self.curve, self.curve.steps[-1]
        if curve.best is None:
            best = f"no validation had a finite {curve.metric}"
        else:
            best = (
                f"the best {curve.metric} of the validations was {curve.values[curve.best]:.5f}, "
                f"after step {curve.best_step}"
            )
        if self.stopped:
            best = f"stopped early, after step {last}: {best}"
            if curve.best is not None:
                best += f", with no improvement in the next {curve.stale} validations"
        if curve.best_step in (None, last):
            return best
        return f"{best}. Test figures are those of step {curve.best_step}"


class Validation:
    """When a run is validated, and its figures."""

    def __init__(
        self, spec: ValidationSpec, before: ValidationCurve | None = None, step: int = 0
    ) -> None:
        self._spec, self._step = spec, step
        self.every = spec.every
        self.curve = ValidationCurve(spec.metric, spec.best)
        self.left = ""
        if before is None:
            return
        if (before.metric, before.mode) == (spec.metric, spec.best):
            self.curve = before
        elif before.best_step is not None:
            self.left = (
                f"validations by {before.metric} are left behind, as training.validation goes by "
                f"{spec.metric} now: the best checkpoint by {before.metric}, of step "
                f"{before.best_step}, goes when newer ones come; copy it to keep it"
            )

    def due(self, step: int) -> bool:
        """Return whether this step is to be validated, and is not yet."""
        return step % self.every == 0 and not self.is_measured(step)

    def is_measured(self, step: int) -> bool:
        """Return whether this step is the last one validated."""
        return step in self.curve.steps[-1:]

    @property
    def stops(self) -> bool:
        """Whether the run is to end here."""
        patience, curve = self._spec.patience, self.curve
        if patience is None or not curve.steps or curve.steps[-1] < self._step:
            return False
        # The last step of an earlier run is validated, too, and does not count.
        due = [at for at, step in enumerate(curve.steps) if step % self.every == 0]
        on_time = replace(
            curve,
            steps=[curve.steps[at] for at in due],
            values=[curve.values[at] for at in due],
        )
        return on_time.stale >= patience

    def add(self, step: int, measured: Measured) -> bool:
        """Add the figures of a step; return whether they are the best so far."""
        values = _figures(measured)
        if self._spec.metric not in values:
            raise RecdError(
                f"training.validation.metric: nothing measures {self._spec.metric} of the test "
                f"split; there are {', '.join(values) or 'no rows in it'}"
            )
        value = float(values[self._spec.metric])
        self.curve = self.curve.with_value(step, value if math.isfinite(value) else None)
        return self.curve.best_step == step

    def line(self, measured: Measured) -> str:
        """Describe the last validation in a line."""
        step = self.curve.steps[-1]
        figures = _figures(measured)
        rows = figures.pop("num_samples")
        shown = ", ".join(f"{name} {value:.5f}" for name, value in figures.items())
        best = "" if self.curve.best is None else f"; the best was after {self.curve.best_step}"
        if self.curve.best_step == step:
            best = " (the best so far)"
        return f"step {step}, {rows:,} rows of the test split: {shown}{best}"

    def report(self) -> ValidationReport:
        """Return the report of the run."""
        return ValidationReport(self.curve, self.stops)


def _figures(measured: Measured) -> dict[str, float]:
    quality, metrics = measured
    return {**({} if quality is None else asdict(quality)), **metrics}
