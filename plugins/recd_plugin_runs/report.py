"""HTML pages about runs, from run folders or files of ``recd run --json``."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from recd_plugins.api import RecdError, html_page, plots, run_folders, run_results

# Losses that differ by at most this are reported as equal.
_EQUAL_LOSSES = 1e-5


@dataclass(frozen=True)
class Run:
    """One run of a report file: its name, its results, and the complete report."""

    name: str
    values: Mapping[str, Any]
    report: object = None

    def figure(self, name: str) -> float | None:
        """Return a figure by name, or None. In a comparison, the median over its rounds."""
        if spread := self.values.get("rounds", {}).get(name, {}).get("value"):
            return float(spread["median"])
        value: float | None = run_results.figures_of(self.values).get(name, (None, ""))[0]
        return value

    def over(self, first: Run, figure: str) -> run_results.Spread | None:
        """Return the ratio of a figure to the same figure of run ``first``, with its spread."""
        spread = self.values.get("rounds", {}).get(figure, {}).get("ratio")
        if spread and self.report is first.report:
            return run_results.Spread(**spread)
        value, base = self.figure(figure), first.figure(figure)
        return None if value is None or not base else run_results.Spread.of([value / base])

    @property
    def losses(self) -> list[float]:
        """Return the loss of each step, with NaN for non-finite losses."""
        return [math.nan if loss is None else loss for loss in self.values["losses"]]


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Read runs from run folders or files of ``recd run --json``. Give each a unique name."""
    found: list[Run] = []
    for given in paths:
        path = given / run_folders.RESULT if given.is_dir() else given
        if given.is_dir() and not path.exists():
            raise RecdError(
                f"{given}: the folder has no results of a run. Pass the folder of a finished run, "
                "such as runs/clicks/3."
            )
        try:
            runs = runs_of(json.loads(path.read_bytes()))
        except ValueError as error:
            raise RecdError(
                f"{path}: the file is not valid JSON ({error}). Pass a file of recd run --json."
            ) from error
        if not runs:
            raise RecdError(f"{path}: the file contains no run. Pass a file of recd run --json.")
        for run in runs:
            of_file = (
                (str(given) if given.is_dir() else path.stem)
                if len(paths) > 1 or not run.name
                else ""
            )
            found.append(replace(run, name=f"{of_file} {run.name}".strip()))
    names = [run.name for run in found]
    return [
        run if names.count(run.name) == 1 else replace(run, name=f"{run.name} ({i + 1})")
        for i, run in enumerate(found)
    ]


def runs_of(report: Any) -> list[Run]:
    """Return the runs in a report of ``recd run``. In a comparison, the baseline is first."""
    if not isinstance(report, dict):
        return []
    sides = report.get("shardings") or {
        name: report[name] for name in ("baseline", "plugins") if report.get(name)
    }
    shared = {name: report[name] for name in ("registry", "settings") if name in report}
    rounds = report.get("rounds") or {}
    return [
        Run(name, {**values, **shared, "rounds": rounds.get(name, {})}, report)
        for name, values in (sides or {"": report}).items()
        if values.keys() >= {"losses", "collective_bytes"}
    ]


# Values shown in their own sections. All others appear in tables.
_KNOWN = frozenset(
    {
        "samples_per_second", "step_seconds", "ids_looked_up", "peak_memory_bytes", "losses",
        "train", "test", "registry", "settings", "rounds", "validation",
    }
)  # fmt: skip
# Data wait is mentioned if it exceeds this share of a step.
_WAITING = 0.05


def page(runs: Sequence[Run]) -> str:
    """Return an HTML page that compares runs: findings, figures, curves and tables."""
    named = " and ".join(run.name or "run" for run in runs)
    title = named if len(runs) < 4 else f"{len(runs)} runs"
    losses = loss_plot([run for run in runs if run.losses])
    parts = [
        html_page.element("h1", title),
        html_page.element("ul", *(html_page.element("li", finding) for finding in findings(runs))),
        html_page.element("h2", "Figures"),
        _figures(runs),
        *html_page.html_section(
            "Losses", "Mean loss over ranks at each step, before the update of the weights.", losses
        ),
        *_validations(runs),
        *_sections(runs),
        *_registries(runs),
    ]
    return html_page.html_page(title, parts)


def findings(runs: Sequence[Run]) -> Iterator[str]:
    """Yield one sentence for each notable result of the runs."""
    first = runs[0]
    for run in runs[1:]:
        for name, sentence in (
            ("samples_per_second", "trains {} times as many samples per second as"),
            ("collective_bytes", "sends {} times as many bytes as"),
        ):
            over = run.over(first, name)
            if over is None:
                continue
            times = f"{over.median:.2f}"
            if over.least < over.most:
                times += f" ({over.least:.2f} to {over.most:.2f})"
            unsure = over.least < 1 < over.most
            doubt = ", which is no significant difference" if unsure else ""
            yield f"{run.name} {sentence.format(times)} {first.name}{doubt}."
    for run in runs[1:]:
        apart = [abs(a - b) for a, b in zip(run.losses, first.losses, strict=False)]
        same = len(run.losses) == len(first.losses)
        if same and all(each <= _EQUAL_LOSSES for each in apart):
            yield f"Losses of {first.name} and {run.name} agree within {max(apart, default=0):.1e}."
    for run in runs:
        named = f"{run.name}: " if len(runs) > 1 else ""
        stalls = run.values.get("stalls")
        if stalls and stalls["share"] > _WAITING:
            yield f"{named}{stalls['share']:.0%} of each step is spent waiting for data."
        whose = run.name if len(runs) > 1 else ""
        train = (run.values["train"] or {}).get("normalized_entropy")
        if train is not None and (told := run_results.worse_than_base_rate(train, "train", whose)):
            yield f"{told}."
        for told in run_results.quality_advice(run.values, whose):
            yield f"{told}."


def _figures(runs: Sequence[Run]) -> html_page.Html:
    found = [run_results.figures_of(run.values) for run in runs]
    units = {name: unit for each in found for name, (_, unit) in each.items()}
    headings = [""]
    for i, run in enumerate(runs):
        headings += [run.name or "value", *(["ratio"] if i else [])]
    rows = []
    for name, unit in units.items():
        cells = [run_results.figure_words(name)]
        for i, run in enumerate(runs):
            over = run.over(runs[0], name)
            cells += [
                run_results.figure_text(run.figure(name), unit),
                *([over.times().replace("\n", ", ") if over else ""] if i else []),
            ]
        rows.append(cells)
    return html_page.html_table(headings, rows)


def _validations(runs: Sequence[Run]) -> Iterable[html_page.Html]:
    for run in runs:
        curve = run.values.get("validation")
        if not curve or not curve["steps"]:
            continue
        best = "" if curve["best_step"] is None else f", best after step {curve['best_step']:,}"
        ended = ", then stopped early" if curve["stopped_early"] else ""
        text = f"{curve['metric']} on the test split after each step{best}{ended}."
        plot = curve_plot(curve["steps"], curve["values"], curve["metric"])
        yield from html_page.html_section(f"Validation {run.name}".strip(), text, plot)


def _sections(runs: Sequence[Run]) -> Iterable[html_page.Html]:
    """Yield an HTML table for each key of the reports that the page shows nowhere else."""
    for name in dict.fromkeys(name for run in runs for name in run.values if name not in _KNOWN):
        leaves = [dict(_leaves(run.values.get(name))) for run in runs]
        paths = list(dict.fromkeys(path for each in leaves for path in each))
        if not paths:
            continue
        yield html_page.element("h2", name.replace("_", " ").capitalize())
        rows = [(path or name, *(_text(each.get(path)) for each in leaves)) for path in paths]
        yield html_page.html_table(("", *(run.name or "value" for run in runs)), rows)


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _leaves(item, f"{path} {name}".strip().replace("_", " "))
    elif isinstance(value, list) and any(isinstance(item, Mapping | list) for item in value):
        for number, item in enumerate(value):
            yield from _leaves(item, f"{path} {number}".strip())
    elif value is not None:
        yield path, value


def _text(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "" if value is None else str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


def _registries(runs: Sequence[Run]) -> Iterable[html_page.Html]:
    """Yield the registry file and overrides of each run as HTML."""
    by_text: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for run in runs:
        if text := run.values.get("registry"):
            by_text.setdefault((text, tuple(run.values.get("settings", ()))), []).append(run.name)
    for (text, settings), names in by_text.items():
        of = f" of {', '.join(names)}" if len(by_text) > 1 else ""
        yield html_page.element("h2", f"Registry{of}")
        if settings:
            yield html_page.element("p", f"With {', '.join(settings)}.")
        yield html_page.element("pre", text)


# Longer curves are averaged down to this many points.
_POINTS = 400


@plots.plot_style()
def loss_plot(runs: Sequence[Run]) -> html_page.Html:
    """Plot the loss of each training step as HTML, one curve per run."""
    axes = _axes(4.0)
    for number, run in enumerate(runs):
        width = math.ceil(len(run.losses) / _POINTS)
        parts = [run.losses[at : at + width] for at in range(0, len(run.losses), width)]
        axes.plot(
            [start * width + (len(part) + 1) / 2 for start, part in enumerate(parts)],
            [sum(part) / len(part) for part in parts],
            color=plots.COLORS[number % len(plots.COLORS)],
            label=run.name,
            marker="o" if len(parts) == 1 else None,
        )
    axes.set(xlabel="step", ylabel="loss")
    if len(runs) > 1:
        axes.legend()
    return _svg(axes)


@plots.plot_style()
def curve_plot(steps: Sequence[int], values: Sequence[float | None], name: str) -> html_page.Html:
    """Plot a metric over training steps. None leaves a gap in the curve."""
    axes = _axes(3.0)
    axes.plot(steps, [math.nan if value is None else value for value in values], marker="o")
    axes.set(xlabel="step", ylabel=name.replace("_", " "))
    return _svg(axes)


def _axes(height: float) -> Axes:
    return Figure(figsize=(8, height), layout="constrained").subplots()


def _svg(axes: Axes) -> html_page.Html:
    figure = axes.get_figure()
    assert isinstance(figure, Figure)
    return plots.svg_of(figure)
