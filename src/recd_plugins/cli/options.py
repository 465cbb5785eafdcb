"""Options that several commands have, and what they make of them."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import click

from recd_plugins.config.manager import PluginManager
from recd_plugins.runtime.errors import RecdError
from recd_plugins.runtime.files import check_writable

if TYPE_CHECKING:
    from recd_plugins.config import RunConfig
    from recd_plugins.planning.topologies import TopologySpec


class Collection(Protocol):
    """What takes, or refuses, what packages return by a hook."""

    def add(self, each: Any, where: str, /) -> None:
        """Take one; ``where`` it was returned is for messages."""


C = TypeVar("C", bound=Collection)


# What options of a command write, by path: a key of click's ``Context.meta``.
_WRITTEN = "recd_plugins.written"


class FiniteFloat(click.FloatRange):
    """A range of floats without the two that are no numbers: nan and inf."""

    name = "number"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """See the base class."""
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is no finite number.", param, ctx)
        return number


class WholeNumber(click.IntRange):
    """A range of whole numbers that 64 bits hold."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """See the base class."""
        number = int(super().convert(value, param, ctx))
        if number >> 63:
            self.fail(f"{str(value)[:24]}... is more than 64 bits hold.", param, ctx)
        return number


class OutputPath(click.Path):
    """A file or a folder to write, of this machine, that no other option of the command names."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """See the base class."""
        if "://" in str(value):
            self.fail(f"{value} is a URL; it is written to this machine: name a path.", param, ctx)
        if param is not None and ctx is not None and value != "-":
            others: dict[Path, click.Parameter] = ctx.meta.setdefault(_WRITTEN, {})
            other = others.setdefault(Path(os.path.realpath(value)), param)
            if other is not param:
                also = other.get_error_hint(ctx)
                self.fail(f"{value} is what {also} writes; name another one.", param, ctx)
        return super().convert(value, param, ctx)


_PICTURES = (".png", ".svg", ".pdf")
# How the files begin that a report may take the place of.
_REPORTS = {"--json": rb"\s*([{\[]\r?\n|\{\}|\[\])", "--html": rb"\s*<"}


class OutputFile(OutputPath):
    """A file to write, of this machine.

    ``-`` only where ``allow_dash`` is true. A report never replaces a table or a registry file.
    """

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """See the base class."""
        if value == "-":
            if not self.allow_dash:
                self.fail("- is no file; name one.", param, ctx)
            return super().convert(value, param, ctx)
        path = super().convert(value, param, ctx)
        opts = () if param is None else param.opts
        if "--plot" in opts and Path(value).suffix not in _PICTURES:
            raise click.UsageError(f"--plot {value} ends in none of {', '.join(_PICTURES)}", ctx)
        check_writable(Path(value))
        for name in _REPORTS.keys() & {*opts}:
            beginning = Path(value).read_bytes()[: 1 << 12] if Path(value).is_file() else b""
            if beginning and not re.match(_REPORTS[name], beginning):
                self.fail(f"{value} exists and is no such report; name another file.", param, ctx)
        return path


#: A whole number from 1.
AT_LEAST_1 = WholeNumber(min=1)
#: A whole number from 0.
COUNT_FROM_0 = WholeNumber(min=0)
#: A finite number above 0.
ABOVE_0 = FiniteFloat(min=0, min_open=True)
#: A share, from 0 to 1.
SHARE = FiniteFloat(min=0, max=1)
#: A file to write.
OUTPUT = OutputFile(path_type=Path, dir_okay=False, writable=True)
#: The same, or ``-`` for the terminal.
OUTPUT_OR_TERMINAL = OutputFile(path_type=Path, dir_okay=False, writable=True, allow_dash=True)
#: A folder to write.
OUTPUT_FOLDER = OutputPath(path_type=Path, file_okay=False)
#: A file or a folder to write.
OUTPUT_PATH = OutputPath(path_type=Path)

#: Values in place of a registry file's, after the other arguments.
SETTINGS = click.argument("settings", nargs=-1, metavar="[KEY=VALUE]...")
#: The option of the checkpoint that a command takes a trained model from.
CHECKPOINT = click.option(
    "--checkpoint",
    metavar="PATH|newest|best",
    help="A checkpoint, or a folder whose newest is taken; or newest or best of "
    "training.checkpoint.path. Default: best if the run was validated, else newest.",
)


def new_place(_: click.Context, __: click.Parameter, value: Path | None) -> Path | None:
    """Refuse `.` and `..`, where what is made could not get its name: a callback of click."""
    if value is not None and value.name in ("", ".."):
        like = value / "table"
        raise click.BadParameter(f"{value} is no name for something new; write one, as {like}")
    return value


def _not_under_torchrun(_: click.Context, __: click.Parameter, value: int | None) -> int | None:
    from recd_plugins.runtime.launch import torchrun_rank

    if value is not None and torchrun_rank() is not None:
        raise click.UsageError("torchrun says which ranks there are: leave out --ranks")
    return value


#: The option of the number of ranks.
RANKS = click.option(
    "--ranks", type=AT_LEAST_1, callback=_not_under_torchrun, help="Overrides training.ranks."
)
#: The option of how many rows a rank scores at a time.
BATCH_SIZE = click.option(
    "--batch-size", type=AT_LEAST_1, help="Overrides training.batch_size: rows of a rank at a time."
)

_Command = TypeVar("_Command", bound=Callable[..., Any])


def report_options(json: str, plot: str) -> Callable[[_Command], _Command]:
    """``--json`` and ``--plot``, with what they say of themselves."""

    def add(command: _Command) -> _Command:
        for option in (
            click.option("--plot", "plot_path", type=OUTPUT, help=f"{plot} (.png, .svg, .pdf)."),
            click.option("--json", "json_path", type=OUTPUT, help=json),
        ):
            command = option(command)
        return command

    return add


def check_output(output: Path, force: bool, *columns: str, begins: bytes = b"") -> None:
    """Refuse to replace a file without ``--force``, one of another kind, or one that is read.

    Args:
        output: the file.
        force: whether a file of the kind that the command writes may be replaced.
        columns: of such a file, in its Parquet schema or in its first line.
        begins: regular expression that the first 64 KiB of such a file match.

    Raises:
        RecdError: names the file.
    """
    if not output.exists():
        return
    if not force:
        raise RecdError(f"{output} exists already; name another file, or replace it with --force")
    for name, value in click.get_current_context().params.items():
        for path in value if isinstance(value, tuple) else (value,):
            if not isinstance(path, Path) or path is output or not path.exists():
                continue
            if path.samefile(output):
                raise RecdError(f"{output} is read as {name}; name another file")
    with output.open("rb") as file:
        beginning = file.read(1 << 16)
    if beginning and not (
        re.match(begins, beginning) and {*columns} <= _columns(output, beginning)
    ):
        raise RecdError(
            f"{output} exists and is no file of the kind that this command writes; name another"
        )


def _columns(path: Path, beginning: bytes) -> set[str]:
    """Return the columns of a Parquet file, or the words in the first line of another one."""
    if not beginning.startswith(b"PAR1"):
        return set(re.findall(r"\w+", beginning.partition(b"\n")[0].decode(errors="replace")))
    import pyarrow.parquet as pq

    return {*pq.read_schema(path).names}


def check_apart(output: Path, registry: RunConfig, *made_from: Path) -> None:
    """Refuse an output in place of, or in a folder of, what it is made from or was trained on.

    Raises:
        RecdError: names which.
    """
    options = (value for _, value in registry.dataset.options)
    for path in (*made_from, *(value for value in options if isinstance(value, Path))):
        if output.resolve().is_relative_to(path.resolve()):
            raise RecdError(f"{output}: would be written over or into {path}; name another file")


def topology_options(command: _Command) -> _Command:
    """The ranks to plan for."""
    for option in (
        click.option(
            "--ranks-per-node",
            type=AT_LEAST_1,
            help="Ranks of a node; the topology's own without it; on this machine as "
            "training.ranks and training.ranks_per_node say.",
        ),
        click.option("--nodes", type=AT_LEAST_1, help="Nodes; the topology's own without it."),
        click.option(
            "--topology",
            metavar="NAME|FILE",
            help="zionex-a100-40g, dgx-a100-80g, p4d.24xlarge, ndv4, dgx-h100, machine (this one), "
            "or a YAML file. Without it training.topology, or where that is null machine.",
        ),
    ):
        command = option(command)
    return command


def chosen_topology(
    registry: RunConfig, topology: str, nodes: int | None, ranks_per_node: int | None
) -> TopologySpec:
    """What ``topology_options`` name; what they leave open of this machine says the registry."""
    from recd_plugins.config.device import choose_device
    from recd_plugins.planning.topologies import MACHINE, load_topology

    if topology == MACHINE and ranks_per_node is None:
        nodes = nodes or registry.training.nodes
        ranks_per_node = registry.training.ranks_per_node
    return load_topology(
        topology,
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        ranks=registry.training.ranks,
        device=choose_device(registry) if topology == MACHINE else "cpu",
    )


def overrides(**values: Any) -> dict[str, Any]:
    """Fields of the ``training`` section that options set."""
    return {name: value for name, value in values.items() if value is not None}


def manager_of(ctx: click.Context) -> PluginManager:
    """The plugins of a command line: installed ones, and those of its ``--plugins-dir``."""
    return PluginManager(ctx.find_root().params.get("plugins_dir"))


def contributed(
    ctx: click.Context, hook: str, collection: Callable[[], C]
) -> tuple[C, PluginManager]:
    """What packages return by a hook, collected once a command line, and where they were found."""
    key = f"{__name__}.{hook}"
    if key not in ctx.meta:
        made, manager = collection(), manager_of(ctx)
        manager.hand(hook, made.add)
        ctx.meta[key] = made, manager
    found: tuple[C, PluginManager] = ctx.meta[key]
    return found


def tell_broken(manager: PluginManager) -> None:
    """Say what is installed and cannot be used, where someone misses it."""
    for broken in manager.broken:
        click.secho(f"{broken.name} cannot be used: {broken.reason}", fg="red", err=True)
