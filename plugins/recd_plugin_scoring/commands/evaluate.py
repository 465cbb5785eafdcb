"""``recd evaluate``: how good a trained model is on the test split."""

from __future__ import annotations

import math
from pathlib import Path

import click

from recd_plugins.api import RecdError
from recd_plugins.api.commands import (
    BATCH_SIZE,
    CHECKPOINT,
    OUTPUT_OR_TERMINAL,
    RANKS,
    SETTINGS,
    chosen_checkpoint,
    output_console,
    overrides,
)
from recd_plugins.api.files import json_text, write_json
from recd_plugins.api.registry import load_registry


@click.command()
@click.argument("registry", type=click.Path(path_type=Path))
@SETTINGS
@CHECKPOINT
@RANKS
@BATCH_SIZE
@click.option(
    "--json",
    "json_path",
    type=OUTPUT_OR_TERMINAL,
    help="Write figures here; - writes them to the terminal, and nothing else.",
)
@click.pass_obj
def evaluate(
    plugins_dir: Path | None,
    registry: Path,
    settings: tuple[str, ...],
    checkpoint: str | None,
    ranks: int | None,
    batch_size: int | None,
    json_path: Path | None,
) -> None:
    """Evaluate a trained model of REGISTRY on every row of its test split.

    Shows normalized entropy, AUC and the metrics of the file. KEY=VALUE sets a value of the file,
    as for recd run. Under torchrun it joins the ranks that are there.

    \b
    recd evaluate registry.yaml
    recd evaluate registry.yaml --checkpoint checkpoints/step-000000100 --json -
    """
    on_terminal = json_path == Path("-")
    read = load_registry(registry, plugins_dir=plugins_dir, settings=settings)
    if "test" not in read.dataset.splits():
        raise RecdError(
            f"{registry}: {read.dataset.name} has no test split; give it one by its options "
            "(recd plugins lists them)"
        )
    chosen = chosen_checkpoint(read, checkpoint)
    given = overrides(ranks=ranks, batch_size=batch_size, evaluate=True)
    read = read.with_training(given)
    from rich.table import Table

    from recd_plugin_scoring.evaluate import evaluate as on_rank
    from recd_plugins.api.distributed import choose_device, torchrun_rank
    from recd_plugins.api.training import TrainedJob, on_ranks, worse_than_base_rate

    job = TrainedJob(registry, chosen, plugins_dir, given, settings, choose_device(read), read.text)
    alike = {"--checkpoint": checkpoint, "--batch-size": batch_size}
    found = on_ranks(read, on_rank, job, alike)
    if torchrun_rank() not in (None, 0):
        return
    if on_terminal:
        click.echo(json_text(found.as_json()), nl=False)
        return
    if json_path is not None:
        write_json(json_path, found.as_json())
    table = Table(title=f"{chosen.name}, test split")
    table.add_column("")
    table.add_column("value", justify="right", overflow="fold")
    report = found.as_json()["test"]
    table.add_row("rows", f"{report.pop('num_samples'):,}")
    for name, value in report.items():
        table.add_row(name.replace("_", " "), "-" if math.isnan(value) else f"{value:.6g}")
    output_console().print(table)
    if told := worse_than_base_rate(found.test.normalized_entropy, "test"):
        click.echo(told)
