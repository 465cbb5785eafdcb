"""``recd checkpoint``: list, verify, show and compact checkpoints."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from recd_plugins.runtime.errors import RecdError
from recd_plugins.runtime.folders import locked_folder
from recd_plugins.training.checkpoint_files import (
    IDENTITY,
    MANIFEST,
    METADATA,
    PROGRESS,
    DamagedError,
    chain_of,
    checkpoints_in,
    differing,
    misfits,
    problems,
    read_delta,
    read_manifest,
    read_progress,
    step_name,
)

_PATH = click.argument("path", type=click.Path(path_type=Path))
_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group()
def checkpoint() -> None:
    """List, verify, show or compact checkpoints.

    PATH is one checkpoint, such as checkpoints/step-000000100, or a folder of checkpoints, of which
    show and compact use the newest.
    """


@checkpoint.command("list")
@_PATH
@_JSON
@click.pass_context
def list_(ctx: click.Context, path: Path, as_json: bool) -> None:
    """List checkpoints with their sizes, and mark the one with the best validation result.

    Reports missing files and wrong sizes. Use verify to check the contents.
    """
    reports = [_check_sizes(each) for each in _found(path)]
    try:
        best = read_progress(Path(reports[-1]["path"])).best_step
    except DamagedError:
        best = None
    for report in reports:
        report["best"] = best is not None and Path(report["path"]).name == step_name(best)
    _tell(ctx, reports, as_json)


@checkpoint.command()
@_PATH
@_JSON
@click.pass_context
def verify(ctx: click.Context, path: Path, as_json: bool) -> None:
    """Read every file, and report damaged or unknown files with exit code 1.

    For a delta, also read the checkpoints that it needs.
    """
    reports: list[dict[str, Any]] = []
    found = _found(path)
    with suppress(DamagedError):  # reported for each checkpoint
        found = chain_of(path) if found == [path] else found
    for each in found:
        damage, extra = problems(each)
        report = _check_sizes(each)
        report["damage"] = list(dict.fromkeys([*damage, *report["damage"]]))
        damaged = {each["path"] for each in reports if each["damage"]}
        with suppress(DamagedError):  # reported already
            needed = [str(link) for link in chain_of(each)[:-1] if str(link) in damaged]
            report["damage"] += [f"{each}: needs the damaged checkpoint {link}" for link in needed]
        reports.append({**report, "extra": extra})
    _tell(ctx, reports, as_json)


@checkpoint.command()
@_PATH
@_JSON
def show(path: Path, as_json: bool) -> None:
    """Show the step, the tensors and the settings of a checkpoint."""
    chosen = _found(path)[-1]
    files = read_manifest(chosen)
    small = {name: files[name] for name in (METADATA, PROGRESS, IDENTITY) if name in files}
    if damage := misfits(chosen, files)[0] or differing(chosen, small):
        raise DamagedError(damage[0])
    needed = [each.name for each in chain_of(chosen)[:-1]]
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from recd_plugins.training.checkpoint_dcp import read_metadata

    progress = read_progress(chosen)
    tensors = {
        name: {
            "shape": list(entry.size),
            "dtype": str(entry.properties.dtype).removeprefix("torch."),
        }
        for name, entry in read_metadata(chosen).state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    identity = None
    if IDENTITY in files:
        identity = json.loads((chosen / IDENTITY).read_text(encoding="utf-8"))
    report = {
        "path": str(chosen),
        "step": progress.step,
        "needs": needed,
        "epoch": progress.epoch,
        "loss": progress.losses[-1] if progress.losses else None,
        "reader": progress.reader,
        "tensors": tensors,
        "identity": identity,
    }
    if as_json:
        click.echo(json.dumps(report, indent=2))
        return
    kind = f", a delta that needs {', '.join(needed)}" if needed else ""
    click.echo(f"{chosen}: step {progress.step}, epoch {progress.epoch}{kind}")
    for name, tensor in tensors.items():
        click.echo(f"  {name} {tensor['dtype']} {tensor['shape']}")
    if identity is not None:
        click.echo(json.dumps(identity, indent=2))


@checkpoint.command("compact")
@_PATH
def compact_(path: Path) -> None:
    """Replace a delta by an equal full checkpoint. All tables must fit into memory."""
    from recd_plugins.training.checkpoint_compact import compact

    chosen = _found(path)[-1]
    with locked_folder(chosen.parent):
        done = compact(chosen)
    click.echo(f"{chosen}: {'is now' if done else 'is already'} a full checkpoint")


def _found(path: Path) -> list[Path]:
    """Return the checkpoint at ``path``, or all checkpoints in this folder, oldest first."""
    if not path.is_dir():
        raise RecdError(f"{path}: the folder does not exist. Check the path.")
    found = checkpoints_in(path)
    if (path / MANIFEST).exists() or (path / METADATA).exists():
        found = [path]
    if not found:
        raise RecdError(
            f"{path}: this is not a checkpoint or a folder of checkpoints. Use another path."
        )
    return found


def _check_sizes(path: Path) -> dict[str, Any]:
    report: dict[str, Any] = {"path": str(path), "base": None, "files": 0, "bytes": 0}
    damage: list[str] = []
    extra: list[str] = []
    try:
        files = read_manifest(path)
        damage, extra = misfits(path, files)
        size = sum(digest.bytes for digest in files.values())
        delta = read_delta(path)
        report |= {"files": len(files), "bytes": size, "base": delta and delta.base}
        chain_of(path)
    except DamagedError as error:
        damage = [*damage, str(error)]
    return {**report, "damage": damage, "extra": extra}


def _tell(ctx: click.Context, reports: list[dict[str, Any]], as_json: bool) -> None:
    wrong = [line for report in reports for line in (*report["damage"], *report["extra"])]
    if as_json:
        click.echo(json.dumps({"ok": not wrong, "checkpoints": reports}, indent=2))
    else:
        for report in reports:
            state = "damaged" if report["damage"] else "ok"
            state += ", the best" if report.get("best") else ""
            state += f", a delta of {report['base']}" if report["base"] else ""
            click.echo(
                f"{report['path']}: {report['files']} files, {report['bytes']:,} bytes, {state}"
            )
        for line in wrong:
            click.secho(line, fg="red", err=True)
    if wrong:
        ctx.exit(1)
