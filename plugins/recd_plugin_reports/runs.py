"""Runs as ``recd run --json`` wrote them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from recd_plugins.api import RecdError
from recd_plugins.api.files import parse_json
from recd_plugins.api.training import Spread, figures_of

#: Curves of losses that differ by no more are one.
EQUAL_LOSSES = 1e-5


Number = int | float


class _Shape(BaseModel):
    model_config = ConfigDict(strict=True)


class _Memory(_Shape):
    peak: Number
    mean: Number


class _Stalls(_Shape):
    share: Number
    shares: dict[str, Number]


class _Validation(_Shape):
    metric: str
    steps: list[int]
    values: list[Number | None]
    best_step: int | None
    stopped_early: bool


class _Quality(_Shape):
    model_config = ConfigDict(strict=True, extra="allow")
    __pydantic_extra__: dict[str, Number | None]

    num_samples: int


class _Spread(_Shape):
    median: Number
    least: Number
    most: Number


class _Figures(_Shape):
    """What a page reads of a run; whatever else is there it shows as it is."""

    losses: list[Number | None]
    samples_per_second: Number | None
    step_seconds: Number | None
    stages: dict[str, Number] | None
    collective_bytes: dict[str, Number]
    ids_looked_up: Number | None
    peak_memory_bytes: Number | None
    step_memory: _Memory | None
    train: _Quality | None
    test: _Quality | None
    stalls: _Stalls | None = None
    validation: _Validation | None = None
    registry: str | None = None
    settings: list[str] = []
    rounds: dict[str, dict[str, _Spread | None]] = {}


@dataclass(frozen=True)
class Run:
    """Figures of a run.

    Attributes:
        name: tells it from the others of a page.
        values: as ``Result.as_json`` gives them.
        report: that it is a side of, whose first side is what ratios of rounds are over.
    """

    name: str
    values: Mapping[str, Any]
    report: object = None

    def figure(self, name: str) -> float | None:
        """A figure; of several rounds the median."""
        value: float | None
        if spread := self.values.get("rounds", {}).get(name, {}).get("value"):
            value = spread["median"]
        else:
            value, _ = figures_of(self.values).get(name, (None, ""))
        return value

    def over(self, first: Run, figure: str) -> Spread | None:
        """A figure over that of another run: of each round, where both were trained in turn."""
        spread = self.values.get("rounds", {}).get(figure, {}).get("ratio")
        if spread and self.report is first.report:
            return Spread(**spread)
        return Spread.of_ratios([self.figure(figure)], [first.figure(figure)])

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
        for run in runs:
            _check(path, run)
        found += [replace(run, name=_name(path, run.name, len(paths))) for run in runs]
    names = [run.name for run in found]
    return [
        run if names.count(run.name) == 1 else replace(run, name=f"{run.name} ({i + 1})")
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
    rounds = report.get("rounds")
    by_side = rounds if isinstance(rounds, dict) else {}
    runs = [
        Run(name, {**values, **shared, "rounds": by_side.get(name, {})}, report)
        for name, values in sides.items()
        if isinstance(values, dict) and values.keys() >= {"losses", "collective_bytes"}
    ]
    return runs if len(runs) == len(sides) else []


def _check(path: Path, run: Run) -> None:
    try:
        _Figures.model_validate(run.values)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, (*filter(None, [run.name]), *first["loc"])))
        raise RecdError(
            f"{path}: {place}: {first['msg'].lower()}; a file is wanted as recd run --json wrote it"
        ) from error


def _name(path: Path, side: str, num_files: int) -> str:
    return " ".join(filter(None, [path.stem if num_files > 1 or not side else "", side]))
