"""``recd profile``: counts how often training reads each row of an embedding table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from functools import reduce, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from recd_plugins.api import (
    RecdError,
    Table,
    cli_options,
    consoles,
    file_utils,
    imports,
    load_registry,
    plots,
    progress_bars,
    text_utils,
)

if TYPE_CHECKING:
    import numpy as np
    from rich.console import RenderableType

    from recd_plugins.api import AccessProfile, RunConfig, TableAccess


_TOPS = {"0.1 %": 0.001, "1 %": 0.01, "10 %": 0.1}
_MOST_CURVES = 12
_POINTS = 200
_INPUT = click.Path(path_type=Path)
_shown = cli_options.report_options(
    "Write the figures as JSON to this file.",
    "Plot the share of accesses over the share of rows to this file",
)


def _show(made: AccessProfile, json_path: Path | None, plot_path: Path | None) -> None:
    if json_path is not None:
        file_utils.write_json(json_path, as_json(made))
    if plot_path is not None:
        plot(made, plot_path)
    consoles.output_console().print(render(made))


def _written(command: Callable[..., AccessProfile]) -> Any:
    """Decorate a command so that the profile it returns is written to a file and shown."""

    @click.option(
        "-o",
        "--output",
        type=cli_options.OUTPUT,
        required=True,
        metavar="FILE",
        help="Profile file to write.",
    )
    @click.option("--force", is_flag=True, help="Overwrite FILE if it exists.")
    @_shown
    @wraps(command)
    def run(
        *args: Any,
        output: Path,
        force: bool,
        json_path: Path | None,
        plot_path: Path | None,
        **options: Any,
    ) -> None:
        cli_options.check_output(output, force, "table", "row", "accesses")
        made = command(*args, **options)
        with consoles.error_console().status(f"writing {output}"):
            made.save(output)
        _show(made, json_path, plot_path)

    return run


@click.group()
def profile() -> None:
    """Count how often each row of a table is read, or assume Zipf's law.

    A profile is a Parquet file. Plugins use it to find hot rows, and recd simulate draws batches
    from it.

    \b
    recd profile registry registry.yaml -o profile.parquet
    recd profile zipf --table t_items --rows 1000000 --length 50 -o zipf.parquet
    recd profile merge monday.parquet tuesday.parquet -o both.parquet
    recd profile show profile.parquet
    """


@profile.command("registry", short_help="Count the training rows of a registry's data.")
@click.argument("registry", type=_INPUT)
@click.option(
    "--rows",
    type=cli_options.AT_LEAST_1,
    help="Read only this many rows from the start of the data.",
)
@click.option(
    "--tables",
    multiple=True,
    metavar="PATTERN",
    help="Table to profile, a name or glob. Default: all tables. Can be repeated.",
)
@click.option(
    "--table",
    "own_tables",
    multiple=True,
    type=(str, cli_options.AT_LEAST_1, str),
    metavar="NAME ROWS FEATURES",
    help=(
        "Table of your own model: its rows, and its features separated by "
        "commas. Replaces the tables of the section model. Can be repeated."
    ),
)
@click.option(
    "--bound",
    type=cli_options.AT_LEAST_1,
    help=(
        "Rows per table that are counted exactly. If more rows are read, the "
        "most read ones keep counts with an error bound. Default: 33,554,432 "
        "rows in all tables together."
    ),
)
@click.option(
    "--all-rows",
    is_flag=True,
    help=(
        "Count every row of the data. By default, only unique rows of each batch "
        "count if the converter of REGISTRY deduplicates."
    ),
)
@_written
@click.pass_obj
def registry_command(
    plugins_dir: Path | None,
    registry: Path,
    rows: int | None,
    tables: tuple[str, ...],
    own_tables: tuple[tuple[str, int, str], ...],
    bound: int | None,
    all_rows: bool,
) -> AccessProfile:
    """Count how often the training data of REGISTRY reads each row of its tables."""
    from recd_plugins.api import measure_access, transforms

    imports.silence_upstream()
    loaded = load_registry(registry, plugins_dir=plugins_dir)
    loaded.dataset.prepare()
    chosen = _matching(_tables(loaded, own_tables), tables)
    transforms.fitted_steps(loaded, loaded.dataset.schema())  # shows its own progress bars
    with progress_bars.row_progress("reading rows", rows) as advance:
        return measure_access(
            loaded, chosen, rows=rows, bound=bound, deduplicated=not all_rows, progress=advance
        )


@profile.command("zipf", short_help="Create the profile of a table by Zipf's law.")
@click.option("--table", required=True, metavar="NAME", help="Name of the table in the model.")
@click.option("--rows", type=cli_options.AT_LEAST_1, required=True, help="Rows of the table.")
@click.option(
    "--length", type=cli_options.ABOVE_0, required=True, help="Mean accesses per sample (L)."
)
@click.option(
    "--exponent",
    type=cli_options.ABOVE_0,
    default=1.0,
    show_default=True,
    help="Row k is read in proportion to (k + shift)^-exponent.",
)
@click.option(
    "--shift",
    type=click.FloatRange(min=0),
    default=0.0,
    metavar="Q",
    help="Shift of the Zipf-Mandelbrot law.",
)
@click.option("--seed", type=cli_options.COUNT_FROM_0, default=0, help="Seed to shuffle the rows.")
@_written
def zipf_command(
    table: str, rows: int, length: float, exponent: float, shift: float, seed: int
) -> AccessProfile:
    """Create the profile of a table whose rows are read by Zipf's law."""
    from recd_plugins.api import AccessProfile, distributions

    made = distributions.zipf(table, rows, length, exponent, shift=shift, seed=seed)
    parameters = f"exponent {exponent:g}" + (f", shift {shift:g}" if shift else "")
    return AccessProfile({table: made}, f"zipf ({parameters})")


@profile.command("merge", short_help="Merge profiles of the same tables.")
@click.argument("profiles", nargs=-1, required=True, type=_INPUT)
@_written
def merge_command(profiles: tuple[Path, ...]) -> AccessProfile:
    """Merge PROFILES of the same tables by adding their counts, for example over several days."""
    from recd_plugins.api import AccessProfile

    return reduce(AccessProfile.merge, map(AccessProfile.load, profiles))


@profile.command("show")
@click.argument("file", type=_INPUT)
@_shown
def show_command(file: Path, json_path: Path | None, plot_path: Path | None) -> None:
    """Show the tables of the profile FILE."""
    from recd_plugins.api import AccessProfile

    _show(AccessProfile.load(file), json_path, plot_path)


def _tables(registry: RunConfig, own: Sequence[tuple[str, int, str]]) -> list[Table]:
    """Return the tables given with ``--table``, or else the tables of the registry's model."""
    if own:
        return [
            Table(
                name, tuple(map(str.strip, names.split(","))), rows, embedding_dim=0, pooled=False
            )
            for name, rows, names in own
        ]
    if not registry.has_model:
        raise RecdError(
            f"{registry.path}: the registry has no model: section, so its tables are unknown. Add "
            "a model: section, or describe each table with --table NAME ROWS FEATURES."
        )
    import torch

    from recd_plugins.api import build_model, model_tables

    with torch.device("meta"):
        return model_tables.tables_of(build_model(registry, registry.dataset.schema()))


def _matching(tables: list[Table], patterns: Sequence[str]) -> list[Table]:
    names = [table.name for table in tables]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            near = (
                text_utils.did_you_mean(pattern, names)
                or f". The model has the tables {text_utils.shortened(names)}."
            )
            raise click.UsageError(f"--tables {pattern!r} matches no table{near}")
    if not patterns:
        return tables
    return [t for t in tables if any(fnmatchcase(t.name, pattern) for pattern in patterns)]


def as_json(profile: AccessProfile) -> dict[str, Any]:
    """Return a summary of the profile as JSON values."""
    return {
        "source": profile.source,
        "tables": {name: _figures(table) for name, table in profile.tables.items()},
    }


def render(profile: AccessProfile) -> RenderableType:
    """Return a report for a terminal, with one line per table."""
    from rich.console import Group

    from recd_plugins.api import text_table

    tables = profile.tables
    deduplicated = {table.counted for table in tables.values() if table.batch_size is not None}
    numbers = ["rows", "unread", "samples", "L", *(["f"] if deduplicated else []), *_TOPS, "error"]
    lines = text_table("", ["table"], numbers)
    for name, table in tables.items():
        figures = _figures(table)
        unread = figures["unread_rows"]
        lines.add_row(
            name,
            f"{table.num_embeddings:,}",
            "-" if unread is None else f"{unread:,}",
            f"{table.samples:,}",
            f"{table.length:.4g}",
            *([f"{table.dedupe_factor:.4g}"] if deduplicated else ()),
            *(f"{100 * share:.1f} %" for share in figures["share_of_accesses"].values()),
            f"{table.error:.4g}" if table.error else "exact",
        )
    legend = (
        "rows: rows of the table. unread: rows that are never read. L: mean accesses per sample. "
        f"{', '.join(_TOPS)}: share of accesses to the most read rows."
    )
    if deduplicated:
        legend += (
            f" Only {' and '.join(sorted(deduplicated))} are counted, because only these are sent; "
            "L counts all rows. f: accesses of all rows divided by counted accesses."
        )
    if any(table.error for table in tables.values()):
        legend += " error: maximum error of a count; increase --bound to reduce it."
    return Group(f"Access profile of {profile.source}", lines, legend)


def _figures(table: TableAccess) -> dict[str, Any]:
    import numpy as np

    read = int(np.count_nonzero(table.accesses))
    return {
        "features": list(table.features),
        "num_embeddings": table.num_embeddings,
        "samples": table.samples,
        "accesses": table.total,
        "length": table.length,
        "known_rows": len(table.rows),
        "unread_rows": None if table.error else table.num_embeddings - read,
        "share_of_accesses": {
            name: table.covered(max(1, round(share * table.num_embeddings)))
            for name, share in _TOPS.items()
        },
        "error": table.error,
        "dedupe_factor": table.dedupe_factor,
        "batch_size": table.batch_size,
    }


@plots.plot_style()
def plot(profile: AccessProfile, path: Path) -> None:
    """Plot the share of accesses against the share of rows for the most read tables."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4.5), layout="constrained")
    axes = figure.subplots()
    tables = sorted(profile.tables.values(), key=lambda table: -table.length)
    for table in tables[:_MOST_CURVES]:
        shares, covered = coverage(table)
        axes.plot(100 * shares, 100 * covered, label=f"{table.table} (L {table.length:.3g})")
    axes.set(xscale="log", ylim=(0, 101), ylabel="share of accesses (%)")
    axes.set(xlabel="rows of the table, most read first (%)")
    axes.legend(fontsize="small")
    file_utils.write_figure(path, figure)


def coverage(table: TableAccess) -> tuple[np.ndarray, np.ndarray]:
    """Return points of the coverage curve: fractions of rows, and of accesses to these rows."""
    import numpy as np

    rows = np.unique(np.geomspace(1, table.num_embeddings, _POINTS).round().astype(np.int64))
    sums = np.concatenate([[0.0], np.cumsum(table.accesses)])
    known = np.minimum(rows, len(table.rows))
    covered = sums[known]
    if table.tail_rows:
        covered += table.tail_accesses * (rows - known) / table.tail_rows
    return rows / table.num_embeddings, covered / max(table.total, np.finfo(float).tiny)
