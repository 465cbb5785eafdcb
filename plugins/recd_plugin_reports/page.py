"""Runs as one page of HTML that needs nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from recd_plugin_reports.plots import curve_plot, loss_plot, same_curves, stacked_plot
from recd_plugin_reports.runs import Run
from recd_plugins.api.pages import Html, element, html_page, html_section, html_table
from recd_plugins.api.training import (
    figure_text,
    figure_words,
    figures_of,
    quality_advice,
    worse_than_base_rate,
)

# What has a place of its own on the page; all else are sections that parts of a run report.
_KNOWN = frozenset(
    {
        "samples_per_second", "step_seconds", "collective_bytes", "ids_looked_up",
        "peak_memory_bytes", "losses", "train", "test", "stages", "step_memory", "stalls",
        "registry", "settings", "rounds", "validation",
    }
)  # fmt: skip
# Rows of a section that are shown, and levels that headings have.
_MOST_ROWS = 200
# Share of a step from which on waiting for data is worth a word.
_WAITING = 0.05


def page(runs: Sequence[Run]) -> str:
    """The page: what stands out, figures side by side, plots, and sections of every part."""
    title = (
        " and ".join(run.name or "run" for run in runs) if len(runs) < 4 else f"{len(runs)} runs"
    )
    parts = [
        element("h1", title),
        element("ul", *(element("li", finding) for finding in findings(runs))),
        element("h2", "Figures"),
        _figures(runs),
        *html_section(
            "Losses", "Of each step, the mean over ranks, before it.", loss_plot(_with_losses(runs))
        ),
        *_validations(runs),
        *_where_time_goes(runs),
        *_where_bytes_go(runs),
        *_sections(runs),
        *_registries(runs),
    ]
    return html_page(title, parts)


def findings(runs: Sequence[Run]) -> Iterator[str]:
    """What stands out, in sentences."""
    first = runs[0]
    for run in runs[1:]:
        for name, sentence in (
            ("samples_per_second", "trains {} times as many samples a second as"),
            ("collective_bytes", "sends {} times the bytes of"),
        ):
            over = run.over(first, name)
            if over is None:
                continue
            times = f"{over.median:.2f}"
            if over.least < over.most:
                times += f" ({over.least:.2f} to {over.most:.2f})"
            unsure = over.least < 1 < over.most
            doubt = ", which shows no difference" if unsure else ""
            yield f"{run.name} {sentence.format(times)} {first.name}{doubt}."
    for group in same_curves(runs):
        if len(group) > 1:
            most = max(run.same_losses(group[0]) or 0.0 for run in group[1:])
            yield f"Losses of {', '.join(run.name for run in group)} agree within {most:.1e}."
    for run in runs:
        named = f"{run.name}: " if len(runs) > 1 else ""
        stalls = run.values.get("stalls")
        if stalls and stalls["share"] > _WAITING:
            yield f"{named}{stalls['share']:.0%} of a step is waiting for data."
        whose = run.name if len(runs) > 1 else ""
        train = (run.values["train"] or {}).get("normalized_entropy")
        if train is not None and (told := worse_than_base_rate(train, "train", whose)):
            yield f"{told}."
        for told in quality_advice(run.values, whose):
            yield f"{told}."


def _figures(runs: Sequence[Run]) -> Html:
    found = [figures_of(run.values) for run in runs]
    units = {name: unit for each in found for name, (_, unit) in each.items()}
    headings = [""]
    for i, run in enumerate(runs):
        headings += [run.name or "value", *(["ratio"] if i else [])]
    rows = []
    for name, unit in units.items():
        cells = [figure_words(name)]
        for i, run in enumerate(runs):
            over = run.over(runs[0], name)
            cells += [
                figure_text(run.figure(name), unit),
                *([over.times().replace("\n", ", ") if over else ""] if i else []),
            ]
        rows.append(cells)
    return html_table(headings, rows)


def _validations(runs: Sequence[Run]) -> Iterable[Html]:
    for run in runs:
        curve = run.values.get("validation")
        if not curve or not curve["steps"]:
            continue
        best = "" if curve["best_step"] is None else f", best after step {curve['best_step']:,}"
        ended = ", where the run was stopped" if curve["stopped_early"] else ""
        text = f"{curve['metric']} of the test split by step{best}{ended}."
        plot = curve_plot(curve["steps"], curve["values"], curve["metric"])
        yield from html_section(f"Validation {run.name}".strip(), text, plot)


def _where_time_goes(runs: Sequence[Run]) -> Iterable[Html]:
    stages = {run.name: run.values["stages"] for run in runs if run.values["stages"]}
    if stages:
        in_ms = {
            name: {stage: 1e3 * seconds for stage, seconds in of_run.items()}
            for name, of_run in stages.items()
        }
        yield from html_section("Time of a step", "By stage, profiled.", stacked_plot(in_ms, "ms"))
    waits = {
        run.name: {cause: 100 * share for cause, share in run.values["stalls"]["shares"].items()}
        for run in runs
        if run.values.get("stalls")
    }
    if any(share >= 1 for shares in waits.values() for share in shares.values()):
        yield from html_section(
            "Waiting for data", "Share of a step, by cause.", stacked_plot(waits, "% of a step")
        )


def _where_bytes_go(runs: Sequence[Run]) -> Iterable[Html]:
    sent = {
        run.name: {kind: num / 1e6 for kind, num in run.values["collective_bytes"].items()}
        for run in runs
    }
    if any(any(kinds.values()) for kinds in sent.values()):
        yield from html_section(
            "Bytes", "All ranks together in one step, by collective.", stacked_plot(sent, "MB")
        )


def _sections(runs: Sequence[Run]) -> Iterable[Html]:
    """What parts of the runs report, whatever they are: values by their path."""
    for name in dict.fromkeys(name for run in runs for name in run.values if name not in _KNOWN):
        leaves = [dict(_leaves(run.values.get(name))) for run in runs]
        paths = list(dict.fromkeys(path for each in leaves for path in each))
        if not paths:
            continue
        yield element("h2", name.replace("_", " ").capitalize())
        rows = [
            (path or name, *(_text(each.get(path)) for each in leaves))
            for path in paths[:_MOST_ROWS]
        ]
        yield html_table(("", *(run.name or "value" for run in runs)), rows)
        if len(paths) > _MOST_ROWS:
            yield element("p", f"The first {_MOST_ROWS} of {len(paths):,} values.", css="note")


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


def _registries(runs: Sequence[Run]) -> Iterable[Html]:
    """The files that the runs were made by, one for all that share it, and what was set besides."""
    by_text: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for run in runs:
        if text := run.values.get("registry"):
            by_text.setdefault((text, tuple(run.values.get("settings", ()))), []).append(run.name)
    for (text, settings), names in by_text.items():
        of = f" of {', '.join(names)}" if len(by_text) > 1 else ""
        yield element("h2", f"Registry{of}")
        if settings:
            yield element("p", f"With {', '.join(settings)}.")
        yield element("pre", text)


def _with_losses(runs: Sequence[Run]) -> list[Run]:
    return [run for run in runs if run.losses]
