"""Measuring the test split while training goes on, and when it stops for that."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, TypeVar

from recd_plugins.errors import Problem, RecdError, RegistryError
from recd_plugins.interfaces import Split
from recd_plugins.interfaces.callback import Quality
from recd_plugins.registry import RunConfig
from recd_plugins.registry.training_spec import ValidationSpec
from recd_plugins.training.checkpoint_files import ValidationCurve

M = TypeVar("M")
#: Quality of a split, None where it is empty, and its metrics by name.
Measured = tuple[Quality | None, Mapping[str, float]]


def check_validation(registry: RunConfig, splits: Sequence[Split]) -> None:
    """Refuse a validation that could measure nothing.

    Args:
        registry: its training section.
        splits: that a run reads.

    Raises:
        RegistryError: there is no test split, or no metric that it could go by.
    """
    spec = registry.training.validation
    if spec is None:
        return
    wrong = ""
    if "test" not in splits:
        name = registry.dataset.name
        wrong = f"measures the test split, and {name} has no test split here; leave it out"
    elif spec.metric not in _of_quality() and not registry.entries("metric"):
        wrong = f"metric {spec.metric} is none of {', '.join(_of_quality())}, and there is no other"
    if wrong:
        raise RegistryError([Problem(str(registry.path), 0, "training.validation", wrong)])


def _of_quality() -> list[str]:
    return [field.name for field in fields(Quality) if field.name != "num_samples"]


def _figures(measured: Measured) -> dict[str, float]:
    quality, metrics = measured
    return {**({} if quality is None else asdict(quality)), **metrics}


@dataclass(frozen=True)
class ValidationReport:
    """The validations of a run.

    Attributes:
        curve: of the figure that they went by.
        stopped: whether the run ended because of it.
    """

    curve: ValidationCurve
    stopped: bool

    def as_json(self) -> dict[str, Any]:
        """JSON values."""
        curve = asdict(self.curve)
        return {**curve, "best_step": self.curve.best_step, "stopped_early": self.stopped}

    def __str__(self) -> str:
        curve = self.curve
        if curve.best is None:
            best = f"no validation had a finite {curve.metric}"
        else:
            best = (
                f"the best {curve.metric} of the validations was {curve.values[curve.best]:.5f}, "
                f"after step {curve.best_step}"
            )
        last = curve.steps[-1]
        if self.stopped:
            best = f"stopped early, after step {last}: {best}"
            if curve.best is not None:
                best += f", with no improvement in the next {curve.stale} validations"
        if curve.best_step in (None, last):
            return best
        return f"{best}. Test figures are those of step {curve.best_step}"


class Validation:
    """When a run is validated, and what came of it.

    Args:
        spec: of the registry file.
        before: the curve of the checkpoint that the run goes on from. One by another figure is
            left behind.
        step: of that checkpoint. A curve that ends before it stops no run: one went on without.

    Attributes:
        curve: so far.
        left: words on a curve that is left behind; none where none is.
    """

    def __init__(
        self, spec: ValidationSpec, before: ValidationCurve | None = None, step: int = 0
    ) -> None:
        self._spec, self._step = spec, step
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
        """Whether it is time after this step, and not done."""
        return step % self._spec.every == 0 and not self.is_measured(step)

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
        due = [at for at, step in enumerate(curve.steps) if step % self._spec.every == 0]
        on_time = replace(
            curve,
            steps=[curve.steps[at] for at in due],
            values=[curve.values[at] for at in due],
        )
        return on_time.stale >= patience

    def add(self, step: int, measured: Measured) -> bool:
        """What was measured after a step. Whether it is the best so far.

        Raises:
            RecdError: the figure is not among it.
        """
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
        """What was measured last, in a line."""
        step = self.curve.steps[-1]
        figures = _figures(measured)
        shown = ", ".join(
            f"{name} {value:.5f}" for name, value in figures.items() if name != "num_samples"
        )
        best = "" if self.curve.best is None else f"; the best was after {self.curve.best_step}"
        if self.curve.best_step == step:
            best = " (the best so far)"
        return f"step {step}, {figures['num_samples']:,} rows of the test split: {shown}{best}"

    def report(self) -> ValidationReport:
        """All of it."""
        return ValidationReport(self.curve, self.stops)


class _Stretch(Iterator[M]):
    """The next of some batches, and no more of them."""

    def __init__(self, batches: Iterator[M], count: int) -> None:
        self._batches = batches
        self.left = count

    def __next__(self) -> M:
        if not self.left:
            raise StopIteration
        batch = next(self._batches)
        self.left -= 1
        return batch


def stretches(
    batches: Iterator[M], done: int, spec: ValidationSpec | None
) -> Iterator[Iterator[M]]:
    """Batches in turns that end where a run is validated: a pipeline runs dry there.

    Args:
        batches: of a run, one a step.
        done: steps before them.
        spec: of its validation; None for one turn.
    """
    if spec is None:
        yield batches
        return
    while True:
        stretch = _Stretch(batches, spec.every - done % spec.every)
        done += stretch.left
        yield stretch
        if stretch.left:
            return
