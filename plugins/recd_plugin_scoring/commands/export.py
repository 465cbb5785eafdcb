"""``recd export``: a trained model as a program that needs torch alone."""

from __future__ import annotations

from pathlib import Path

import click

from recd_plugins.api import RecdError
from recd_plugins.api.commands import (
    CHECKPOINT,
    OUTPUT_FOLDER,
    SETTINGS,
    check_apart,
    chosen_checkpoint,
    silence_upstream,
    text_kind,
)
from recd_plugins.api.files import check_writable
from recd_plugins.api.registry import load_registry

# Files of an export that may be replaced.
_FILES = {
    "model.pt2": text_kind("exported model", rb"\APK"),
    "model_int8.pt2": text_kind("exported model", rb"\APK"),
    "signature.json": text_kind("signature of an exported model", rb'\A\{\s*"dense"'),
}


@click.command()
@click.argument("registry", type=click.Path(path_type=Path))
@SETTINGS
@click.option(
    "-o",
    "--output",
    type=OUTPUT_FOLDER,
    required=True,
    help="A folder; made where it is missing.",
)
@CHECKPOINT
@click.option(
    "--int8",
    is_flag=True,
    help="Write model_int8.pt2 too, with tables of 8 bits a number, and the error of its scores.",
)
@click.option("--force", is_flag=True, help="Replace files that are there.")
@click.pass_obj
def export(
    plugins_dir: Path | None,
    registry: Path,
    output: Path,
    checkpoint: str | None,
    int8: bool,
    settings: tuple[str, ...],
    force: bool,
) -> None:
    """Export a trained model of REGISTRY as one program of torch.export.

    Writes model.pt2 and signature.json into a folder. The program takes raw ids and numbers,
    transforms them as training did, and gives probabilities; rows of a batch may share the stored
    rows of a feature, as the candidates of a request share its history. It is loaded by
    torch.export.load and needs torch alone.

    KEY=VALUE sets a value of the file, as for recd run.

    \b
    recd export registry.yaml -o exported
    recd export registry.yaml -o exported --int8 --checkpoint newest
    """
    read = load_registry(registry, plugins_dir=plugins_dir, settings=settings)
    chosen = chosen_checkpoint(read, checkpoint)
    for name, kind in _FILES.items():
        if (output / name).exists() and not force:
            raise RecdError(f"{output}: holds an export; name another folder, or --force")
        if wrong := kind.wrong(output / name):
            raise RecdError(wrong)
    check_apart(output / "model.pt2", read, chosen)
    check_writable(output / "model.pt2")
    from recd_plugin_scoring.absent import say_absent
    from recd_plugin_scoring.export import export_to
    from recd_plugins.api.training import with_trained_columns

    silence_upstream()
    read = with_trained_columns(read, chosen)
    say_absent(read, chosen)
    error = export_to(read, chosen, output, int8=int8)
    click.echo(f"{output / 'model.pt2'}: the model of {chosen}", err=True)
    if error is not None:
        click.echo(
            f"{output / 'model_int8.pt2'}: scores of {error.rows:,} training rows differ by "
            f"{error.mean:.2g} on average, {error.largest:.2g} at most",
            err=True,
        )
    elif int8:
        click.echo(
            f"{output / 'model_int8.pt2'}: its scores were not compared, for want of training rows",
            err=True,
        )
