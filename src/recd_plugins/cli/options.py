"""Click options and checks shared by several commands."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from recd_plugins.config.manager import PluginManager
from recd_plugins.runtime.errors import RecdError
from recd_plugins.runtime.files import check_writable

if TYPE_CHECKING:
    from recd_plugins.config import RunConfig
    from recd_plugins.planning.topologies import TopologySpec


_Command = TypeVar("_Command", bound=Callable[..., Any])


class OutputPath(click.Path):
    """A click type for the local path of an output. Checks that a file can be written there."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path. Raises click.BadParameter if it is a URL or cannot be written."""
        if "://" in str(value):
            self.fail(f"{value} is a URL, not a local path. Use a local path.", param, ctx)
        if value == "-" and not self.allow_dash:
            self.fail("'-' is not the path of a file. Use the path of a file.", param, ctx)
        if value != "-" and not self.dir_okay:
            check_writable(Path(value))
        return super().convert(value, param, ctx)


#: An integer of at least 1.
AT_LEAST_1 = click.IntRange(min=1)
#: An integer of at least 0.
COUNT_FROM_0 = click.IntRange(min=0)
#: A number above 0.
ABOVE_0 = click.FloatRange(min=0, min_open=True)
#: A fraction from 0 to 1.
SHARE = click.FloatRange(min=0, max=1)
#: A file to write.
OUTPUT = OutputPath(path_type=Path, dir_okay=False, writable=True)
#: A file to write, or ``-`` for the terminal.
OUTPUT_OR_TERMINAL = OutputPath(path_type=Path, dir_okay=False, writable=True, allow_dash=True)
#: A folder to write.
OUTPUT_FOLDER = OutputPath(path_type=Path, file_okay=False)
#: A file or a folder to write.
OUTPUT_PATH = OutputPath(path_type=Path)

#: Trailing KEY=VALUE arguments that override values of the registry file.
SETTINGS = click.argument("settings", nargs=-1, metavar="[KEY=VALUE]...")
#: The trained model to load: its registry file, or the folder of a run.
TRAINED = click.argument("trained", metavar="REGISTRY|RUN", type=click.Path(path_type=Path))
#: The number of the run.
RUN = click.option(
    "--run",
    "run_number",
    type=AT_LEAST_1,
    metavar="N",
    help="Number of the run, if training.checkpoint.runs is set. Default: the newest finished run.",
)
#: The checkpoint from which a command loads the trained model.
CHECKPOINT = click.option(
    "--checkpoint",
    metavar="PATH|newest|best",
    help="A checkpoint, or a folder, whose newest checkpoint is used. newest and best choose from "
    "the run. Default: best if the run was validated, else newest.",
)


def new_place(_: click.Context, __: click.Parameter, value: Path | None) -> Path | None:
    """Return ``value``, or raise BadParameter if it ends in ``.`` or ``..`` (click callback)."""
    if value is not None and value.name in ("", ".."):
        like = value / "table"
        raise click.BadParameter(f"{value} is not a new path. Use a new path, such as {like}.")
    return value


def _not_under_torchrun(_: click.Context, __: click.Parameter, value: int | None) -> int | None:
    from recd_plugins.runtime.launch import torchrun_rank

    if value is not None and torchrun_rank() is not None:
        raise click.UsageError("torchrun sets the number of ranks. Remove --ranks.")
    return value


#: The number of ranks.
RANKS = click.option(
    "--ranks", type=AT_LEAST_1, callback=_not_under_torchrun, help="Overrides training.ranks."
)


def training_option(
    name: str, type: click.ParamType[Any], metavar: str | None = None
) -> Callable[[_Command], _Command]:
    """Return a decorator that adds an option to override a value of the section ``training``."""
    key = name.removeprefix("--").replace("-", "_")
    return click.option(name, type=type, metavar=metavar, help=f"Overrides training.{key}.")


#: The number of rows per batch and rank.
BATCH_SIZE = training_option("--batch-size", AT_LEAST_1)


def report_options(json: str, plot: str) -> Callable[[_Command], _Command]:
    """Return a decorator that adds the options ``--json`` and ``--plot`` with these help texts."""

    def add(command: _Command) -> _Command:
        plot_path = click.option(
            "--plot", "plot_path", type=OUTPUT, help=f"{plot} (.png, .svg, .pdf)."
        )
        return click.option("--json", "json_path", type=OUTPUT, help=json)(plot_path(command))

    return add


def check_output(output: Path, force: bool, *columns: str, begins: bytes = b"") -> None:
    """Raise RecdError if ``output`` exists and may not be replaced, or is an input of the command.

    Args:
        output: the file to write.
        force: whether the user gave ``--force``, which is required to replace a file.
        columns: columns that identify files of this command. ``--force`` replaces only such files.
        begins: regular expression that the beginning of every file of this command matches.
    """
    if not output.exists():
        return
    if not force:
        raise RecdError(
            f"{output} already exists. Write to another file, or replace the file with --force."
        )
    for name, value in click.get_current_context().params.items():
        for path in value if isinstance(value, tuple) else (value,):
            is_input = isinstance(path, Path) and path is not output and path.exists()
            if is_input and path.samefile(output):
                raise RecdError(
                    f"{output}: this file is also an input ({name}). Use another output file."
                )
    with output.open("rb") as file:
        beginning = file.read(1 << 16)
    found = {*re.findall(r"\w+", beginning.partition(b"\n")[0].decode(errors="replace"))}
    if beginning.startswith(b"PAR1"):
        import pyarrow.parquet as pq

        found = {*pq.read_schema(output).names}
    if beginning and not (re.match(begins, beginning) and {*columns} <= found):
        raise RecdError(
            f"{output}: --force does not replace this file, because another program wrote it. Use "
            "another file."
        )


def check_apart(output: Path, registry: RunConfig, *made_from: Path) -> None:
    """Raise RecdError if ``output`` would replace an input or be inside an input folder.

    Inputs are the paths ``made_from`` and the training data of ``registry``.
    """
    options = (value for _, value in registry.dataset.options)
    for path in (*made_from, *(value for value in options if isinstance(value, Path))):
        if output.resolve().is_relative_to(path.resolve()):
            raise RecdError(
                f"{output}: the output would replace or be inside the input {str(path)!r}. Use "
                "another path."
            )


def topology_options(command: _Command) -> _Command:
    """Add ``--topology``, ``--nodes`` and ``--ranks-per-node``, which describe a cluster."""
    for option in (
        click.option(
            "--ranks-per-node",
            type=AT_LEAST_1,
            help="Ranks per node. Default: the value of the topology, or for machine "
            "training.ranks_per_node or training.ranks.",
        ),
        click.option(
            "--nodes", type=AT_LEAST_1, help="Number of nodes. Default: the value of the topology."
        ),
        click.option(
            "--topology",
            metavar="NAME|FILE",
            help="zionex-a100-40g, dgx-a100-80g, p4d.24xlarge, ndv4, dgx-h100, machine (this "
            "machine), or a YAML file. Default: training.topology, or machine if that is null.",
        ),
    ):
        command = option(command)
    return command


def chosen_topology(
    registry: RunConfig, topology: str, nodes: int | None, ranks_per_node: int | None
) -> TopologySpec:
    """Return the cluster described by ``--topology``, ``--nodes`` and ``--ranks-per-node``.

    If the cluster is this machine, nodes and ranks default to ``registry.training``.
    """
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
    """Return the options that are not None, as overrides of the ``training:`` section."""
    return {name: value for name, value in values.items() if value is not None}


def manager_of(ctx: click.Context) -> PluginManager:
    """Return the plugin manager of a command line, which also has ``--plugins-dir``."""
    if __name__ not in ctx.meta:
        ctx.meta[__name__] = PluginManager(ctx.find_root().params.get("plugins_dir"))
    manager: PluginManager = ctx.meta[__name__]
    return manager


def tell_broken(manager: PluginManager) -> None:
    """Print the plugin packages that failed to load, with the reasons, on stderr."""
    for broken in manager.broken:
        click.secho(
            f"Plugin package {broken.name} cannot be used: {broken.reason}", fg="red", err=True
        )
