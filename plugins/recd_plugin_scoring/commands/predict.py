"""``recd predict``: scores of every row of a table by a trained model."""

from __future__ import annotations

from pathlib import Path

import click

from recd_plugin_scoring.score_format import ROW, SCORE, check_keep, format_of
from recd_plugins.api import DataError
from recd_plugins.api.commands import (
    BATCH_SIZE,
    CHECKPOINT,
    OUTPUT,
    RANKS,
    SETTINGS,
    check_apart,
    check_output,
    chosen_checkpoint,
    overrides,
    table_kind,
)
from recd_plugins.api.files import without_remains
from recd_plugins.api.registry import load_registry


@click.command()
@click.argument("registry", type=click.Path(path_type=Path))
@click.argument("table")
@SETTINGS
@click.option("-o", "--output", type=OUTPUT, required=True, help="The file of scores.")
@click.option(
    "--format",
    "kind",
    type=click.Choice(["parquet", "csv", "jsonl"]),
    help="Of the file; by its suffix without it.",
)
@click.option(
    "--keep",
    multiple=True,
    metavar="COLUMN",
    help="A column of TABLE, a Parquet table, that the file has too; again for more.",
)
@CHECKPOINT
@RANKS
@BATCH_SIZE
@click.option("--force", is_flag=True, help="Replace a file that is there.")
@click.pass_obj
def predict(
    plugins_dir: Path | None,
    registry: Path,
    table: str,
    output: Path,
    kind: str | None,
    keep: tuple[str, ...],
    checkpoint: str | None,
    ranks: int | None,
    batch_size: int | None,
    settings: tuple[str, ...],
    force: bool,
) -> None:
    """Score every row of TABLE by a trained model of REGISTRY.

    TABLE is what the dataset of REGISTRY reads, as a Parquet file or a folder of some; it needs no
    label. The file of scores has a row for each of its rows, in their order: the keys that the
    dataset names, the 0-based row, and the score, a probability. Under torchrun the command joins
    the ranks that are there.

    KEY=VALUE sets a value of the file, as for recd run.

    \b
    recd predict registry.yaml new.parquet -o scores.parquet
    recd predict registry.yaml new.parquet -o scores.csv --keep user_id --checkpoint newest
    """
    kind = format_of(output, kind)
    check_keep(keep)
    read = load_registry(registry, plugins_dir=plugins_dir, settings=settings)
    chosen = chosen_checkpoint(read, checkpoint)
    local = () if "://" in table else (Path(table),)
    if local and not local[0].exists():
        raise DataError(f"{table}: no such file or folder")
    check_apart(output, read, *local, chosen)
    check_output(output, force, table_kind("file of scores", ROW, SCORE))
    given = overrides(ranks=ranks, workers=0)
    read = read.with_training(given)
    from recd_plugin_scoring.predict import PredictJob
    from recd_plugin_scoring.predict import predict as on_rank
    from recd_plugins.api.distributed import choose_device, torchrun_rank
    from recd_plugins.api.training import on_ranks

    with without_remains(output) as token:
        job = PredictJob(
            registry,
            chosen,
            plugins_dir,
            given,
            settings,
            choose_device(read),
            read.text,
            table=table,
            output=output,
            kind=kind,
            keep=keep,
            batch_size=batch_size,
            token=token,
            replaces=force,
        )
        alike = {"--checkpoint": checkpoint, "--batch-size": batch_size}
        found = on_ranks(read, on_rank, job, alike)
    if torchrun_rank() in (None, 0):
        click.echo(
            f"{output}: {found.rows:,} rows scored by {chosen} in {found.seconds:.1f} s "
            f"({found.rows / found.seconds:,.0f} rows/s)",
            err=True,
        )
