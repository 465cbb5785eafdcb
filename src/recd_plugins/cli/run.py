"""``recd run``: train the model of a registry file, or of a table."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import RenderableType

from recd_plugins.cli.init import TABLE, Starts
from recd_plugins.cli.options import (
    ABOVE_0,
    AT_LEAST_1,
    COUNT_FROM_0,
    OUTPUT,
    RANKS,
    SETTINGS,
    contributed,
    manager_of,
    tell_broken,
)
from recd_plugins.config.from_file import load_registry
from recd_plugins.config.manager import PluginManager
from recd_plugins.interfaces import RunReport
from recd_plugins.interfaces.plugin import part_call
from recd_plugins.report.output import output_console
from recd_plugins.runtime.errors import PluginError, RecdError, RunInterrupted
from recd_plugins.runtime.files import write_json
from recd_plugins.runtime.imports import silence_upstream, without_collections
from recd_plugins.runtime.launch import torchrun_rank
from recd_plugins.runtime.plugin_modules import qualified
from recd_plugins.runtime.versions import installed_set, mismatch
from recd_plugins.training.checkpoint_files import ALLOWABLE

if TYPE_CHECKING:
    from recd_plugins.training.assembly import Variant
    from recd_plugins.training.result import Result
    from recd_plugins.training.session import Session


#: Where registries of tables are kept.
_FOLDER = Path(".recd")
_REGISTRY = (".yaml", ".yml")


def registry_of(ctx: click.Context, given: str, columns: dict[str, str | None]) -> Path:
    """The registry file of a run: ``given``, or what ``recd init`` writes for the table that it is.

    Args:
        ctx: of the command.
        given: what stands after it; a URL is that of a table.
        columns: options about the columns of a table, None where they are not given.

    Raises:
        RecdError: the table is not as it should be, nothing installed takes one, or a file of this
            name was edited or is of another table.
    """
    named = {name: column for name, column in columns.items() if column is not None}
    is_registry = given.lower().endswith(_REGISTRY) or not (named or _is_table(given))
    if is_registry:
        if named:
            raise click.UsageError(
                f"--{next(iter(named))} is about a table, and {given} is a registry file, which "
                "says so itself"
            )
        return Path(given)
    starts, manager = contributed(ctx, "register_starts", Starts)
    start = starts.commands.get(TABLE)
    if start is None:
        tell_broken(manager)
        raise RecdError(f"{given}: nothing installed makes a registry of a table")
    # Of `.`, too.
    file = _FOLDER / f"{Path(given).resolve().name.partition('.')[0] or 'table'}.yaml"
    # None: a file that is there has to be what is written.
    ctx.invoke(start, table=given, file=file, force=None, **named)
    return file


def _is_table(given: str) -> bool:
    from recd_plugins.config.document import names_table

    return names_table(given) or Path(given).is_dir()


_FLAG = re.compile(r"--[a-z][a-z0-9-]*")


class RunReports:
    """The files, beside options that ``recd run`` has itself.

    Attributes:
        params: their options.
    """

    def __init__(self, own: Iterable[click.Parameter]) -> None:
        self.params: list[click.Option] = []
        self._taken = {name for each in own for name in each.opts}
        self._by_name: dict[str, RunReport] = {}

    def add(self, cls: Any, where: str) -> None:
        """Add what a package registers.

        Args:
            cls: the report.
            where: that registers it, for messages.

        Raises:
            PluginError: it is none, or its option is there already.
        """
        what, flag = f"{where}: {qualified(cls)}", getattr(cls, "flag", "")
        if not _FLAG.fullmatch(flag) or not getattr(cls, "help", ""):
            raise PluginError(f"{what} needs a flag, as in --markdown, and help for it")
        if flag in self._taken:
            raise PluginError(
                f"{what} has {flag}, which recd run has already; rename it, or leave one package "
                "out (--without NAME)"
            )
        self._taken.add(flag)
        name = f"report_{len(self.params)}"
        self.params.append(click.Option([name, flag], type=OUTPUT, help=cls.help, metavar="FILE"))
        self._by_name[name] = cls()

    def asked_for(self, values: dict[str, Path | None]) -> Iterator[tuple[RunReport, Path]]:
        """The files that a command line names, and what writes them.

        Args:
            values: of ``params``, by name.
        """
        for name, path in values.items():
            if path is not None:
                yield self._by_name[name], path


class RunCommand(click.Command):
    """A command with the options of ``RunReports``: looked for where one is unknown to it."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        *own, help_option = super().get_params(ctx)
        found: RunReports | None = ctx.meta.get(__name__)
        return [*own, *(found.params if found else ()), help_option]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, [*args])
        except click.NoSuchOption:
            manager = self._look_for_reports(ctx)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            tell_broken(manager)
            if setting := _setting_meant(error.option_name):
                raise click.UsageError(
                    f"No such option '{error.option_name}'. It is a value of the file: write "
                    f"{setting}=VALUE after REGISTRY",
                    ctx,
                ) from error
            raise

    def get_help(self, ctx: click.Context) -> str:
        tell_broken(self._look_for_reports(ctx))
        return super().get_help(ctx)

    def _look_for_reports(self, ctx: click.Context) -> PluginManager:
        manager, found = manager_of(ctx), RunReports(self.params)
        manager.hand("register_reports", found.add)
        ctx.meta[__name__] = found
        return manager


def reports_of(ctx: click.Context, values: dict[str, Path | None]) -> list[tuple[RunReport, Path]]:
    """The files that the command line of ``ctx`` names, by what ``RunCommand`` gave for them."""
    found: RunReports | None = ctx.meta.get(__name__)
    return [] if found is None else [*found.asked_for(values)]


def _setting_meant(flag: str) -> str:
    """The key of the section ``training`` that is called as an option; nothing where none is."""
    from recd_plugins.config import TrainingSpec

    name = flag.removeprefix("--").replace("-", "_")
    return f"training.{name}" if name in TrainingSpec.model_fields else ""


@click.command(cls=RunCommand)
@click.argument("given", metavar="REGISTRY", type=click.Path())
@SETTINGS
@click.option(
    "--label", "label_column", metavar="COLUMN", help="Of a table: what is to be predicted."
)
@click.option(
    "--session", "session_column", metavar="COLUMN", help="Of a table: whose rows belong together."
)
@click.option("--time", "time_column", metavar="COLUMN", help="Of a table: when it was.")
@click.option(
    "--compare",
    is_flag=True,
    help="Train without the plugins too (stock TorchRec, plain KJTs), on the same batches from the "
    "same weights, and show both. Writes no checkpoints.",
)
@click.option(
    "--sharding",
    "shardings",
    multiple=True,
    metavar="NAME",
    help="A sharding plugin for the tables of the first sharding entry, in its place. Given "
    "several times: train under each, on the same batches from the same weights, and show all. "
    "Writes no checkpoints then.",
)
@click.option(
    "--rounds",
    type=AT_LEAST_1,
    default=1,
    show_default=True,
    help="With --compare or several --sharding: train the sides in turn so often, and show medians "
    "and how far the rounds lie apart.",
)
@click.option(
    "--dry-run",
    is_flag=True,
    help="Show what the run would do up to its first step: columns, model, steps, plan and memory. "
    "Makes the data where it is missing, and writes nothing else.",
)
@click.option("--resume", is_flag=True, help="Go on from the newest checkpoint.")
@click.option(
    "--allow",
    "allowed",
    multiple=True,
    type=click.Choice(ALLOWABLE),
    metavar="FIELD",
    help="With --resume: let this field differ from the checkpoint's. One of: "
    f"{', '.join(ALLOWABLE)}.",
)
@click.option(
    "--breakdown",
    is_flag=True,
    help="Profile 10 of the steps: seconds by stage (lookup, GEMM, all-to-all, all-reduce, other) "
    "and memory of a step.",
)
@RANKS
@click.option(
    "--ranks-per-node",
    type=AT_LEAST_1,
    help="Overrides training.ranks_per_node: this machine pretends to be several nodes.",
)
@click.option("--workers", type=COUNT_FROM_0, help="Overrides training.workers.")
@click.option("--steps", type=AT_LEAST_1, help="Overrides training.steps.")
@click.option(
    "--hang-notice",
    type=ABOVE_0,
    metavar="SECONDS",
    help="Overrides training.hang_notice.",
)
@click.option(
    "--hang-timeout",
    type=ABOVE_0,
    metavar="SECONDS",
    help="Overrides training.hang_timeout.",
)
@click.option(
    "--log-every",
    type=ABOVE_0,
    metavar="SECONDS",
    help="A line with step, loss, samples/s and the time left every so many seconds, in place of "
    "the live line of a terminal. 10 where stderr is none.",
)
@click.option(
    "--json",
    "json_path",
    type=OUTPUT,
    help="Write figures here.",
)
@click.pass_context
def run(
    ctx: click.Context,
    /,
    given: str,
    settings: tuple[str, ...],
    label_column: str | None,
    session_column: str | None,
    time_column: str | None,
    compare: bool,
    shardings: tuple[str, ...],
    rounds: int,
    dry_run: bool,
    resume: bool,
    allowed: tuple[str, ...],
    breakdown: bool,
    ranks: int | None,
    ranks_per_node: int | None,
    workers: int | None,
    steps: int | None,
    hang_notice: float | None,
    hang_timeout: float | None,
    log_every: float | None,
    json_path: Path | None,
    **of_reports: Path | None,
) -> None:
    """Train the model of REGISTRY on its data with its plugins.

    Starts the ranks itself; under torchrun it joins the ranks that are there. KEY=VALUE sets any
    value of the file for this run, as messages name it: sharding[0].options.hot=0.2. A table in
    place of REGISTRY gets one as `recd init` writes it, in the folder .recd.

    \b
    recd run registry.yaml --compare
    recd run clicks.parquet --label click
    recd run registry.yaml training.learning_rate=0.05 model.embedding_dim=32
    torchrun --nproc-per-node 2 --no-python recd run registry.yaml
    """
    _warn_of_mismatch()
    plugins_dir: Path | None = ctx.obj
    columns = {"label": label_column, "session": session_column, "time": time_column}
    several = len(shardings) > 1
    if resume and (compare or several):
        raise click.UsageError(
            "a comparison starts every run at the first step; leave out --resume"
        )
    if allowed and not resume:
        raise click.UsageError("--allow is about going on from a checkpoint; it takes --resume")
    if dry_run and (compare or several or resume or breakdown or torchrun_rank() is not None):
        raise click.UsageError(
            "--dry-run is of one run up to its first step; leave out torchrun, --compare, "
            "--resume, --breakdown and all but one --sharding"
        )
    if rounds > 1 and not (compare or several):
        raise click.UsageError("--rounds is about a comparison; it takes --compare")
    if compare and several:
        raise click.UsageError("--compare takes one --sharding")
    if len(set(shardings)) < len(shardings):
        raise click.UsageError(f"--sharding names one twice: {', '.join(shardings)}")
    reports = reports_of(ctx, of_reports)
    for asked_for, _ in reports:
        if dry_run:
            raise click.UsageError(f"{asked_for.flag} is about a run; leave out --dry-run")
    registry = registry_of(ctx, given, columns)
    loaded, *_ = [
        load_registry(registry, plugins_dir=plugins_dir, sharding=sharding, settings=settings)
        for sharding in shardings or (None,)
    ]
    # What takes seconds to import, where nothing is left to be found wrong without it.
    with without_collections():
        from recd_plugins.training.result import (
            Comparison,
            ShardingComparison,
            in_rounds,
            quality_advice,
            stall_table,
        )
        from recd_plugins.training.session import session
    options: dict[str, Any] = {
        "ranks": ranks,
        "ranks_per_node": ranks_per_node,
        "workers": workers,
        "steps": steps,
        "hang_notice": hang_notice,
        "hang_timeout": hang_timeout,
    }
    overrides = {name: value for name, value in options.items() if value is not None}
    set_to = [*settings, *(f"training.{name}={value}" for name, value in overrides.items())]
    if not several:  # else figures stand under their names
        set_to += [f"--sharding {name}" for name in shardings]
    if compare or several or dry_run:
        overrides |= {"checkpoint": {}, "validation": None}
    shown: list[RenderableType]
    both: dict[str, Result] = {}
    with (
        session(
            registry,
            loaded,
            plugins_dir=plugins_dir,
            overrides=overrides,
            resume=resume,
            breakdown=breakdown,
            shardings=shardings,
            allowed=allowed,
            settings=settings,
            log_every=log_every,
            alike={
                "--compare": compare,
                "--rounds": rounds,
                # Rank 0 writes: another's alone would be for nothing.
                "--json": json_path is not None,
                **{asked_for.flag: True for asked_for, _ in reports},
            },
        ) as trainer,
        _goes_on_with_resume(registry),
    ):
        if dry_run:
            report, shown = _dry_run(trainer)
            results = {}
        elif several:
            found = in_rounds(shardings, rounds, lambda name: trainer.train("plugins", name))
            results = found[0]
            compared = ShardingComparison(results, found[1:])
            report, shown = compared.as_json(), [compared.table()]
        elif compare:
            sides: tuple[Variant, ...] = ("baseline", "plugins")
            first, *others = in_rounds(sides, rounds, trainer.train)
            comparison = Comparison(first, others, wire=trainer.registry.training.wire)
            report, shown = comparison.as_json(), [comparison.table()]
            both = first
            results = {"plugins": both["plugins"]}
        else:
            result = trainer.train("plugins")
            report, shown = result.as_json(), [result.table()]
            results = {"": result}
        for name, result in results.items():
            for section in result.sections.values():
                shown += section.shown(name)
            if result.groups is not None:
                shown.append(result.groups.table(name))
        waited = {
            name: result.stalls
            for name, result in (both or results).items()
            if result.stalls is not None
        }
        if waited:
            shown.append(stall_table(waited))
            for name, stalls in waited.items():
                if advice := stalls.advice():
                    shown.append(f"{name}: {advice}" if name else advice)
        shown += [
            f"{name}: {each.validation}" if name else str(each.validation)
            for name, each in results.items()
            if each.validation is not None
        ]
        for name, result in results.items():
            shown += quality_advice(result.as_json(), name)
        if trainer.rank == 0:
            report["registry"] = trainer.registry.text
            report["settings"] = set_to
            try:
                # Before what is printed, which may find no room where it goes.
                if json_path is not None:
                    write_json(json_path, report)
                for asked_for, path in reports:
                    with part_call(asked_for, "write"):
                        asked_for.write(path, report)
            finally:  # files may not either
                for each in filter(None, shown):
                    output_console().print(each, markup=False)


def _dry_run(trainer: Session) -> tuple[dict[str, Any], list[RenderableType]]:
    """What the run would do, as JSON and for a screen."""
    import torch

    from recd_plugins.config.device import choose_device
    from recd_plugins.planning.plan_mode import PlanQuestion, TablesPlan
    from recd_plugins.planning.topologies import MACHINE, machine_of
    from recd_plugins.training.dry_run import DryRun

    silence_upstream()
    registry = trainer.registry
    dry = DryRun.of(registry, trainer.world_size)
    answer = TablesPlan().plan(
        PlanQuestion(
            registry,
            trainer.job.plugins_dir,
            registry.training.topology or MACHINE,
            machine_of(registry.training, device=torch.device(choose_device(registry))),
            registry.training.batch_size,
            {},
            lambda _: None,
        )
    )
    return {**dry.as_json(), "plan": answer.as_json()}, [dry.table(), answer.text]


@contextmanager
def _goes_on_with_resume(registry: Path) -> Iterator[None]:
    """A context at whose end by a signal the command that goes on is said."""
    try:
        yield
    except RunInterrupted as error:
        if error.resumable:
            from recd_plugins.training.session import this_command

            command = this_command(registry, resume=True)
            error.args = (f"{error.args[0]}. To go on: {command}",)
        raise


def _warn_of_mismatch() -> None:
    """Say so, once, where the packages do not belong together: before imports break on it."""
    remedy = mismatch()
    if remedy and torchrun_rank() in (None, 0):
        click.secho(
            f"{installed_set()} do not belong together: {remedy}. See recd doctor",
            fg="yellow",
            err=True,
        )
