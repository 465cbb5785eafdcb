"""HTML pages about runs, from run folders or files of ``recd run --json``."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from recd_plugin_runs import runs as run_lists
from recd_plugins.api import RecdError, html_page, plots, run_folders, run_results, text_utils

# Losses that differ by at most this are reported as equal.
_EQUAL_LOSSES = 1e-5
_COLORS = [color for color in plots.ALL_COLORS if color != plots.GREY]


@dataclass(frozen=True)
class Run:
    """One run of a report file: its name, results, complete report, settings and line style."""

    name: str
    values: Mapping[str, Any]
    report: object = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    style: int = 0

    def figures(self) -> dict[str, tuple[float | None, str]]:
        """Return (value, unit) by metric name, including log loss and AUC of each baseline."""
        found: dict[str, tuple[float | None, str]] = {}
        stored = self.values.get("baselines", {}).items()
        test = self.values["test"] or {}
        for name, figure in run_results.figures_of(self.values).items():
            found[name] = figure
            metric = name.removeprefix("test_")
            if metric == name or not metric.endswith(("log_loss", "auc")):
                continue
            entropy = test.get(metric.replace("log_loss", "normalized_entropy"))
            if metric.endswith("log_loss") and figure[0] and entropy:
                found[f"base_rate_{metric}"] = figure[0] / entropy, "loss"
            found |= {f"{each}_{metric}": (of[metric], "loss") for each, of in stored}
        return found

    def figure(self, name: str) -> float | None:
        """Return a metric of the run, or None if missing. For repeated runs, return the median."""
        if spread := self.values.get("rounds", {}).get(name, {}).get("value"):
            return float(spread["median"])
        return self.figures().get(name, (None, ""))[0]

    def over(self, first: Run, figure: str) -> run_results.Spread | None:
        """Return the ratio of a metric to the run ``first``; None if the runs were not compared."""
        if self.report is not first.report:
            return None
        if spread := self.values.get("rounds", {}).get(figure, {}).get("ratio"):
            return run_results.Spread(**spread)
        value, base = self.figure(figure), first.figure(figure)
        return None if value is None or not base else run_results.Spread.of([value / base])

    @property
    def line(self) -> dict[str, Any]:
        """Return the matplotlib arguments of the run's lines. The first run is on top."""
        return {
            "label": self.name,
            "color": _COLORS[self.style % len(_COLORS)],
            "zorder": 3 - self.style / 100,
        }

    @property
    def losses(self) -> list[float]:
        """Return the loss of each step, with NaN for non-finite losses."""
        return [math.nan if loss is None else loss for loss in self.values["losses"]]


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Read the runs of run folders, folders of runs, and files of ``recd run --json``.

    Each run gets a unique name. Runs of different files are sorted by the normalized entropy of
    the test split (with several labels by the loss), best first.
    """
    found: list[Run] = []
    paths = [each for path in paths for each in _results_in(path)]
    for given in paths:
        path = given / run_folders.RESULT if given.is_dir() else given
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
            settings = run_lists.listed(given).settings if given.is_dir() else run.settings
            found.append(replace(run, name=f"{of_file} {run.name}".strip(), settings=settings))
    if len(paths) > 1:
        found = _best_first(found)
    names = [run.name for run in found]
    return [
        run if names.count(run.name) == 1 else replace(run, name=f"{run.name} ({i + 1})")
        for i, run in enumerate(found)
    ]


def _best_first(runs: Sequence[Run]) -> list[Run]:
    values = [math.inf if value is None else value for value in _selecting(runs)[1]]
    return [runs[i] for i in sorted(range(len(runs)), key=values.__getitem__)]


def _selecting(runs: Sequence[Run]) -> tuple[str, list[float | None]]:
    """Return the split that selects the best run, and the metric of each run on it."""
    metric = _metric(runs)
    split = run_lists.selecting_split(_as_listed(runs), metric)
    return split, [run.metric(metric, split) for run in _as_listed(runs)]


def _metric(runs: Sequence[Run]) -> str:
    return run_lists.known_metric(None, _as_listed(runs))


def _results_in(path: Path) -> list[Path]:
    """Return the finished runs if ``path`` is a folder of runs, otherwise ``[path]``."""
    if not path.is_dir() or (path / run_folders.RESULT).exists():
        return [path]
    found = [run for run in run_folders.runs_in(path) if (run / run_folders.RESULT).exists()]
    if not found:
        raise RecdError(
            f"{path}: the folder has no results of a run. Pass the folder of a finished run, such "
            "as runs/clicks/3."
        )
    return found


def runs_of(report: Any) -> list[Run]:
    """Return the runs in a report of ``recd run``. In a comparison, the baseline is first."""
    if not isinstance(report, dict):
        return []
    sides = report.get("shardings") or {
        name: report[name] for name in ("baseline", "plugins") if report.get(name)
    }
    shared = {name: report[name] for name in ("registry", "settings") if name in report}
    rounds = report.get("rounds") or {}
    given = shared.get("settings") or ()
    settings = run_lists.settings_of(shared.get("registry") or "", given)
    if seeds := report.get("seeds"):
        return _best_first(
            [
                Run(f"seed {n}", {**values, **shared}, values, {**settings, "training.seed": n})
                for n, values in seeds.items()
            ]
        )
    return [
        Run(name, {**values, **shared, "rounds": rounds.get(name, {})}, report, settings)
        for name, values in (sides or {"": report}).items()
        if values.keys() >= {"losses", "collective_bytes"}
    ]


# Values shown in their own sections. All others appear in tables.
_KNOWN = frozenset(
    {
        "samples_per_second", "step_seconds", "ids_looked_up", "peak_memory_bytes", "losses",
        "train", "test", "registry", "settings", "rounds", "validation", "stalls", "stages",
        "collective_bytes", "calibration_bins", "first_step", "baselines",
    }
)  # fmt: skip
# Data wait is mentioned if it exceeds this share of a step.
_WAITING = 0.2


def page(runs: Sequence[Run]) -> str:
    """Return an HTML page that compares runs: findings, figures, curves and tables."""
    title = runs[0].name or "run"
    folders = {Path(run.name).parent for run in runs}
    if len(runs) > 1:
        title = f"{len(runs)} runs"
        if len(folders) == 1 and (folder := folders.pop()).name:
            title += f" of {folder.name}"
            runs = [replace(run, name=f"run {Path(run.name).name}") for run in runs]
    runs = [replace(run, style=number) for number, run in enumerate(runs)]
    told = [html_page.element("li", finding) for finding in findings(runs)]
    parts = [
        html_page.element("h1", title),
        *([html_page.element("ul", *told)] if told else []),
        *_settings(runs),
        html_page.element("h2", "Figures"),
        _figures(runs),
        *html_page.html_section(
            "Losses",
            "Moving average of the training loss, before the update of the weights."
            + (" The faint line has the loss of each step." if len(runs) == 1 else ""),
            loss_plot([run for run in runs if run.losses]),
        ),
        *_validations(runs),
        *_calibration(runs),
        *_costs(runs),
        *_sections(runs),
        *_registries(runs),
    ]
    generator = '<meta name="generator" content="recd report">'
    return html_page.html_page(title, parts).replace("<head>\n", f"<head>\n{generator}\n", 1)


def findings(runs: Sequence[Run]) -> Iterator[str]:
    """Yield one sentence for each notable result of the runs."""
    first = runs[0]
    split, (best, *_) = _selecting(runs)
    if len({id(run.report) for run in runs}) > 1 and best is not None:
        named = run_results.figure_words(_metric(runs))
        yield f"{first.name} is best: {named} {best:.5f} on the {split} split."
        if told := run_lists.other_rows([run.values for run in runs]):
            yield told
    for run in runs[1:]:
        for name, sentence in (
            ("samples_per_second", "trains {} times as many samples per second as"),
            ("collective_bytes", "sends {} times as many bytes as"),
        ):
            over = run.over(first, name)
            if over is None or over.least == over.most == 1:
                continue
            times = f"{over.median:.2f}"
            if over.least < over.most:
                times += f" ({over.least:.2f} to {over.most:.2f})"
            unsure = over.least < 1 < over.most
            doubt = ", which is no significant difference" if unsure else ""
            yield f"{run.name} {sentence.format(times)} {first.name}{doubt}."
    for run in runs[1:]:
        apart = [abs(a - b) for a, b in zip(run.losses, first.losses, strict=False)]
        same = run.report is first.report and len(run.losses) == len(first.losses)
        if same and all(each <= _EQUAL_LOSSES for each in apart):
            yield f"Losses of {first.name} and {run.name} agree within {max(apart, default=0):.1e}."
    yield from (f"{line}." for line in run_lists.seed_lines(_as_listed(runs), _metric(runs)))
    alike: dict[str, list[tuple[str, str]]] = {}
    for run in runs:
        for told in _advice(run, run.name if len(runs) > 1 else ""):
            key = re.sub(r"[\d.]+", "", told.replace(run.name, ""))
            alike.setdefault(key, []).append((run.name, told))
    for (_, told), *others in alike.values():
        more = f" The same applies to {', '.join(name for name, _ in others)}." if others else ""
        yield told + more


def _advice(run: Run, whose: str) -> Iterator[str]:
    """Yield sentences about data stalls and about metrics that need attention."""
    stalls = run.values.get("stalls")
    if stalls and stalls["share"] > _WAITING:
        named = f"{whose}: " if whose else ""
        yield f"{named}{stalls['share']:.0%} of each step is spent waiting for data."
    if run.values["test"] is None:
        train = run.values["train"] or {}
        for told in run_results.entropy_advice(train, "train", whose, train):
            yield f"{told}."
    for told in run_results.quality_advice(run.values, whose):
        yield f"{told}."


def _as_listed(runs: Sequence[Run]) -> list[run_lists.ListedRun]:
    return [
        run_lists.ListedRun(Path(run.name.removeprefix("run ")), "", run.settings, run.values, 0)
        for run in runs
    ]


def _settings(runs: Sequence[Run]) -> Iterable[html_page.Html]:
    if keys := run_lists.differing([run.settings for run in runs]):
        yield html_page.element("h2", "Settings that differ")
        rows = [(key, *(str(run.settings.get(key, "-")) for run in runs)) for key in keys]
        yield html_page.html_table(("", *(run.name for run in runs)), rows)


def _figures(runs: Sequence[Run]) -> html_page.Html:
    found = [run.figures() for run in runs]
    complete = sorted(found, key=len, reverse=True)
    units = {name: unit for each in complete for name, (_, unit) in each.items()}
    compared = [i > 0 and run.report is runs[0].report for i, run in enumerate(runs)]
    headings = [""]
    for run, has_ratio in zip(runs, compared, strict=True):
        headings += [run.name or "value", *(["ratio"] if has_ratio else [])]
    seeds = run_lists.seed_groups(_as_listed(runs))
    headings += [f"mean ± stdev of {names}" for _, names in seeds]
    rows = []
    for name, unit in units.items():
        if unit == "B" and not any(run.figure(name) for run in runs):
            continue
        cells = [run_results.figure_words(name)]
        for run, has_ratio in zip(runs, compared, strict=True):
            over = run.over(runs[0], name)
            times = over.times() if over else ""
            cells += [
                run_results.figure_text(run.figure(name), unit),
                *([times.replace("\n", ", ") if times != "1x" else ""] if has_ratio else []),
            ]
        for group, _ in seeds:
            metric = name.removeprefix("test_") if unit == "loss" else ""
            known = [value for run in group if (value := run.metric(metric)) is not None]
            spread = (statistics.fmean(known), statistics.stdev(known)) if len(known) > 1 else ()
            cells.append(" ± ".join(run_results.figure_text(each, unit) for each in spread))
        rows.append(cells)
    return html_page.html_table(headings, rows)


def _validations(runs: Sequence[Run]) -> Iterable[html_page.Html]:
    """Yield a plot per metric, with a sentence on the best step of each run."""
    by_metric: dict[str, list[Run]] = {}
    for run in runs:
        curve = run.values.get("validation")
        if curve and curve["steps"]:
            by_metric.setdefault(curve["metric"], []).append(run)
    for metric, of_metric in by_metric.items():
        told = []
        for run in of_metric:
            curve = run.values["validation"]
            best = "" if curve["best_step"] is None else f" best after step {curve['best_step']:,}"
            ended = ", then stopped early" if curve["stopped_early"] else ""
            if best or ended:
                told.append(f"{run.name}:{best}{ended}.".removeprefix(":").strip())
        text = " ".join([f"The {run_results.figure_words(metric)} during training.", *told])
        yield from html_page.html_section("Validation", text, validation_plot(of_metric, metric))


def _calibration(runs: Sequence[Run]) -> Iterable[html_page.Html]:
    if known := [run for run in runs if run.values.get("calibration_bins")]:
        yield from html_page.html_section(
            "Calibration",
            "Test rows in ten groups with similar predictions: the mean prediction and the share "
            "of positive labels in each group. Calibrated predictions lie on the dashed line.",
            calibration_plot(known),
        )


def _costs(runs: Sequence[Run]) -> Iterable[html_page.Html]:
    """Yield HTML bar charts: time per training step, and bytes sent per step."""
    waiting: dict[str, dict[str, float]] = {}
    stages: dict[str, dict[str, float]] = {}
    sent: dict[str, dict[str, float]] = {}
    for run in runs:
        values, name = run.values, run.name or "run"
        step = 1e3 * (run.figure("step_seconds") or 0.0)
        if stalls := values.get("stalls"):
            shares = {f"wait for {cause}": share for cause, share in stalls["shares"].items()}
            shares = {"training": max(0.0, 1 - sum(shares.values())), **shares}
            waiting[name] = {part: step * share for part, share in shares.items()}
        if values.get("stages"):
            stages[name] = {part: 1e3 * value for part, value in values["stages"].items()}
        if any(values["collective_bytes"].values()):
            sent[name] = {kind: value / 1e6 for kind, value in values["collective_bytes"].items()}
    for heading, text, bars, unit in (
        ("Time of a step", "Training, and waiting for data by cause.", waiting, "ms"),
        ("Time by stage", "From the profiled steps of --breakdown.", stages, "ms"),
        ("Bytes of a step", "Bytes that all ranks send, by collective.", sent, "MB"),
    ):
        if bars:
            yield from html_page.html_section(heading, text, bar_plot(bars, unit))


def _sections(runs: Sequence[Run]) -> Iterable[html_page.Html]:
    """Yield one collapsed HTML table per report key. Skip keys that the page shows elsewhere."""
    for name in dict.fromkeys(name for run in runs for name in run.values if name not in _KNOWN):
        leaves = [dict(_leaves(run.values.get(name))) for run in runs]
        paths = list(dict.fromkeys(path for each in leaves for path in each))
        if not paths:
            continue
        rows = [(path or name, *(_text(each.get(path)) for each in leaves)) for path in paths]
        table = html_page.html_table(("", *(run.name or "value" for run in runs)), rows)
        yield _folded(f"Details: {name.replace('_', ' ')}", table)


def _folded(summary: str, *children: html_page.Html) -> html_page.Html:
    return html_page.element("details", html_page.element("summary", summary), *children)


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path and value of each number, text and plain list; skip lists of records."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _leaves(item, f"{path} {name}".strip().replace("_", " "))
    elif value is not None and not (
        isinstance(value, list) and any(isinstance(item, Mapping | list) for item in value)
    ):
        yield path, value


def _text(value: Any) -> str:
    if isinstance(value, list):
        return text_utils.shortened([_text(each) for each in value], str)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "" if value is None else str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


def _registries(runs: Sequence[Run]) -> Iterable[html_page.Html]:
    """Yield the registry file and overrides of each run as HTML."""
    by_text: dict[str, list[Run]] = {}
    for run in runs:
        if text := run.values.get("registry"):
            by_text.setdefault(text, []).append(run)
    for text, of_text in by_text.items():
        of = f" of {', '.join(run.name for run in of_text)}" if len(by_text) > 1 else ""
        settings = {", ".join(run.values.get("settings", ())) for run in of_text}
        common = settings if len(settings) == 1 else ()
        given = [html_page.element("p", f"With {each}.") for each in common if each]
        yield _folded(f"Registry file{of}", *given, html_page.element("pre", text))


# Longer curves are thinned to this many points.
_POINTS = 600


@plots.plot_style()
def loss_plot(runs: Sequence[Run]) -> html_page.Html:
    """Plot moving averages of the training loss as HTML. Also plots each loss of a single run."""
    axes = _axes(4.0)
    limits = []
    longest = max((len(run.losses) for run in runs), default=0)
    for run in runs:
        losses = np.array(run.losses)
        width = max(1, min(len(losses) // 4, max(20, longest // (10 if len(runs) > 1 else 20))))
        known = np.isfinite(losses)
        sums, counts = (
            np.convolve(each, np.ones(width), "same")[: len(losses)]
            for each in (np.where(known, losses, 0.0), known.astype(float))
        )
        smooth = np.where(counts > 0, sums / np.maximum(counts, 1), math.nan)
        at = np.unique(np.linspace(0, len(losses) - 1, _POINTS).astype(int))
        marker = "o" if len(at) == 1 else None
        if width > 1 and len(runs) == 1:
            axes.plot(at + 1, losses[at], color=run.line["color"], alpha=0.2, linewidth=1)
        wider = min(1.5 + 0.8 * run.style, 4)  # than lines above, which may be equal
        axes.plot(at + 1, smooth[at], marker=marker, linewidth=wider, **run.line)
        shown = losses if len(runs) == 1 else smooth
        limits += [*np.quantile(shown[known], [0.005, 0.995])] if known.any() else []
    if limits and min(limits) < max(limits):  # single outliers must not flatten the curves
        margin = 0.05 * (max(limits) - min(limits))
        axes.set_ylim(min(limits) - margin, max(limits) + margin)
    axes.set(xlabel="step", ylabel="loss")
    return _svg(axes, legend=len(runs) > 1)


@plots.plot_style()
def validation_plot(runs: Sequence[Run], metric: str) -> html_page.Html:
    """Plot the validations of runs with the same metric as HTML. Rings mark the best steps."""
    axes = _axes(3.4)
    for run in runs:
        curve = run.values["validation"]
        values = [math.nan if value is None else value for value in curve["values"]]
        axes.plot(curve["steps"], values, marker=".", **run.line)
        if (best := curve["best_step"]) in curve["steps"]:
            at = curve["steps"].index(best)
            label = "best step" if len(runs) == 1 else None
            color = run.line["color"]
            axes.plot(best, values[at], "o", ms=12, mfc="none", mew=2, color=color, label=label)
    axes.set(xlabel="step", ylabel=run_results.figure_words(metric))
    return _svg(axes, legend=True)


@plots.plot_style()
def calibration_plot(runs: Sequence[Run]) -> html_page.Html:
    """Plot mean label against mean prediction, for each group of test rows, as HTML."""
    axes = _axes(4.6, width=5.2)
    most, num_curves = 0.0, 0
    for run in runs:
        of_run = run.values["calibration_bins"]
        by_task = of_run if isinstance(of_run, dict) else {"": of_run}
        for (task, bins), marker in zip(by_task.items(), cycle("os^vD"), strict=False):
            _, predicted, observed = zip(*bins, strict=True)
            line = {**run.line, "label": f"{run.name} {task}".strip()}
            axes.plot(predicted, observed, marker=marker, ms=5, **line)
            most, num_curves = max(most, *predicted, *observed), num_curves + 1
    axes.plot([0, most], [0, most], "--", color="#566070", linewidth=1, zorder=1)
    axes.set(xlabel="mean prediction", ylabel="share of positive labels")
    return _svg(axes, legend=num_curves > 1)


@plots.plot_style()
def bar_plot(runs: Mapping[str, Mapping[str, float]], unit: str) -> html_page.Html:
    """Plot a stacked horizontal bar per run as HTML. ``runs``: length of each part, per run."""
    axes = _axes(1.5 + 0.42 * len(runs))
    names = [_short(name, 24) for name in runs]
    rows = np.arange(len(runs))
    left = np.zeros(len(runs))
    colors = cycle(plots.ALL_COLORS)
    for part in dict.fromkeys(part for parts in runs.values() for part in parts):
        values = np.array([parts.get(part, 0.0) for parts in runs.values()])
        label = part.replace("_", " ")
        axes.barh(rows, values, 0.6, left, label=label, color=next(colors))
        left += values
    axes.set_yticks(rows, names)
    axes.invert_yaxis()
    axes.set(xlabel=unit)
    axes.grid(visible=False, axis="y")
    return _svg(axes, legend=True)


def _short(name: str, length: int) -> str:
    return name if len(name) <= length else f"...{name[3 - length :]}"


def _axes(height: float, width: float = 7.0) -> Axes:
    return Figure(figsize=(width, height), layout="constrained").subplots()


def _svg(axes: Axes, *, legend: bool) -> html_page.Html:
    figure = axes.get_figure()
    assert isinstance(figure, Figure)
    if legend:
        handles, labels = axes.get_legend_handles_labels()
        labels = [_short(label, 60) for label in labels]
        width = max(map(len, labels), default=0) + 5
        columns = max(1, min(3, int(9 * figure.get_figwidth()) // width))
        figure.legend(handles, labels, loc="outside upper left", ncols=columns)
    return plots.svg_of(figure)
