"""``recd doctor``: whether the installed packages belong together and work on this machine."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import click
from rich.markup import escape
from rich.table import Table

from recd_plugins.cli.plugins import check_contributions
from recd_plugins.config.manager import PluginManager
from recd_plugins.report.output import output_console
from recd_plugins.runtime.errors import PluginError
from recd_plugins.runtime.versions import (
    fbgemm_builds,
    fbgemm_has_cuda,
    installed_set,
    mismatch,
    one_of_the_sets,
)

_COLORS = {"ok": "green", "absent": "yellow", "failed": "red"}


@dataclass(frozen=True)
class Check:
    """What one look at the machine found. Only ``failed`` makes the command fail."""

    name: str
    status: Literal["ok", "absent", "failed"]
    detail: str
    remedy: str = ""


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--model",
    metavar="MODULE:FACTORY",
    help="Look at a trainer's model instead: how its tables would be sharded and trained, which "
    "features would be deduplicated, and what is left alone.",
)
@click.option("--ranks", type=click.IntRange(min=1), help="Of --model: how many; 2 without it.")
@click.option(
    "--registry", type=click.Path(path_type=Path), help="Of --model: a file with entries for it."
)
@click.pass_context
def doctor(
    ctx: click.Context, as_json: bool, model: str | None, ranks: int | None, registry: Path | None
) -> None:
    """Check this machine's installation, or a trainer's model.

    Versions, FBGEMM's operators, collectives, CUDA, numba and plugins. Exits with 1 where a check
    failed; what is merely absent, as CUDA may be, fails nothing. With --model nothing is trained.
    """
    if model is not None:
        _describe(model, ranks or 2, registry, ctx.obj, as_json)
        return
    if ranks is not None or registry is not None:
        raise click.UsageError("--ranks and --registry are of --model: name one, or leave them out")
    checks = list(examine(ctx.obj))
    if as_json:
        click.echo(json.dumps([asdict(check) for check in checks], indent=2))
    else:
        _print(checks)
    if any(check.status == "failed" for check in checks):
        ctx.exit(1)


def _describe(
    name: str, ranks: int, registry: Path | None, plugins_dir: Path | None, as_json: bool
) -> None:
    """Print what would become of the tables of a model."""
    from recd_plugins.drop_in.planned_tables import model_of, planned_tables
    from recd_plugins.drop_in.wrap import wrap

    found = planned_tables(wrap(model_of(name), registry, plugins_dir=plugins_dir), ranks)
    if as_json:
        tables = [asdict(line) for line in found.tables.lines]
        click.echo(json.dumps({**asdict(found), "tables": tables}, indent=2))
    else:
        click.echo(found)


def examine(plugins_dir: Path | None) -> Iterator[Check]:
    """Every check, in the order in which one builds on the other."""
    yield Check("python", "ok", f"{platform.python_version()} on {platform.machine()}")
    yield _versions()
    yield _one_fbgemm()
    checks: list[tuple[str, Callable[[], Check], str]] = [
        ("torch", _torch, "reinstall torch"),
        ("fbgemm", _fbgemm_operators, "reinstall the fbgemm build that belongs to this torch"),
        ("torchrec", _torchrec, "reinstall torchrec in the version that belongs to this torch"),
        ("gloo", _gloo, "install a build of torch with distributed and gloo"),
        ("nccl", _nccl, "reinstall torch"),
        ("cuda", _cuda, "reinstall torch"),
        ("numba", _numba, "reinstall numba"),
    ]
    for name, check, remedy in checks:
        try:
            yield check()
        except Exception as error:
            yield Check(name, "failed", f"{type(error).__name__}: {error}", remedy)
    plugins = _plugins(plugins_dir)
    if plugins.status == "ok":
        yield _internals(plugins_dir)
    yield plugins


def _versions() -> Check:
    remedy = mismatch()
    return Check("versions", "failed" if remedy else "ok", installed_set(), remedy)


def _one_fbgemm() -> Check:
    builds = fbgemm_builds()
    detail = ", ".join(f"{name} {version}" for name, version in builds.items())
    if len(builds) > 1:
        return Check(
            "fbgemm build",
            "failed",
            f"{detail} are both installed and overwrite one another's files",
            "pip uninstall -y fbgemm-gpu fbgemm-gpu-cpu, then install the one for this machine",
        )
    if not builds:
        return Check(
            "fbgemm build",
            "failed",
            "no FBGEMM is installed",
            "install fbgemm-gpu (CUDA) or fbgemm-gpu-cpu in the version that belongs to torch",
        )
    return Check("fbgemm build", "ok", detail)


def _torch() -> Check:
    import torch

    return Check("torch", "ok", f"{torch.__version__}, {torch.get_num_threads()} threads")


def _fbgemm_operators() -> Check:
    import fbgemm_gpu  # noqa: F401
    import torch

    lengths = torch.tensor([1, 0, 2])
    offsets = torch.ops.fbgemm.asynchronous_complete_cumsum(lengths)
    if offsets.tolist() != [0, 1, 1, 3]:
        remedy = "reinstall the fbgemm build that belongs to this torch"
        return Check("fbgemm", "failed", f"cumsum of [1, 0, 2] gave {offsets.tolist()}", remedy)
    return Check("fbgemm", "ok", "operators load and run")


def _torchrec() -> Check:
    import torchrec

    return Check("torchrec", "ok", f"imports from {Path(torchrec.__file__).parent}")


def _gloo() -> Check:
    from torch import distributed

    if distributed.is_available() and distributed.is_gloo_available():
        return Check("gloo", "ok", "available")
    remedy = "install a build of torch with distributed and gloo"
    return Check("gloo", "failed", "this torch has no gloo", remedy)


def _nccl() -> Check:
    from torch import distributed

    if distributed.is_available() and distributed.is_nccl_available():
        return Check("nccl", "ok", "available")
    return Check("nccl", "absent", "this torch has no NCCL; needed for training on several GPUs")


def _cuda() -> Check:
    import torch

    if not torch.cuda.is_available():
        return Check("cuda", "absent", "no CUDA device; training runs on the CPU")
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    if not fbgemm_has_cuda():
        remedy = "pip uninstall -y fbgemm-gpu fbgemm-gpu-cpu, then pip install 'recd-plugins[cuda]'"
        return Check("cuda", "failed", f"{', '.join(names)}, but FBGEMM is the CPU build", remedy)
    return Check("cuda", "ok", ", ".join(names))


def _numba() -> Check:
    import numba

    if numba.njit(lambda value: value + 1)(1) != 2:
        return Check("numba", "failed", "compiled code gives wrong results", "reinstall numba")
    return Check("numba", "ok", f"{numba.__version__} compiles")


def _plugins(plugins_dir: Path | None) -> Check:
    try:
        manager = PluginManager(plugins_dir)
        check_contributions(manager)
        number = sum(len(by_name) for by_name in manager.plugins.values())
    except PluginError as error:
        return Check("plugins", "failed", str(error), "mend or uninstall the plugin named here")
    if manager.broken:
        reasons = "; ".join(broken.reason for broken in manager.broken)
        remedy = "mend or uninstall them; until then they stop only what needs them"
        return Check("plugins", "failed", reasons, remedy)
    return Check(
        "plugins", "ok", f"{number} plugins from {', '.join(manager.origins) or 'nowhere'}"
    )


def _internals(plugins_dir: Path | None) -> Check:
    """Whether what has no public form is there, of the framework and of plugins."""
    from recd_plugins.compat.torchrec_internals import INTERNALS
    from recd_plugins.runtime.versions import Internal

    internals = list(INTERNALS)

    def add(internal: Any, where: str) -> None:
        if not isinstance(internal, Internal):
            raise PluginError(f"{where} returned {internal!r}; return api.distributed.Internals")
        internals.append(internal)

    manager, remedy = PluginManager(plugins_dir), "mend or uninstall the plugin named here"
    try:
        manager.hand("register_internals", add)
    except PluginError as error:
        return Check("internals", "failed", str(error), remedy)
    if reasons := "; ".join(broken.reason for broken in manager.broken):  # by this hook
        return Check("internals", "failed", reasons, remedy)
    missing = [message for internal in internals for message in internal.missing()]
    if missing:
        return Check("internals", "failed", "; ".join(dict.fromkeys(missing)), one_of_the_sets())
    number = sum(len(internal.names) for internal in internals)
    return Check("internals", "ok", f"all {number} names without a public form are there")


def _print(checks: list[Check]) -> None:
    table = Table("check", "", "found")
    for check in checks:
        table.add_row(check.name, f"[{_COLORS[check.status]}]{check.status}", escape(check.detail))
    console = output_console()
    console.print(table)
    for check in checks:
        if check.remedy:
            console.print(f"[red]{check.name}:[/] {escape(check.remedy)}", soft_wrap=True)
