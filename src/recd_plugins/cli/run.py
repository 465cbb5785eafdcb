"""``recd run``: train the model of a registry file (YAML), or a default model for a table."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import RenderableType

from recd_plugins.cli.init import write_registry
from recd_plugins.cli.options import (
    ABOVE_0,
    AT_LEAST_1,
    COUNT_FROM_0,
    OUTPUT,
    RANKS,
    SETTINGS,
    manager_of,
    tell_broken,
    training_option,
)
from recd_plugins.cli.options import overrides as given_overrides
from recd_plugins.config.from_file import load_registry
from recd_plugins.interfaces import RunReport
from recd_plugins.interfaces.plugin import part_call
from recd_plugins.report.output import output_console
from recd_plugins.runtime.errors import RunInterrupted
from recd_plugins.runtime.files import write_json
from recd_plugins.runtime.imports import silence_upstream, without_collections
from recd_plugins.runtime.launch import torchrun_rank
from recd_plugins.runtime.versions import installed_set, mismatch
from recd_plugins.training.checkpoint_files import ALLOWABLE
from recd_plugins.training.run_folders import (
    generated_registry,
    refuse_run_folder,
    settings_to_resume,
    write_result,
)

if TYPE_CHECKING:
    from recd_plugins.training.result import Result
    from recd_plugins.training.session import Session
    from recd_plugins.training.sharded_model import Variant


def registry_of(ctx: click.Context, given: str, columns: dict[str, str | None]) -> Path:
    """Return the registry file of a run. For a table, generate the file as ``recd init`` does.

    ``columns`` has the names of the label, session and time columns; None if not given.
    """
    from recd_plugins.config.document import names_table

    refuse_run_folder(Path(given))
    named = {name: column for name, column in columns.items() if column is not None}
    is_table = named or names_table(given) or Path(given).is_dir()
    if given.lower().endswith((".yaml", ".yml")) or not is_table:
        if named:
            option = f"--{next(iter(named))}"
            raise click.UsageError(
                f"{option} applies only to tables, but {given} is a registry file. Remove {option}."
            )
        return Path(given)
    file = generated_registry(given)
    # None: use an existing file. With options, it must equal the file that would be written.
    write_registry(ctx, given, file, force=None, **named)
    return file


class RunCommand(click.Command):
    """The click command of ``recd run``, with an option for each ``RunReport`` of a plugin.

    Loads plugins only if an option is not built in, because loading takes time.
    """

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        *own, help_option = super().get_params(ctx)
        reports: dict[str, type[RunReport]] = ctx.meta.get(__name__, {})
        options = [
            click.Option([name, cls.flag], type=OUTPUT, help=cls.help, metavar="FILE")
            for name, cls in reports.items()
        ]
        return [*own, *options, help_option]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, [*args])
        except click.NoSuchOption:
            self._load_reports(ctx)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            from recd_plugins.config import TrainingSpec

            tell_broken(manager_of(ctx))
            name = error.option_name.removeprefix("--").replace("-", "_")
            if name in TrainingSpec.model_fields:
                raise click.UsageError(
                    f"No such option '{error.option_name}'. To override this value of the registry "
                    f"file, add training.{name}=VALUE after REGISTRY.",
                    ctx,
                ) from error
            raise

    def get_help(self, ctx: click.Context) -> str:
        self._load_reports(ctx)
        tell_broken(manager_of(ctx))
        return super().get_help(ctx)

    def _load_reports(self, ctx: click.Context) -> None:
        found = manager_of(ctx).items("register_reports")
        ctx.meta[__name__] = {f"report_{number}": cls for number, cls in enumerate(found)}


@click.command(cls=RunCommand)
@click.argument("given", metavar="REGISTRY", type=click.Path())
@SETTINGS
@click.option(
    "--label", "label_column", metavar="COLUMN", help="For a table: the column to predict."
)
@click.option(
    "--session",
    "session_column",
    metavar="COLUMN",
    help="For a table: the session column.",
)
@click.option(
    "--time",
    "time_column",
    metavar="COLUMN",
    help="For a table: the time column.",
)
@click.option(
    "--compare",
    is_flag=True,
    help="Also train stock TorchRec with the same batches and initial weights, and show both "
    "results. Writes no checkpoints.",
)
@click.option(
    "--sharding",
    "shardings",
    multiple=True,
    metavar="NAME",
    help="Use the sharding plugin NAME in the first sharding entry. If given several times, train "
    "once with each plugin and compare the results.",
)
@click.option(
    "--rounds",
    type=AT_LEAST_1,
    default=1,
    show_default=True,
    help="With --compare or several --sharding: train every variant this often, and show medians "
    "and the spread.",
)
@click.option(
    "--dry-run",
    is_flag=True,
    help="Show the columns, model, steps, plan and memory without training. Prepares missing data, "
    "but writes no other files.",
)
@click.option(
    "--seeds",
    type=AT_LEAST_1,
    default=1,
    show_default=True,
    help="Train this number of runs with consecutive seeds from training.seed, and show mean and "
    "standard deviation of their metrics.",
)
@click.option("--resume", is_flag=True, help="Resume the newest run from its newest checkpoint.")
@click.option(
    "--run",
    "run_number",
    type=AT_LEAST_1,
    metavar="N",
    help="With --resume: resume run N of training.checkpoint.runs instead of the newest run.",
)
@click.option(
    "--allow",
    "allowed",
    multiple=True,
    type=click.Choice(ALLOWABLE),
    metavar="FIELD",
    help="With --resume: allow this field to differ from the checkpoint. One of: "
    f"{', '.join(ALLOWABLE)}.",
)
@click.option(
    "--breakdown",
    is_flag=True,
    help="Profile 10 steps, and show the seconds of each stage, such as lookup or all-to-all.",
)
@click.option(
    "--verbose",
    "-v",
    is_flag=True,
    help="Also show the device, the choices of sharding auto, the sharding of each table, and the "
    "time spent waiting for data. With --dry-run: the plan of each table.",
)
@RANKS
@training_option("--ranks-per-node", AT_LEAST_1)
@training_option("--workers", COUNT_FROM_0)
@training_option("--steps", AT_LEAST_1)
@training_option("--hang-notice", ABOVE_0, "SECONDS")
@training_option("--hang-timeout", ABOVE_0, "SECONDS")
@click.option(
    "--log-every",
    type=ABOVE_0,
    metavar="SECONDS",
    help="Print a progress line every SECONDS seconds instead of updating one line. Default: 10 if "
    "stderr is not a terminal.",
)
@click.option(
    "--json",
    "json_path",
    type=OUTPUT,
    help="Write the results to this JSON file.",
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
    seeds: int,
    resume: bool,
    run_number: int | None,
    allowed: tuple[str, ...],
    breakdown: bool,
    verbose: bool,
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

    Starts the ranks, or joins the ranks of torchrun. KEY=VALUE overrides a value of the registry
    file. REGISTRY can also be a table. In this case, its registry file is generated in the folder
    .recd, as by `recd init`.

    \b
    recd run registry.yaml --compare
    recd run clicks.parquet --label click
    recd run registry.yaml training.learning_rate=0.05 model.embedding_dim=32
    recd run registry.yaml --seeds 3
    torchrun --nproc-per-node 2 --no-python recd run registry.yaml
    """
    _warn_of_mismatch()
    plugins_dir: Path | None = ctx.obj
    columns = {"label": label_column, "session": session_column, "time": time_column}
    several = len(shardings) > 1
    many = compare or several
    mistakes = {
        "a comparison trains from the first step. Remove --resume.": resume and many,
        "--allow needs --resume. Add --resume, or remove --allow.": allowed and not resume,
        "--dry-run shows one run without training. Remove torchrun, --compare, --resume, "
        "--breakdown and all but one --sharding.": dry_run
        and (many or resume or breakdown or torchrun_rank() is not None),
        "--rounds needs a comparison. Add --compare, or remove --rounds.": rounds > 1 and not many,
        "--run needs --resume. Add --resume, or remove --run.": run_number and not resume,
        "--seeds starts new runs. Remove --compare, --dry-run, --resume, --breakdown and all but "
        "one --sharding.": seeds > 1 and (many or dry_run or resume or breakdown),
        "torchrun starts one run. Start one run per seed, with training.seed=N.": seeds > 1
        and torchrun_rank() is not None,
        "--compare and several --sharding cannot be combined. Remove --compare or all but one "
        "--sharding.": compare and several,
        f"--sharding has duplicates: {', '.join(map(repr, shardings))}. Remove the duplicates.": (
            len({*shardings}) < len(shardings)
        ),
    }
    for message, made in mistakes.items():
        if made:
            raise click.UsageError(message)
    reports: list[tuple[RunReport, Path]] = [
        (ctx.meta[__name__][name](), path) for name, path in of_reports.items() if path is not None
    ]
    if reports and dry_run:
        flag = reports[0][0].flag
        raise click.UsageError(f"{flag} needs a training run. Remove --dry-run or {flag}.")
    registry = registry_of(ctx, given, columns)
    loaded, *_ = [
        load_registry(registry, plugins_dir=plugins_dir, sharding=sharding, settings=settings)
        for sharding in shardings or (None,)
    ]
    if resume and (of_run := settings_to_resume(loaded, run_number)):
        settings = (*of_run, *settings)
        loaded = load_registry(
            registry,
            plugins_dir=plugins_dir,
            sharding=next(iter(shardings), None),
            settings=settings,
        )
    # These imports take seconds, so user errors are reported before them.
    with without_collections():
        from recd_plugins.interfaces import Choice
        from recd_plugins.training.result import (
            Comparison,
            in_rounds,
            of_seeds,
            quality_advice,
            seed_table,
            stall_table,
        )
        from recd_plugins.training.session import session
        from recd_plugins.training.trainer import Job
    overrides = given_overrides(
        ranks=ranks,
        ranks_per_node=ranks_per_node,
        workers=workers,
        steps=steps,
        hang_notice=hang_notice,
        hang_timeout=hang_timeout,
    )
    set_to = [*settings, *(f"training.{name}={value}" for name, value in overrides.items())]
    if not several:  # else the report has one entry per sharding
        set_to += [f"--sharding {name}" for name in shardings]
    if many or dry_run:
        overrides |= {"checkpoint": {}, "validation": None}
    shown: list[RenderableType]
    both: dict[str, Result] = {}

    def started(seed: int | None) -> AbstractContextManager[Session]:
        of_seed = {} if seed is None else {"seed": seed}
        job = Job(
            registry,
            plugins_dir=plugins_dir,
            overrides=overrides | of_seed,
            breakdown=breakdown,
            sharding=next(iter(shardings), None),
            allowed=allowed,
            settings=(*settings, *(f"training.{name}={value}" for name, value in of_seed.items())),
            log_every=log_every,
            verbose=verbose,
        )
        return session(
            job,
            loaded,
            resume=resume,
            run=run_number,
            alike={
                "--sharding": list(shardings),
                "--compare": compare,
                "--rounds": rounds,
                "--run": run_number,
                "--json": json_path is not None,
                **{asked_for.flag: True for asked_for, _ in reports},
            },
        )

    def finish(trainer: Session, report: dict[str, Any], shown: list[RenderableType]) -> None:
        if trainer.rank != 0:
            return
        report |= {"registry": trainer.registry.text, "settings": set_to}
        try:  # print even if the disk is full, and write files even if the terminal is closed
            if json_path is not None:
                write_json(json_path, report)
            for asked_for, path in reports:
                with part_call(asked_for, "write"):
                    asked_for.write(path, report)
        finally:
            for each in filter(None, shown):
                output_console().print(each, markup=False)

    def saved(trainer: Session, result: Result) -> None:
        if trainer.rank == 0 and trainer.folder is not None:
            own = {"registry": trainer.registry.text, "settings": [*trainer.job.settings]}
            write_result(trainer.folder, {**result.as_json(), **own})

    if seeds > 1:
        by_seed: dict[int, Result] = {}
        folders: dict[int, Path | None] = {}
        first_seed = loaded.training.seed
        for seed in range(first_seed, first_seed + seeds):
            with started(seed) as trainer, _adding_resume_command(registry):
                by_seed[seed] = trainer.train()
                saved(trainer, by_seed[seed])
                folders[seed] = trainer.folder
        finish(trainer, of_seeds(by_seed), [seed_table(by_seed, folders)])
        return
    with started(None) as trainer, _adding_resume_command(registry):
        if dry_run:
            report, shown = _dry_run(trainer, verbose=verbose)
            results = {}
        elif several:
            of_rounds = in_rounds(shardings, rounds, lambda name: trainer.train("plugins", name))
            results = of_rounds[0]
            comparison = Comparison(of_rounds, shardings=True)
            report, shown = comparison.as_json(), [comparison.table()]
        elif compare:
            variants: tuple[Variant, ...] = ("baseline", "plugins")
            comparison = Comparison(
                in_rounds(variants, rounds, trainer.train), wire=trainer.registry.training.wire
            )
            report, shown = comparison.as_json(), [comparison.table()]
            both = dict(comparison.rounds[0])
            results = {"plugins": both["plugins"]}
        else:
            result = trainer.train()
            complete = resume and len(result.losses) == result.first_step
            if not complete:
                saved(trainer, result)
            report, shown = result.as_json(), [*result.tables(verbose=verbose)]
            results = {"": result}
            if complete:
                shown = [f"The run is already complete: all {result.first_step} steps are trained."]
                results = {}
        for name, result in results.items():
            for section in result.sections.values():
                if verbose or not isinstance(section, Choice):
                    shown += section.shown(name)
        waited = {
            name: result.stalls
            for name, result in (both or results).items()
            if result.stalls is not None
        }
        if waited and verbose:
            shown.append(stall_table(waited))
        for name, stalls in waited.items():
            if (advice := stalls.advice()) and not trainer.registry.dataset.is_stream:
                shown.append(f"{name}: {advice}" if name else advice)
        shown += [
            f"{name}: {each.validation}" if name else str(each.validation)
            for name, each in results.items()
            if each.validation is not None
        ]
        for name, result in results.items():
            shown += quality_advice(result.as_json(), name)
        if trainer.folder is not None:
            shown.append(f"saved to {trainer.folder}")
        finish(trainer, report, shown)


def _dry_run(trainer: Session, *, verbose: bool) -> tuple[dict[str, Any], list[RenderableType]]:
    import torch

    from recd_plugins.config.device import choose_device
    from recd_plugins.planning.report import render, summary
    from recd_plugins.planning.study import study
    from recd_plugins.planning.topologies import MACHINE, machine_of
    from recd_plugins.training.dry_run import dry_run, user_line

    silence_upstream()
    registry = trainer.registry
    found, table = dry_run(registry, trainer.world_size)
    spec = machine_of(registry.training, device=torch.device(choose_device(registry)))
    topology, rows = registry.training.topology or MACHINE, registry.training.batch_size
    plan = study(registry, topology, spec, rows, lambda _: None)
    return {**found, "plan": plan.as_json()}, [
        table,
        *filter(None, [user_line(registry)]),
        (render if verbose else summary)(plan),
    ]


@contextmanager
def _adding_resume_command(registry: Path) -> Iterator[None]:
    """Add the command that resumes the run to the message of ``RunInterrupted``."""
    try:
        yield
    except RunInterrupted as error:
        if error.resumable:
            from recd_plugins.training.session import this_command

            command = this_command(registry, resume=True)
            error.args = (f"{error.args[0]}. To resume, run: {command}",)
        raise


def _warn_of_mismatch() -> None:
    remedy = mismatch()
    if remedy and torchrun_rank() in (None, 0):
        click.secho(
            f"{installed_set()} are not compatible: {remedy}. Run recd doctor for details.",
            fg="yellow",
            err=True,
        )
