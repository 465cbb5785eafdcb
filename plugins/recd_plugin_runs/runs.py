"""``recd runs``: lists the runs of a folder with their settings, metrics and times."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from recd_plugins.api import (
    RecdError,
    cli_options,
    consoles,
    file_utils,
    load_registry,
    run_folders,
)

#: Metrics of which a larger value is better.
_LARGER = ("auc",)


@dataclass(frozen=True)
class ListedRun:
    """A run as ``recd runs`` shows it.

    Attributes:
        settings: values of the registry file with the run's overrides, keyed by dotted key.
        result: the content of its result file; None if the run has not finished.
        step: step of its newest checkpoint, 0 without one.
    """

    path: Path
    started: str
    settings: Mapping[str, Any]
    result: Mapping[str, Any] | None
    step: int

    def metric(self, name: str) -> float | None:
        """Return a metric of the test split, or None if it was not measured."""
        value: float | None = ((self.result or {}).get("test") or {}).get(name)
        return value


def listed(folder: Path) -> ListedRun:
    """Read a run folder."""
    saved = run_folders.read_settings(folder)
    options = [f"training.{name}={value}" for name, value in saved.options.items()]
    settings = settings_of(saved.text, [*saved.settings, *options])
    result = run_folders.read_result(folder)
    return ListedRun(folder, saved.started, settings, result, run_folders.newest_step(folder))


def settings_of(registry: str, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the values of a registry file by dotted key, with overrides such as ``KEY=VALUE``."""
    settings = flat(_parsed(registry) or {})
    for each in overrides:
        key, value = re.split("[= ]", each, maxsplit=1)
        settings |= flat(_parsed(value), key)
    return settings


def _parsed(text: str) -> Any:
    try:
        return YAML(typ="safe").load(text)
    except YAMLError:  # the file may come from elsewhere
        return text


def flat(value: Any, key: str = "") -> dict[str, Any]:
    """Return a dict from dotted keys, such as ``sharding[0].use``, to the values of a document."""
    if isinstance(value, dict) and value:
        items = [(f"{key}.{name}" if key else str(name), each) for name, each in value.items()]
    elif isinstance(value, list) and value:
        items = [(f"{key}[{number}]", each) for number, each in enumerate(value)]
    else:
        return {key: "null" if value is None else str(value)}
    return {name: each for inner, of in items for name, each in flat(of, inner).items()}


def differing(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys whose values are not the same in the settings of all runs."""
    keys = dict.fromkeys(key for settings in runs for key in settings)
    return [key for key in keys if len({settings.get(key) for settings in runs}) > 1]


def best(runs: Sequence[ListedRun], metric: str) -> ListedRun | None:
    """Return the run with the best value of a metric; None if no run has one."""
    sign = -1 if metric.startswith(_LARGER) else 1
    known = [(sign * value, run) for run in runs if (value := run.metric(metric)) is not None]
    return min(known, key=lambda each: each[0])[1] if known else None


@click.command("runs")
@click.argument("trained", metavar="REGISTRY|FOLDER", type=click.Path(path_type=Path))
@click.option(
    "--metric",
    default="normalized_entropy",
    show_default=True,
    help="Metric of the test split that selects the best run.",
)
@click.option("--json", "json_path", type=cli_options.OUTPUT_OR_TERMINAL, help="Write JSON.")
@click.pass_obj
def runs_command(
    plugins_dir: Path | None, trained: Path, metric: str, json_path: Path | None
) -> None:
    """List the runs of a registry file, or of a folder such as runs/clicks.

    Shows the settings that differ between the runs, the metrics of the test split, and which run
    is best.

    \b
    recd runs clicks.yaml
    recd runs runs/clicks --metric auc
    """
    folder = trained
    if not trained.is_dir():
        configured = run_folders.runs_folder(load_registry(trained, plugins_dir=plugins_dir))
        if configured is None:
            raise RecdError(
                f"{trained}: training.checkpoint.runs is not set, so runs have no folders. Set "
                "this key, and train with recd run."
            )
        folder = configured
    found = [listed(path) for path in run_folders.runs_in(folder)]
    if not found:
        raise RecdError(f"{folder}: there are no runs in this folder. Train with recd run.")
    keys, winner = differing([run.settings for run in found]), best(found, metric)
    rows = [
        {
            "run": str(run.path),
            "started": run.started,
            "steps": len(run.result["losses"]) if run.result else run.step,
            "finished": run.result is not None,
            "settings": {key: run.settings.get(key) for key in keys},
            "test": (run.result or {}).get("test"),
            "best": run is winner,
        }
        for run in found
    ]
    if json_path == Path("-"):
        click.echo(file_utils.json_text(rows), nl=False)
        return
    if json_path is not None:
        file_utils.write_json(json_path, rows)
    from rich.table import Table

    table = Table(title=str(folder))
    names = list(dict.fromkeys(("log_loss", "auc", metric)))
    for heading in ("run", "started (UTC)", "steps", *keys, *(n.replace("_", " ") for n in names)):
        table.add_column(heading, overflow="fold")
    for run, row in zip(found, rows, strict=True):
        steps = f"{row['steps']}" if row["finished"] else f"{row['steps']}, unfinished"
        values = [run.metric(name) for name in names]
        table.add_row(
            run.path.name + (" best" if run is winner else ""),
            run.started,
            steps,
            *(run.settings.get(key, "-") for key in keys),
            *("-" if value is None else f"{value:.5f}" for value in values),
            style="bold" if run is winner else None,
        )
    consoles.output_console().print(table)
    if winner is not None:
        click.echo(f"best {metric}: {winner.path}")
