"""``recd trace``: profiles the locality of id traces, and generates synthetic traces."""

from __future__ import annotations

from pathlib import Path

import click

from recd_plugins.api import cli_options

_tables = click.option(
    "--tables",
    multiple=True,
    metavar="PATTERN",
    help="Table to use, a name or glob: t_ and the feature. Default: all tables. Can be repeated.",
)
_force = click.option("--force", is_flag=True, help="Overwrite FILE if it exists.")


@click.group()
def trace() -> None:
    """Profile the locality of id traces, and generate synthetic traces with the same locality.

    \b
    recd trace profile registry.yaml -o traces.parquet
    recd trace generate traces.parquet --accesses 1000000 -o synthetic.txt
    """


@trace.command("profile", short_help="Profile the ids and LRU stack distances of SOURCE.")
@click.argument("source", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    type=cli_options.OUTPUT,
    required=True,
    metavar="FILE",
    help="Profile file to write.",
)
@click.option(
    "--columns",
    metavar="NAMES",
    help=(
        "For a text file: the feature of each number in a line, separated by "
        'commas. By default all numbers are ids of the feature "id".'
    ),
)
@_tables
@click.option(
    "--rows", type=cli_options.AT_LEAST_1, help="Read only this many rows from the start."
)
@_force
@click.pass_obj
def profile_command(
    plugins_dir: Path | None,
    source: Path,
    output: Path,
    columns: str | None,
    tables: tuple[str, ...],
    rows: int | None,
    force: bool,
) -> None:
    """Measure how soon ids repeat in a text file (.gz too) or in the dataset of a registry file.

    In a text file, each trace is a column of integers. For a registry file, the trace of a table
    lists the ids that are looked up in the training rows, after preprocessing.
    """
    from recd_plugin_dlrm.trace import profile, trace_report
    from recd_plugins.api import (
        cli_options,
        consoles,
        imports,
        load_registry,
        plugin_call,
        progress_bars,
    )

    cli_options.check_output(output, force, "feature", "rows")
    is_text = source.suffix not in (".yaml", ".yml")
    if is_text:
        names = [name.strip() for name in (columns or "id").split(",")]
        if not all(names) or len(set(names)) < len(names):
            raise click.UsageError(
                f"--columns {columns}: a name is empty or repeated. Use unique names."
            )
    elif columns is not None:
        raise click.UsageError("--columns works only with text files. Remove --columns.")
    else:
        imports.silence_upstream()
        registry = load_registry(source, plugins_dir=plugins_dir)
        with plugin_call(registry.dataset, "prepare"):
            registry.dataset.prepare()
        names = list(registry.dataset.schema().sparse)
    chosen = profile.choose([f"t_{name}" for name in names], tables)
    features = [name.removeprefix("t_") for name in chosen]
    with progress_bars.row_progress(f"reading {source.name}", rows) as advance:
        pieces = (
            profile.text_pieces(source, names if columns else (), features, rows)
            if is_text
            else profile.registry_pieces(registry, features, rows)
        )
        made = profile.profile_pieces(pieces, features, str(source), advance)
    profile.write_profile(made, output)
    consoles.output_console().print(trace_report.render_profile(made))


@trace.command("generate", short_help="Generate synthetic traces with the locality of PROFILE.")
@click.argument("profile", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    type=cli_options.OUTPUT,
    required=True,
    metavar="FILE",
    help="Trace file to write: Parquet if it ends in .parquet, else text, optionally .gz.",
)
@click.option(
    "--accesses",
    type=cli_options.AT_LEAST_1,
    help="Ids per trace. Default: as many as in the original.",
)
@_tables
@click.option("--seed", type=cli_options.COUNT_FROM_0, default=0, show_default=True)
@click.option(
    "--min-new",
    type=click.FloatRange(min=0, max=1, max_open=True),
    metavar="P0",
    help=(
        "Minimum share of new ids. By default it is raised as far as LRU hit "
        "rates need it; 0 keeps the original share."
    ),
)
@_force
def generate_command(
    profile: Path,
    output: Path,
    accesses: int | None,
    tables: tuple[str, ...],
    seed: int,
    min_new: float | None,
    force: bool,
) -> None:
    """Generate synthetic traces for tables of PROFILE, with about the same LRU hit rates."""
    from recd_plugin_dlrm.trace import trace_report
    from recd_plugin_dlrm.trace.generator import generator_of
    from recd_plugin_dlrm.trace.profile import choose, read_profile, write_trace
    from recd_plugins.api import cli_options, consoles, progress_bars

    cli_options.check_output(output, force)
    known = read_profile(profile)
    traces = [known.tables[name] for name in choose(list(known.tables), tables)]
    counts = {each.accesses for each in traces}
    if accesses is None and len(counts) > 1:
        raise click.UsageError(
            "the tables of the profile have different numbers of accesses. Set --accesses, or "
            "select one table with --tables."
        )
    accesses = accesses or counts.pop()
    generators = [generator_of(each, accesses, seed, min_new) for each in traces]
    provenance = {
        "profile": str(known.path),
        "source": known.source,
        "accesses": accesses,
        "seed": seed,
        "p0": {each.profile.table: each.new_share for each in generators},
    }
    with progress_bars.row_progress(f"drawing {output.name}", accesses) as advance:
        write_trace(output, generators, accesses, provenance, advance)
    consoles.output_console().print(trace_report.render_synthetic(generators))
