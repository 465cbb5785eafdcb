"""Runs as ``recd run --json`` wrote them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from recd_plugins.errors import RecdError
from recd_plugins.files import parse_json
from recd_plugins.training.figures import figures
from recd_plugins.training.spread import Spread, ratio

#: Curves of losses that differ by no more are one.
EQUAL_LOSSES = 1e-5


@dataclass(frozen=True)
class Run:
    """Figures of a run.

    Attributes:
        name: tells it from the others of a page.
        values: as ``Result.as_json`` gives them.
    """

    name: str
    values: Mapping[str, Any]

    def over(self, first: Run, figure: str) -> Spread | None:
        """A figure over that of another run: of each round, where both were trained in turn."""
        if spread := self.values.get("rounds", {}).get(figure, {}).get("ratio"):
            return Spread(**spread)
        values = [figures(run.values).get(figure, (None, ""))[0] for run in (self, first)]
        return Spread.of([ratio(*values)])

    @property
    def losses(self) -> list[float | None]:
        """By step; None where one was not finite."""
        return list(self.values["losses"])

    def same_losses(self, other: Run) -> float | None:
        """The largest difference of two losses of one step, where that is next to none."""
        mine, others = self.losses, other.losses
        if len(mine) != len(others) or None in mine or None in others:
            return None
        differences = [
            abs(a - b) for a, b in zip(mine, others, strict=True) if a is not None and b is not None
        ]
        most = max(differences, default=0.0)
        return most if most <= EQUAL_LOSSES else None


def read_runs(paths: Iterable[Path]) -> list[Run]:
    """The runs of files that ``recd run --json`` wrote, in order, each with a name of its own.

    Raises:
        RecdError: a file cannot be read, or is none of those.
    """
    paths = list(paths)
    found: list[Run] = []
    for path in paths:
        try:
            values = parse_json(path.read_bytes())
        except OSError as error:
            raise RecdError(f"{path}: cannot be read ({error.strerror})") from error
        except ValueError as error:
            raise RecdError(f"{path}: is no JSON ({error}); recd run --json writes it") from error
        runs = runs_of(values)
        if not runs:
            raise RecdError(f"{path}: holds no run; a file is wanted that recd run --json wrote")
        found += [Run(_name(path, run.name, len(paths)), run.values) for run in runs]
    names = [run.name for run in found]
    return [
        Run(run.name if names.count(run.name) == 1 else f"{run.name} ({i + 1})", run.values)
        for i, run in enumerate(found)
    ]


def runs_of(report: Any) -> list[Run]:
    """The runs in a report of ``recd run``, the yardstick of a comparison first; none elsewhere."""
    if not isinstance(report, dict):
        return []
    shardings = report.get("shardings")
    both = {name: report.get(name) for name in ("baseline", "plugins")}
    sides = shardings if isinstance(shardings, dict) else both
    if not all(isinstance(values, dict) for values in sides.values()):
        sides = {"": report}
    shared = {name: report[name] for name in ("registry", "settings") if name in report}
    rounds = report.get("rounds", {})
    runs = [
        Run(name, {**values, **shared, "rounds": rounds.get(name, {})})
        for name, values in sides.items()
        if _is_run(values)
    ]
    return runs if len(runs) == len(sides) else []


def _is_run(values: Any) -> TypeGuard[Mapping[str, Any]]:
    if not isinstance(values, dict):
        return False
    losses = values.get("losses")
    return (
        isinstance(losses, list)
        and all(loss is None or isinstance(loss, int | float) for loss in losses)
        and isinstance(values.get("collective_bytes"), dict)
    )


def _name(path: Path, side: str, num_files: int) -> str:
    return " ".join(filter(None, [path.stem if num_files > 1 or not side else "", side]))
