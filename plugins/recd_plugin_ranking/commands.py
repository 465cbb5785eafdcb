"""``recd rank``: how well a model finds the items of the test split among all items."""

from __future__ import annotations

from pathlib import Path

import click

from recd_plugins.api import checkpoint_files, cli_options, file_utils, imports


@click.command("rank", short_help="Rank all items for each row of the test split.")
@click.argument("registry_path", metavar="FILE", type=click.Path(path_type=Path))
@cli_options.SETTINGS
@click.option(
    "--item", metavar="FEATURE", help="Feature of the item.  [default: what the model says]"
)
@click.option(
    "--user",
    metavar="FEATURE",
    help="Feature of the user: items of training rows with the same one are not ranked.",
)
@click.option(
    "--seen",
    multiple=True,
    metavar="FEATURE",
    help="Feature of items that the user had, as a history: not ranked. Can be repeated.",
)
@click.option(
    "-k",
    "most",
    type=cli_options.AT_LEAST_1,
    multiple=True,
    default=[10],
    help="Of figures: first k.",
)
@click.option(
    "--sampled",
    type=cli_options.AT_LEAST_1,
    help="Rank against so many drawn items; without it against all, which is what counts.",
)
@click.option("--seed", type=cli_options.COUNT_FROM_0, default=0, help="Seed of the draws.")
@click.option(
    "--vectors",
    "vectors_to",
    type=cli_options.OUTPUT_FOLDER,
    metavar="FOLDER",
    help="Write the vectors of items and users here, as items.parquet and users.parquet.",
)
@cli_options.CHECKPOINT
@click.option("--force", is_flag=True, help="Replace vectors that are there.")
@click.option(
    "--json", "json_path", type=cli_options.OUTPUT, metavar="FILE", help="Write the figures here."
)
@click.pass_obj
def rank_command(
    plugins_dir: Path | None,
    registry_path: Path,
    settings: tuple[str, ...],
    item: str | None,
    user: str | None,
    seen: tuple[str, ...],
    most: tuple[int, ...],
    sampled: int | None,
    seed: int,
    vectors_to: Path | None,
    checkpoint: str | None,
    force: bool,
    json_path: Path | None,
) -> None:
    """Rank all items for each positive row of the test split, by a checkpoint. KEY=VALUE
    sets a value of the file, as for recd run.

    \b
    recd rank registry.yaml --user user_id --seen history_seen
    """
    from recd_plugin_ranking.full_ranking import VECTORS, Rules, rank
    from recd_plugins.api import load_registry

    imports.silence_upstream()
    registry = load_registry(registry_path, plugins_dir=plugins_dir, settings=settings)
    chosen = checkpoint_files.chosen_checkpoint(registry, checkpoint)
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
