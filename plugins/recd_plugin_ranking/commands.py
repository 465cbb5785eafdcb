"""``recd rank``: measures how well a model ranks the test items among all items."""

from __future__ import annotations

from pathlib import Path

import click

from recd_plugins.api import cli_options, file_utils, imports, run_folders


@click.command("rank", short_help="Rank all items for each row of the test split.")
@cli_options.TRAINED
@cli_options.SETTINGS
@click.option("--item", metavar="FEATURE", help="Item feature.  [default: defined by the model]")
@click.option(
    "--user",
    metavar="FEATURE",
    help="User feature. Items in training rows of the same user are excluded from the ranking.",
)
@click.option(
    "--seen",
    multiple=True,
    metavar="FEATURE",
    help="Feature with the user's earlier items, which are excluded from the ranking. Can be "
    "repeated.",
)
@click.option(
    "-k",
    "most",
    type=cli_options.AT_LEAST_1,
    multiple=True,
    default=[10],
    help="Cutoff k of the metrics: the first k items.",
)
@click.option(
    "--sampled",
    type=cli_options.AT_LEAST_1,
    help="Rank against this many sampled items instead of all items, which is less reliable.",
)
@click.option("--seed", type=cli_options.COUNT_FROM_0, default=0, help="Seed of the sampled items.")
@click.option(
    "--vectors",
    "vectors_to",
    type=cli_options.OUTPUT_FOLDER,
    metavar="FOLDER",
    help="Write items.parquet and users.parquet with vectors to this folder.",
)
@cli_options.RUN
@cli_options.CHECKPOINT
@click.option("--force", is_flag=True, help="Replace existing vector files.")
@click.option(
    "--json",
    "json_path",
    type=cli_options.OUTPUT,
    metavar="FILE",
    help="Write the metrics as JSON to this file.",
)
@click.pass_obj
def rank_command(
    plugins_dir: Path | None,
    trained: Path,
    settings: tuple[str, ...],
    item: str | None,
    user: str | None,
    seen: tuple[str, ...],
    most: tuple[int, ...],
    sampled: int | None,
    seed: int,
    vectors_to: Path | None,
    run_number: int | None,
    checkpoint: str | None,
    force: bool,
    json_path: Path | None,
) -> None:
    """Rank all items with a checkpoint for each positive row of the test split.

    REGISTRY selects its newest finished run. RUN is a run folder, which needs no registry file.
    KEY=VALUE overrides a value, as in recd run.

    \b
    recd rank registry.yaml --user user_id --seen history_seen
    """
    from recd_plugin_ranking.full_ranking import VECTORS, Rules, rank

    imports.silence_upstream()
    model = run_folders.find_trained(trained, run_number, checkpoint, settings, plugins_dir)
    registry, chosen = model.registry, model.checkpoint
    if vectors_to is not None:
        for file in (vectors_to / name for name in VECTORS):
            cli_options.check_apart(file, registry, chosen)
            cli_options.check_output(file, force, "item", "vector")
    rules = Rules(item or "", user, seen, most, sampled, seed)
    found = rank(registry, rules, chosen, vectors_to)
    for name, value in found.items():
        click.echo(f"{name:14} {value:.5f}" if isinstance(value, float) else f"{name:14} {value}")
    if json_path is not None:
        file_utils.write_json(json_path, found)
