"""``recd doctor``: check that the installed packages are compatible and work on this machine."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import click
from rich.markup import escape
from rich.table import Table

from recd_plugins.cli.plugins import check_contributions
from recd_plugins.config.manager import PluginManager
from recd_plugins.report.output import output_console
from recd_plugins.runtime.errors import PluginError
from recd_plugins.runtime.versions import fbgemm_builds, fbgemm_has_cuda, installed_set, mismatch

_COLORS = {"ok": "green", "absent": "yellow", "failed": "red"}
_FIX = "fix or uninstall the plugin in this message"


@dataclass(frozen=True)
class Check:
    """The result of one check. The command exits with code 1 if the status is ``failed``."""

    name: str
    status: Literal["ok", "absent", "failed"]
    detail: str
    remedy: str = ""


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--model",
    metavar="MODULE:FACTORY",
    help="Show how the tables of a model would be sharded and trained, and which features would be "
    "deduplicated. FACTORY returns the model.",
)
@click.option(
    "--ranks",
    type=click.IntRange(min=1),
    help="With --model: number of ranks to plan for. Default: 2.",
)
@click.option(
    "--registry",
    type=click.Path(path_type=Path),
    help="With --model: a registry file for the model.",
)
@click.pass_context
def doctor(
    ctx: click.Context, as_json: bool, model: str | None, ranks: int | None, registry: Path | None
) -> None:
    """Check this machine's installation.

    Checks versions, FBGEMM operators, CUDA and plugins. Exits with 1 if a check fails. A missing
    CUDA device is not a failure.
    """
    if model is not None:
        _describe(model, ranks or 2, registry, ctx.obj, as_json)
        return
    if ranks is not None or registry is not None:
        raise click.UsageError(
            "--ranks and --registry need --model. Add --model, or remove both options."
        )
    checks = list(examine(ctx.obj))
    if as_json:
        click.echo(json.dumps([asdict(check) for check in checks], indent=2))
    else:
        table = Table("check", "status", "found")
        for check in checks:
            status = f"[{_COLORS[check.status]}]{check.status}"
            table.add_row(check.name, status, escape(check.detail))
        console = output_console()
        console.print(table, width=None if console.is_terminal else min(console.width, 100))
        for check in checks:
            if check.remedy:
                console.print(f"[red]{check.name}:[/] {escape(check.remedy)}", soft_wrap=True)
    if any(check.status == "failed" for check in checks):
        ctx.exit(1)


def _describe(
    name: str, ranks: int, registry: Path | None, plugins_dir: Path | None, as_json: bool
) -> None:
    from recd_plugins.drop_in.planned_tables import model_of, planned_tables
    from recd_plugins.drop_in.wrap import wrap

    found = planned_tables(wrap(model_of(name), registry, plugins_dir=plugins_dir), ranks)
    if as_json:
        tables = [asdict(line) for line in found.tables.lines]
        click.echo(json.dumps({**asdict(found), "tables": tables}, indent=2))
    else:
        click.echo(found)


def examine(plugins_dir: Path | None) -> Iterator[Check]:
    """Run all checks of ``recd doctor`` and yield their results."""
    yield Check("python", "ok", f"{platform.python_version()} on {platform.machine()}")
    yield _versions()
    yield _one_fbgemm()
    remedy = "reinstall torch, fbgemm-gpu and torchrec in compatible versions"
    for name, check in (("fbgemm", _fbgemm_operators), ("cuda", _cuda)):
        try:
            yield check()
        except Exception as error:
            yield Check(name, "failed", f"{type(error).__name__}: {error}", remedy)
    yield _plugins(plugins_dir)


def _versions() -> Check:
    remedy = mismatch()
    return Check("versions", "failed" if remedy else "ok", installed_set(), remedy)


def _one_fbgemm() -> Check:
    builds = fbgemm_builds()
    detail = ", ".join(f"{name} {version}" for name, version in builds.items())
    if len(builds) == 1:
        return Check("fbgemm build", "ok", detail)
    return Check(
        "fbgemm build",
        "failed",
        f"{detail} are both installed and overwrite each other's files"
        if builds
        else "no FBGEMM is installed",
        "pip uninstall -y fbgemm-gpu fbgemm-gpu-cpu, then install fbgemm-gpu (CUDA) or "
        "fbgemm-gpu-cpu in the version for the installed torch",
    )


def _fbgemm_operators() -> Check:
    import fbgemm_gpu  # noqa: F401
    import torch

    offsets = torch.ops.fbgemm.asynchronous_complete_cumsum(torch.tensor([1, 0, 2]))
    assert offsets.tolist() == [0, 1, 1, 3], f"cumsum of [1, 0, 2] gave {offsets.tolist()}"
    return Check("fbgemm", "ok", "operators load and run")


def _cuda() -> Check:
    import torch

    if not torch.cuda.is_available():
        return Check("cuda", "absent", "no CUDA device; training runs on the CPU")
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    if not fbgemm_has_cuda():
        remedy = "pip uninstall -y fbgemm-gpu fbgemm-gpu-cpu, then pip install 'recd-plugins[cuda]'"
        return Check("cuda", "failed", f"{', '.join(names)}, but FBGEMM is the CPU build", remedy)
    return Check("cuda", "ok", ", ".join(names))


def _plugins(plugins_dir: Path | None) -> Check:
    try:
        manager = PluginManager(plugins_dir)
        check_contributions(manager)
        number = sum(len(by_name) for by_name in manager.plugins.values())
    except PluginError as error:
        return Check("plugins", "failed", str(error), _FIX)
    if manager.broken:
        reasons = "; ".join(broken.reason for broken in manager.broken)
        remedy = "fix or uninstall these packages; registry files and commands that use them fail"
        return Check("plugins", "failed", reasons, remedy)
    return Check(
        "plugins", "ok", f"{number} plugins from {', '.join(manager.origins) or 'nowhere'}"
    )
