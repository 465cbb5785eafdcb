"""The ``recd`` command line: one module per command, imported when the command runs."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import click

from recd_plugins.cli.exits import (
    EXIT_STATUS,
    Ended,
    fault_message,
    meant_by,
    tell_torchrun,
    unwinding,
)
from recd_plugins.report.output import prepare_output
from recd_plugins.runtime.errors import PluginError, RecdError, RunInterrupted, on_rank
from recd_plugins.runtime.text import did_you_mean
from recd_plugins.runtime.versions import __version__

#: Import path and help line of each built-in command.
COMMANDS = {
    "init": (
        "recd_plugins.cli.init:init",
        "Write a first registry file for your own table or for a named model.",
    ),
    "run": (
        "recd_plugins.cli.run:run",
        "Train the model of REGISTRY on its data with its plugins.",
    ),
    "plan": (
        "recd_plugins.cli.plan:plan",
        "Plan the tables of REGISTRY's model for a cluster, without using the cluster.",
    ),
    "checkpoint": (
        "recd_plugins.cli.checkpoint:checkpoint",
        "List, verify or show checkpoints.",
    ),
    "validate": ("recd_plugins.cli.validate:validate", "Check a registry file."),
    "plugins": ("recd_plugins.cli.plugins:plugins", "List the available plugins."),
    "schema": ("recd_plugins.cli.validate:schema", "Print the JSON Schema of registry files."),
    "doctor": ("recd_plugins.cli.doctor:doctor", "Check this machine's installation."),
}


class _Failure(click.ClickException):
    """A click exception that prints a RecdError in red. The command then exits with code 1."""

    def show(self, file: IO[Any] | None = None) -> None:
        tell_torchrun(self.format_message())
        click.secho(self.format_message(), fg="red", err=file is None, file=file)


class _Recd(click.Group):
    """The click group ``recd``. Lists built-in commands first, then the commands of plugins."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*COMMANDS, *sorted(_plugin_commands(ctx).commands)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return _plugin_commands(ctx).commands.get(cmd_name)
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            meant = did_you_mean(args[0], self.list_commands(ctx))
            ctx.fail(f"No such command {args[0]!r}{meant or '. Run recd --help for a list.'}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [(name, line) for name, (_, line) in COMMANDS.items()]
        failure = None
        try:
            commands = _plugin_commands(ctx).commands
        except PluginError as error:
            failure = error
        else:
            rows += [
                (name, commands[name].get_short_help_str(limit=100)) for name in sorted(commands)
            ]
        with formatter.section("Commands"):
            formatter.write_dl(rows)
        if failure is not None:
            click.secho(f"The commands of plugins are not available: {failure}", fg="red", err=True)

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Prepare stdout and stderr, then parse the arguments and run the command."""
        prepare_output()
        return super().main(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``main`` and report unexpected exceptions without a traceback.

        Tests call ``main`` directly to get the exceptions.
        """
        if not kwargs.get("standalone_mode", True) or os.environ.get("RECD_TRACEBACK") == "1":
            return super().__call__(*args, **kwargs)
        try:
            with unwinding():
                return super().__call__(*args, **kwargs)
        except Exception as error:
            message = fault_message(error)
            tell_torchrun(message)
            click.secho(message, fg="red", err=True)
            sys.exit(EXIT_STATUS)
        finally:
            # Garbage collection at exit would take seconds, because it visits all objects of torch.
            gc.freeze()

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except RunInterrupted as error:
            if os.environ.get("RANK", "0") == "0":
                click.secho(str(error), fg="red", err=True)
            ctx.exit(128 + error.signal)
        except RecdError as error:
            rank = os.environ.get("RANK", "")
            if rank.isdecimal() and os.environ.get("WORLD_SIZE") != "1":
                error = on_rank(error, int(rank))
            raise _Failure(str(error)) from error
        except KeyboardInterrupt as error:
            number = error.signal if isinstance(error, Ended) else signal.SIGINT
            with suppress(OSError):  # the terminal may be closed
                name = signal.Signals(number).name
                click.secho(
                    f"{name}: the command was stopped before it finished", fg="red", err=True
                )
            ctx.exit(128 + number)
        except (OSError, UnicodeEncodeError) as error:
            if os.environ.get("RECD_TRACEBACK") == "1" or (said := meant_by(error)) is None:
                raise
            raise _Failure(said) from error


def _plugin_commands(ctx: click.Context) -> click.Group:
    from recd_plugins.cli.options import manager_of, tell_broken

    commands = click.Group()
    manager = manager_of(ctx)
    manager.items("register_commands", cli=commands)
    tell_broken(manager)
    return commands


def _exclude_packages(ctx: click.Context, _option: click.Parameter, names: tuple[str, ...]) -> None:
    if not names:
        return
    from recd_plugins.runtime.plugin_modules import WITHOUT

    before = os.environ.get(WITHOUT)
    os.environ[WITHOUT] = ",".join([*filter(None, [before]), *names])

    def restore() -> None:
        if before is None:
            del os.environ[WITHOUT]
        else:
            os.environ[WITHOUT] = before

    ctx.call_on_close(restore)


@click.group(cls=_Recd, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--plugins-dir",
    type=click.Path(path_type=Path),
    is_eager=True,
    help="A folder of plugin files (*.py) to load in addition to the installed plugins.",
)
@click.option(
    "--without",
    multiple=True,
    metavar="NAME",
    is_eager=True,
    expose_value=False,
    callback=_exclude_packages,
    help="Do not load the installed plugin package NAME. NAME is its package or distribution name. "
    "Can be repeated. The environment variable RECD_WITHOUT=NAME,NAME does the same.",
)
@click.version_option(__version__, prog_name="recd")
@click.pass_context
def main(ctx: click.Context, plugins_dir: Path | None) -> None:
    """Train TorchRec models with the plugins that a registry file names."""
    # Set before torch is imported, in ranks too: the native code of DistributedDataParallel warns
    # about summed_in_fixed_buckets() in every run.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # The object that click.pass_obj passes to commands.
    ctx.obj = plugins_dir
