"""``recd embeddings``: the rows of a trained table, for vector search."""

from __future__ import annotations

from pathlib import Path

import click

from recd_plugins.api import RecdError
from recd_plugins.api.commands import (
    CHECKPOINT,
    OUTPUT,
    SETTINGS,
    check_apart,
    check_output,
    chosen_checkpoint,
    table_kind,
)
from recd_plugins.api.registry import load_registry


@click.command()
@click.argument("registry", type=click.Path(path_type=Path))
@click.argument("table")
@SETTINGS
@click.option("-o", "--output", type=OUTPUT, required=True, help="A Parquet file.")
@CHECKPOINT
@click.option("--force", is_flag=True, help="Replace a file that is there.")
@click.pass_obj
def embeddings(
    plugins_dir: Path | None,
    registry: Path,
    table: str,
    output: Path,
    checkpoint: str | None,
    settings: tuple[str, ...],
    force: bool,
) -> None:
    """Write the rows of an embedding table of a trained model.

    Of TABLE, a table of REGISTRY's model, as Parquet. A row has id, the row of the table, and
    vector, a list of float32 of fixed size; and value, what preprocessing made the id of, where a
    vocabulary says that. Tables are named as recd plan names them: t_ and the feature.

    KEY=VALUE sets a value of the file, as for recd run.

    \b
    recd embeddings registry.yaml t_item_id -o items.parquet
    """
    if output.suffix.lower() != ".parquet":
        raise RecdError(f"{output}: is written as Parquet; name it .parquet")
    read = load_registry(registry, plugins_dir=plugins_dir, settings=settings)
    chosen = chosen_checkpoint(read, checkpoint)
    check_apart(output, read, chosen)
    check_output(output, force, table_kind("file of embeddings", "id", "vector"))
    from recd_plugin_scoring.absent import say_absent
    from recd_plugin_scoring.embeddings import write_embeddings
    from recd_plugins.api.training import with_trained_columns

    read = with_trained_columns(read, chosen, rows=False)
    say_absent(read, chosen)
    rows = write_embeddings(read, chosen, table, output)
    click.echo(f"{output}: {rows:,} rows of {table} of {chosen}", err=True)
