"""``recd report``: runs as a page."""

from __future__ import annotations

from pathlib import Path

import click

from recd_plugins.api import RecdError
from recd_plugins.api.commands import OUTPUT, PAGE, check_output
from recd_plugins.api.files import write_text


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    type=OUTPUT,
    help="The page.  [default: the first RUN with the suffix .html]",
)
@click.option("--force", is_flag=True, help="Replace the page where it is there.")
def report(runs: tuple[Path, ...], output: Path | None, force: bool) -> None:
    """Show one run, or compare several, as a page of HTML that needs nothing else.

    RUN is a file that `recd run --json` wrote; of a comparison each side is a run. What the others
    are compared with stands first.

    \b
    recd run my.yaml --json monday.json
    recd report monday.json
    recd report monday.json tuesday.json -o both.html
    """
    if runs[0].is_dir():
        raise RecdError(f"{runs[0]}: is a folder; name a file that recd run --json wrote")
    from recd_plugin_reports.runs import read_runs

    path = output or runs[0].with_suffix(".html")
    if path.resolve() in {run.resolve() for run in runs}:
        raise RecdError(f"{path}: is a run, which its page would replace; name another by -o")
    check_output(path, force, PAGE)
    found = read_runs(runs)
    # Takes a second to import.
    from recd_plugin_reports.page import page

    write_text(path, page(found))
    click.echo(f"{path}: {', '.join(run.name for run in found)}")
