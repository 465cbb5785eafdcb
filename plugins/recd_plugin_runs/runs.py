"""``recd runs``: lists the runs of a folder with their settings, metrics and times."""

from __future__ import annotations

import re
import shutil
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    launcher,
    load_registry,
    run_folders,
    text_table,
    text_utils,
)

#: Metrics of which a larger value is better.
_LARGER = ("auc", "r2")


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

    def figures(self, split: str = "test") -> dict[str, float | None]:
        """Return the metrics of a split: test, or validation (at the best step)."""
        result = self.result or {}
        validation = result.get("validation") or {}
        return (validation.get("figures") if split == "validation" else result.get("test")) or {}

    def metric(self, name: str, split: str = "test") -> float | None:
        """Return a metric of a split, or None if it was not measured."""
        return self.figures(split).get(name)


def listed(folder: Path) -> ListedRun:
    """Read a run folder."""
    saved = run_folders.read_settings(folder)
    options = [f"training.{name}={value}" for name, value in saved.options.items()]
    settings = settings_of(saved.text, [*saved.settings, *options])
    result = run_folders.read_result(folder)
    return ListedRun(folder, saved.started, settings, result, run_folders.newest_step(folder))


def settings_of(registry: str, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the values of a registry file by dotted key, with overrides such as ``KEY=VALUE``.

    Keys of list entries contain the plugin and feature patterns, not the index. So two registry
    files can be compared.
    """
    settings = {"training.seed": "0", **flat(_parsed(registry) or {})}
    for each in overrides:
        key, value = re.split("[= ]", each, maxsplit=1)
        settings = {name: of for name, of in settings.items() if not _replaces(key, name)}
        settings |= flat(_parsed(value), key)
    joined: dict[str, str] = {}
    for key, value in settings.items():
        name = re.sub(r"\[\d+\]$", "", key)
        joined[name] = f"{joined[name]}, {value}" if name != key and name in joined else value
    return _by_entry(joined)


def _by_entry(settings: Mapping[str, str]) -> dict[str, str]:
    """Replace list indices in setting keys by plugin and feature patterns.

    For example, ``pooling[0].x`` becomes ``pooling(PLUGIN PATTERNS).x``.
    """
    names: dict[str, str] = {}
    has_optimizer = False
    for key, use in settings.items():
        if not (found := re.fullmatch(r"(.+)\[(\d+)\]\.use", key)):
            continue
        entry = key.removesuffix(".use")
        patterns = settings.get(f"{entry}.features") or settings.get(f"{entry}.tables") or ""
        name = f"{found[1]}({f'{use} {patterns}'.strip()})"
        names[entry] = f"{name} #{found[2]}" if name in names.values() else name
        is_off = settings.get(f"{entry}.enabled") == "False"
        of_all = found[1] == "optimizers" and {"*", "t_*"} & {*patterns.split(", ")}
        has_optimizer |= bool(of_all) and not is_off
    unused = {"training.optimizer"} if has_optimizer else set()
    if has_optimizer and settings.get("training.dense_learning_rate", "null") != "null":
        unused.add("training.learning_rate")
    renamed = {}
    for key, value in settings.items():
        entry, _, rest = key.partition("].")
        if key not in unused and rest == "use" and f"{entry}]" in names:
            renamed[names[f"{entry}]"]] = "yes"
        elif key not in unused and f"{entry}]" not in names:
            renamed[key] = value
        elif key not in unused and rest not in ("features", "tables"):
            renamed[f"{names[f'{entry}]']}.{rest.removeprefix('options.')}"] = value
    return renamed


def _replaces(key: str, name: str) -> bool:
    """Return whether setting ``key`` also changes ``name``, which is inside it or contains it."""
    pairs = ((key, name), (name, key))
    return any(long.startswith((f"{short}.", f"{short}[")) for short, long in pairs)


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


def other_rows(results: Sequence[Mapping[str, Any]]) -> str | None:
    """Return a warning if results of runs are of different test rows, otherwise None."""
    tests = set()
    for result in results:
        if test := result.get("test"):
            bins = result.get("calibration_bins") or ()
            by_task = bins if isinstance(bins, Mapping) else {"": bins}
            positives = tuple(
                round(sum(rows * mean_label for rows, _, mean_label in each))
                for each in by_task.values()
            )
            tests.add((test["num_samples"], positives))
    if len(tests) < 2:
        return None
    return "These runs have different test rows, so their metrics are not comparable."


def known_metric(name: str | None, runs: Sequence[ListedRun]) -> str:
    """Return the metric called ``name``, in any case; raise RecdError if no run has it.

    Without a name, return normalized_entropy, or loss if all runs have several labels.
    """
    known = {each for run in runs for each in run.figures()}
    if name is None:
        return "normalized_entropy" if not known or "normalized_entropy" in known else "loss"
    wanted = name.lower().replace(" ", "_")
    if not known or wanted in known:
        return wanted
    known.discard("num_samples")
    meant = text_utils.did_you_mean(wanted, sorted(known)) or "."
    raise RecdError(
        f"--metric {name}: no run has metric {name!r}{meant} Use one of these metrics: "
        f"{', '.join(map(repr, sorted(known)))}."
    )


def folder_of_runs(given: Path, plugins_dir: Path | None) -> Path:
    """Return a folder itself, or the folder of the runs of a registry file or table."""
    if given.is_dir():
        return given
    if (generated := run_folders.generated_registry(given)).exists():
        given = generated
    configured = run_folders.runs_folder(load_registry(given, plugins_dir=plugins_dir))
    if configured is None:
        raise RecdError(
            f"{given}: training.checkpoint.runs is not set, so runs have no folders. Set "
            "this key, and train with recd run."
        )
    return configured


def selecting_split(runs: Sequence[ListedRun], metric: str) -> str:
    """Return the split that selects the best run: validation if all finished runs have one."""
    values = [run.metric(metric, "validation") for run in runs if run.result is not None]
    return "test" if None in values else "validation"


def best(runs: Sequence[ListedRun], metric: str) -> ListedRun | None:
    """Return the run with the best value of a metric; None if no run has one."""
    sign, split = (
        -1 if metric.rpartition(".")[2].startswith(_LARGER) else 1,
        selecting_split(runs, metric),
    )
    values = [(run.metric(metric, split), run) for run in runs]
    known = [(sign * value, run) for value, run in values if value is not None]
    return min(known, key=lambda each: each[0])[1] if known else None


def best_run(given: Path, plugins_dir: Path | None) -> int:
    """Return the number of the run that ``recd runs`` marks as best, and print its folder.

    Compares the runs that have the same dataset settings as the newest finished run.
    """
    folder = folder_of_runs(given, plugins_dir)
    found = [listed(path) for path in run_folders.runs_in(folder)]
    comparable = groups([run for run in found if run.figures()], _is_of_dataset)
    if not comparable:
        raise RecdError(f"{folder}: no finished run in this folder has test metrics. Use --run N.")
    newest, _ = max(comparable, key=lambda group: int(group[0][-1].path.name))
    metric = known_metric(None, newest)
    chosen = best(newest, metric)
    assert chosen is not None
    if launcher.torchrun_rank() in (None, 0):
        split = selecting_split(newest, metric)
        why = f"best {text_utils.metric_words(metric)} of the {split} split"
        click.echo(f"using {chosen.path} ({why})", err=True)
    return int(chosen.path.name)


def _is_of_dataset(setting: str) -> bool:
    return setting.startswith("dataset.")


def groups(
    runs: Sequence[ListedRun], has: Callable[[str], bool]
) -> list[tuple[list[ListedRun], str]]:
    """Group runs that have equal values of the settings for which ``has`` returns True.

    Each group comes with the names of its runs, such as ``runs 1, 2``.
    """
    found: dict[frozenset[Any], list[ListedRun]] = {}
    for run in runs:
        key = frozenset((name, value) for name, value in run.settings.items() if has(name))
        found.setdefault(key, []).append(run)
    return [(each, f"runs {', '.join(run.path.name for run in each)}") for each in found.values()]


def seed_groups(runs: Sequence[ListedRun]) -> list[tuple[list[ListedRun], str]]:
    """Return groups of runs that differ only in their seed, each with the names of its runs."""
    distinct = [same[0] for same, _ in groups(runs, lambda _: True)]
    found = groups(distinct, lambda name: name != "training.seed")
    return [
        each for each in found if len({run.settings.get("training.seed") for run in each[0]}) > 1
    ]


def seed_lines(runs: Sequence[ListedRun], metric: str) -> Iterator[str]:
    """Yield a line for each group of runs that differ only in their seed."""
    for group, names in seed_groups([run for run in runs if run.metric(metric) is not None]):
        values = [run.metric(metric) or 0.0 for run in group]
        yield (
            f"{names} differ only in their seed: {text_utils.metric_words(metric)} "
            f"{statistics.fmean(values):.5f}, standard deviation {statistics.stdev(values):.5f}"
        )


@click.command("runs")
@click.argument("trained", metavar="REGISTRY|FOLDER", type=click.Path(path_type=Path))
@click.option(
    "--metric",
    help="Metric that selects the best run: of the validation split if all runs have one, else of "
    "the test split.  [default: normalized_entropy, or loss for several labels]",
)
@click.option("--json", "json_path", type=cli_options.OUTPUT_OR_TERMINAL, help="Write JSON.")
@click.pass_obj
def runs_command(
    plugins_dir: Path | None, trained: Path, metric: str | None, json_path: Path | None
) -> None:
    """List the runs of a registry file, or of a folder such as runs/clicks.

    Shows the settings that differ between the runs, the metrics of the test split, and which run
    is best among runs with the same dataset settings. `--run best` of other commands selects it.

    \b
    recd runs clicks.yaml
    recd runs runs/clicks --metric auc
    """
    folder = folder_of_runs(trained, plugins_dir)
    found = [listed(path) for path in run_folders.runs_in(folder)]
    if not found:
        raise RecdError(f"{folder}: there are no runs in this folder. Train with recd run.")
    metric = known_metric(metric, found)
    keys = differing([run.settings for run in found])
    comparable = groups(found, _is_of_dataset)
    winners = [best(group, metric) for group, _ in comparable]
    rows = [
        {
            "run": str(run.path),
            "started": run.started,
            "steps": len(run.result["losses"]) if run.result else run.step,
            "finished": run.result is not None,
            "settings": {key: run.settings.get(key) for key in keys},
            "test": run.figures() or None,
            "validation": run.figures("validation") or None,
            "best": run in winners,
        }
        for run in found
    ]
    if json_path == Path("-"):
        click.echo(file_utils.json_text(rows), nl=False)
        return
    if json_path is not None:
        file_utils.write_json(json_path, rows)
    of_tasks = {
        name: None
        for run in found
        for name in run.figures()
        if name.endswith((".log_loss", ".auc", ".rmse"))
    }
    names = list(dict.fromkeys((*(of_tasks or ("log_loss", "auc")), metric)))
    cells = [("test", name) for name in names]
    if any(run.figures("validation") for run in found):
        cells.append(("validation", metric))
    shown = [f"{split} {name}".removeprefix("test ") for split, name in cells]
    headings = ["started (UTC)", "steps", *keys, *map(text_utils.metric_words, shown)]
    columns = {}
    for run, row in zip(found, rows, strict=True):
        values = [run.metric(name, split) for split, name in cells]
        columns[run.path.name + (" best" if run in winners else "")] = [
            run.started[5:16],  # without year and seconds
            f"{row['steps']}" if row["finished"] else f"{row['steps']}, unfinished",
            *(run.settings.get(key, "-") for key in keys),
            *("-" if value is None else f"{value:.5f}" for value in values),
        ]
    _print_columns(str(folder), headings, columns)
    for winner, (group, which) in zip(winners, comparable, strict=True):
        if winner is not None:
            of = f" (of {which}, with the same dataset settings)" if len(comparable) > 1 else ""
            split = selecting_split(group, metric)
            click.echo(
                f"best {text_utils.metric_words(metric)} of the {split} split: {winner.path}{of}"
            )
            if told := other_rows([run.result for run in group if run.result]):
                click.echo(told)
    for line in seed_lines(found, metric):
        click.echo(line)


#: Largest number of runs side by side, and widest column of a run.
_MOST_RUNS, _WIDEST = 6, 24


def _print_columns(
    title: str, headings: Sequence[str], columns: Mapping[str, Sequence[str]]
) -> None:
    """Print a table with a column per run, in several parts if it is wider than the terminal."""
    width = shutil.get_terminal_size((100, 24)).columns
    parts: list[list[str]] = []
    left = 0
    for name, cells in columns.items():
        lines = [line for cell in (f"run {name}", *cells) for line in cell.split("\n")]
        needed = min(_WIDEST, max(map(len, lines))) + 2  # with the space between columns
        if left < needed or len(parts[-1]) == _MOST_RUNS:
            parts.append([])
            left = width - min(width // 2, max(map(len, headings)) + 3)
        parts[-1].append(name)
        left -= needed
    for part in parts:
        rows = zip(headings, *(columns[name] for name in part), strict=True)
        shown = text_table(title, [""], [f"run {name}" for name in part], rows)
        consoles.output_console().print(shown, width=width)
        title = ""
