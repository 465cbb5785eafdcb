"""``recd trace``: profile the locality of traces of ids, and draw synthetic ones with the same."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from recd_plugins.api import (
    AT_LEAST_1,
    COUNT_FROM_0,
    OUTPUT,
    FiniteFloat,
    report_options,
)

if TYPE_CHECKING:
    from recd_plugin_dlrm.trace.profile import TraceProfile
    from recd_plugin_dlrm.trace.trace_report import Synthetic

_tables = click.option(
    "--tables",
    multiple=True,
    metavar="PATTERN",
    help="Tables, a name or glob: t_ and the feature; all without it. Can be repeated.",
)
_force = click.option("--force", is_flag=True, help="Replace FILE where it is there.")


@click.group()
def trace() -> None:
    """Profile the locality of traces of ids, and draw synthetic traces with the same.

    \b
    recd trace profile registry.yaml -o traces.parquet
    recd trace generate traces.parquet --accesses 1000000 -o synthetic.txt
    """


@trace.command("profile", short_help="Ids and LRU stack distances of the traces of SOURCE.")
@click.argument("source", type=click.Path(path_type=Path))
@click.option(
    "-o", "--output", type=OUTPUT, required=True, metavar="FILE", help="Write the profile here."
)
@click.option(
    "--columns",
    metavar="NAMES",
    help="Of a text file: the features whose ids stand in a line, with commas between them. "
    "Without it all numbers are ids of the feature id.",
)
@_tables
@click.option("--rows", type=AT_LEAST_1, help="Read the first so many rows, not all.")
@_force
@report_options("Write the figures here.", "Write a picture of distances and hit rates here")
@click.pass_obj
def profile_command(
    plugins_dir: Path | None,
    source: Path,
    output: Path,
    columns: str | None,
    tables: tuple[str, ...],
    rows: int | None,
    force: bool,
    json_path: Path | None,
    plot_path: Path | None,
) -> None:
    """Profile the traces of SOURCE: a text file (.gz too), or a registry file (.yaml, .yml).

    Of a text file a trace is a column of whole numbers. Of a registry file it is what a table is
    looked up with, row by row of the training split, after preprocessing.
    """
    from recd_plugin_dlrm.trace.profile import write_profile
    from recd_plugin_dlrm.trace.trace_report import plot_profile, profile_json, render_profile
    from recd_plugins.api import check_output, output_console, table_kind, write_json

    check_output(output, force, table_kind("trace profile", "feature", "rows"))
    if source.suffix in (".yaml", ".yml"):
        if columns is not None:
            raise click.UsageError("--columns is for text files; a dataset knows its features")
        made = _profile_registry(source, plugins_dir, tables, rows)
    else:
        made = _profile_text(source, columns, tables, rows)
    write_profile(made, output)
    if json_path is not None:
        write_json(json_path, profile_json(made))
    if plot_path is not None:
        plot_profile(made, plot_path)
    output_console().print(render_profile(made))


@trace.command("generate", short_help="Draw synthetic traces with the locality of PROFILE.")
@click.argument("profile", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    type=OUTPUT,
    required=True,
    metavar="FILE",
    help="Write the traces here: Parquet where it ends in .parquet, else text, also .gz.",
)
@click.option(
    "--accesses",
    type=AT_LEAST_1,
    help="Ids of each trace; as many as the originals have without it.",
)
@_tables
@click.option("--seed", type=COUNT_FROM_0, default=0, show_default=True)
@click.option(
    "--min-new",
    type=FiniteFloat(min=0, max=1, max_open=True),
    metavar="P0",
    help="Raise p0, the share of new ids, to this at least. Without it as far as hit rates need "
    "it; 0 leaves it as it was.",
)
@_force
@report_options("Write the figures here.", "Write a picture of hit rates here")
def generate_command(
    profile: Path,
    output: Path,
    accesses: int | None,
    tables: tuple[str, ...],
    seed: int,
    min_new: float | None,
    force: bool,
    json_path: Path | None,
    plot_path: Path | None,
) -> None:
    """Draw synthetic traces of tables of PROFILE, and compare LRU hit rates with the originals'."""
    from recd_plugin_dlrm.trace.profile import read_profile
    from recd_plugin_dlrm.trace.stored_rows import trace_kind
    from recd_plugin_dlrm.trace.trace_report import plot_synthetic, render_synthetic, synthetic_json
    from recd_plugins.api import check_output, output_console, write_json

    check_output(output, force, trace_kind(output))
    compared = _generate(read_profile(profile), output, accesses, tables, seed, min_new)
    if json_path is not None:
        write_json(json_path, synthetic_json(compared))
    if plot_path is not None:
        plot_synthetic(compared, plot_path)
    output_console().print(render_synthetic(compared))


def _profile_text(
    source: Path, columns: str | None, tables: tuple[str, ...], rows: int | None
) -> TraceProfile:
    from recd_plugin_dlrm.trace.profile import choose, profile_pieces, text_pieces
    from recd_plugins.api import row_progress

    names = [name.strip() for name in (columns or "id").split(",")]
    if not all(names) or len(set(names)) < len(names):
        raise click.UsageError(f"--columns {columns} has an empty name, or one twice")
    chosen = choose([f"t_{name}" for name in names], tables)
    features = [name.removeprefix("t_") for name in chosen]
    with row_progress(f"reading {source.name}", rows) as advance:
        pieces = text_pieces(source, names if columns else (), features, rows)
        return profile_pieces(pieces, features, str(source), advance)


def _profile_registry(
    source: Path, plugins_dir: Path | None, tables: tuple[str, ...], rows: int | None
) -> TraceProfile:
    from recd_plugin_dlrm.trace.profile import choose, profile_pieces, registry_pieces
    from recd_plugins.api import load_registry, plugin_call, row_progress, silence_upstream

    silence_upstream()
    registry = load_registry(source, plugins_dir=plugins_dir)
    with plugin_call(registry.dataset, "prepare"):
        registry.dataset.prepare()
        sparse = registry.dataset.schema().sparse
    chosen = choose([f"t_{name}" for name in sparse], tables)
    features = [name.removeprefix("t_") for name in chosen]
    with row_progress(f"reading {source.name}", rows) as advance:
        pieces = registry_pieces(registry, features, rows)
        return profile_pieces(pieces, features, str(source), advance)


def _generate(
    profile: TraceProfile,
    output: Path,
    accesses: int | None,
    tables: tuple[str, ...],
    seed: int,
    min_new: float | None,
) -> list[Synthetic]:
    from recd_plugin_dlrm.trace.generator import generator_of
    from recd_plugin_dlrm.trace.profile import choose
    from recd_plugin_dlrm.trace.stored_rows import write_trace
    from recd_plugin_dlrm.trace.trace_report import Synthetic
    from recd_plugins.api import row_progress

    traces = [profile.tables[name] for name in choose(list(profile.tables), tables)]
    if accesses is None:
        counts = {each.accesses for each in traces}
        if len(counts) > 1:
            raise click.UsageError(
                "the tables of the profile have different numbers of accesses: say how many with "
                "--accesses, or take one with --tables"
            )
        (accesses,) = counts
    generators = [generator_of(each, accesses, seed, min_new) for each in traces]
    provenance = {
        "profile": str(profile.path),
        "source": profile.source,
        "accesses": accesses,
        "seed": seed,
        "p0": {each.profile.table: each.new_share for each in generators},
    }
    with row_progress(f"drawing {output.name}", accesses) as advance:
        write_trace(output, generators, accesses, provenance, advance)
    return [
        Synthetic(each.profile, each.new_share, each.num_ids, each.counts) for each in generators
    ]
