"""``recd evaluate``, ``predict``, ``export``, ``embeddings`` and ``report``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import click

from recd_plugin_runs.score_columns import ROW, score_names
from recd_plugins.api import (
    DataError,
    RecdError,
    RunReport,
    cli_options,
    consoles,
    file_utils,
    imports,
    run_folders,
)


class _NumberOrBest(click.IntRange):
    name = "run number or 'best'"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        return value if value == "best" else super().convert(value, param, ctx)


_RUN = click.option(
    "--run",
    "run_number",
    type=_NumberOrBest(min=1),
    metavar="N|best",
    help="Number of the run, if training.checkpoint.runs is set. best selects the best run as recd "
    "runs does.  [default: the newest finished run]",
)
#: Value of option ``--run``.
RunNumber = int | Literal["best"] | None


def _find(
    trained: Path,
    run: RunNumber,
    checkpoint: str | None,
    settings: tuple[str, ...],
    plugins_dir: Path | None,
) -> run_folders.TrainedModel:
    from recd_plugin_runs.runs import best_run

    number = best_run(trained, plugins_dir) if run == "best" else run
    return run_folders.find_trained(trained, number, checkpoint, settings, plugins_dir)


_FORMATS = {".parquet": "parquet", ".csv": "csv", ".jsonl": "jsonl"}


@click.command()
@cli_options.TRAINED
@cli_options.SETTINGS
@_RUN
@cli_options.CHECKPOINT
@cli_options.RANKS
@cli_options.BATCH_SIZE
@click.option(
    "--by",
    multiple=True,
    metavar="COLUMN",
    help="Also show metrics per value of this feature or key column: the 20 most frequent values, "
    "ranges of numbers, or lengths of lists. Can be repeated.",
)
@click.option(
    "--baseline",
    is_flag=True,
    help="Also show the metrics of a logistic regression (scikit-learn), trained on at most "
    "100,000 rows. recd report then shows it, too.",
)
@click.option(
    "--json",
    "json_path",
    type=cli_options.OUTPUT_OR_TERMINAL,
    help="Write the metrics as JSON to this file; - writes only the JSON to the terminal.",
)
@click.pass_obj
def evaluate(
    plugins_dir: Path | None,
    trained: Path,
    settings: tuple[str, ...],
    run_number: RunNumber,
    checkpoint: str | None,
    ranks: int | None,
    batch_size: int | None,
    by: tuple[str, ...],
    baseline: bool,
    json_path: Path | None,
) -> None:
    """Evaluate a trained model on every row of its test split.

    Shows normalized entropy, AUC and the metrics of the registry file. The column "base rate" is
    for comparison: it predicts the mean label of the training split for every row, or with loss
    log_mse the mean of log(1 + label). With several labels, --by prints a table per label. Runs on
    the ranks of torchrun, if there are any.

    REGISTRY selects its newest finished run. RUN is a run folder, which needs no registry file.
    KEY=VALUE overrides a value, as in recd run.

    \b
    recd evaluate registry.yaml
    recd evaluate runs/clicks/3 --checkpoint newest --json -
    recd evaluate registry.yaml --by campaign --by hour --baseline
    """
    on_terminal = json_path == Path("-")
    model = _find(trained, run_number, checkpoint, settings, plugins_dir)
    read, chosen = model.registry, model.checkpoint
    if "test" not in read.dataset.splits():
        raise RecdError(
            f"{trained}: dataset {read.dataset.name!r} has no test split. Configure a test split "
            "in dataset.options."
        )
    # Only ids that the ranks themselves preprocess can be counted as out-of-vocabulary.
    given = cli_options.overrides(ranks=ranks, batch_size=batch_size, workers=0, evaluate=True)
    read = read.with_training(given)
    if baseline:  # before the evaluation, which may take long
        imports.optional_library("sklearn", "baseline", "--baseline")
    from recd_plugin_runs.baseline import with_baselines
    from recd_plugin_runs.evaluate import EvaluateJob
    from recd_plugin_runs.evaluate import evaluate as on_rank
    from recd_plugins.api import devices, launcher, run_identity, run_results, trained_models

    run_identity.check_same_dataset(chosen, read)

    job = EvaluateJob(
        read.path,
        checkpoint=chosen,
        plugins_dir=model.plugins_dir,
        overrides=given,
        device=devices.choose_device(read),
        settings=model.settings,
        text=read.text,
        by=by,
    )
    alike = {"--checkpoint": checkpoint, "--batch-size": batch_size}
    found = trained_models.on_ranks(read, on_rank, job, alike)
    if launcher.torchrun_rank() not in (None, 0):
        return
    found = with_baselines(found, read.dataset, logistic=baseline)
    result = run_folders.read_result(chosen.parent)
    if baseline and result and not settings:  # recd report shows it
        logistic = {"logistic_regression": found.baselines["logistic_regression"].figures()}
        run_folders.write_result(chosen.parent, {**result, "baselines": logistic})
    if on_terminal:
        click.echo(file_utils.json_text(found.as_json()), nl=False)
        return
    if json_path is not None:
        file_utils.write_json(json_path, found.as_json())
    for table in found.tables(f"{chosen.parent}, step {found.step}, test split"):
        consoles.output_console().print(table)
    if told := found.baseline_advice():
        click.echo(told)
    for told in run_results.entropy_advice(found.test.figures(), "test"):
        click.echo(told)


@click.command()
@cli_options.TRAINED
@click.argument("table")
@cli_options.SETTINGS
@click.option("-o", "--output", type=cli_options.OUTPUT, required=True, help="Score file to write.")
@click.option(
    "--format",
    "kind",
    type=click.Choice(["parquet", "csv", "jsonl"]),
    help="Format of the score file. Default: the suffix of the output file.",
)
@click.option(
    "--keep",
    multiple=True,
    metavar="COLUMN",
    help="Column of TABLE to copy to the score file. TABLE must be Parquet. Can be repeated.",
)
@_RUN
@cli_options.CHECKPOINT
@cli_options.RANKS
@cli_options.BATCH_SIZE
@click.option("--force", is_flag=True, help="Replace the file if it exists.")
@click.pass_obj
def predict(
    plugins_dir: Path | None,
    trained: Path,
    table: str,
    output: Path,
    kind: str | None,
    keep: tuple[str, ...],
    run_number: RunNumber,
    checkpoint: str | None,
    ranks: int | None,
    batch_size: int | None,
    settings: tuple[str, ...],
    force: bool,
) -> None:
    """Score every row of TABLE with a trained model.

    TABLE is anything that the dataset of the run can read. It needs no label. The score file has
    one row per row of TABLE, in the same order. Its columns are the dataset's key columns, row (the
    0-based row number) and score (a probability). With several labels, column score_LABEL has the
    predictions of each label. With dataset option explode, the file has one row per candidate, and
    column candidate is the 0-based position in the list. Runs on the ranks of torchrun, if there
    are any.

    REGISTRY selects its newest finished run. RUN is a run folder, which needs no registry file.
    KEY=VALUE overrides a value, as in recd run.

    \b
    recd predict registry.yaml new.parquet -o scores.parquet
    recd predict registry.yaml new.parquet -o scores.csv --keep user_id --checkpoint newest
    """
    if (kind := kind or _FORMATS.get(output.suffix.lower())) is None:
        raise RecdError(
            f"{output}: the suffix is not one of {', '.join(map(repr, _FORMATS))}. Use one of "
            "these suffixes, or set --format."
        )
    model = _find(trained, run_number, checkpoint, settings, plugins_dir)
    scores = score_names(model.registry.dataset.known_tasks())
    for name in keep:
        if name in (ROW, *scores) or keep.count(name) > 1:
            raise RecdError(
                f"--keep {name}: the score file already has column {name!r}. Remove this --keep "
                "option."
            )
    # Check all options before importing torch, which takes seconds.
    from recd_plugin_runs.kept_columns import check_kept

    read, chosen = model.registry, model.checkpoint
    local = () if "://" in table else (Path(table),)
    if local and not local[0].exists():
        raise DataError(f"{table}: this file or folder does not exist. Check the path.")
    cli_options.check_apart(output, read, *local, chosen)
    cli_options.check_output(output, force, ROW, *scores)
    check_kept(read.dataset, table, keep)
    given = cli_options.overrides(ranks=ranks, workers=0)
    read = read.with_training(given)
    from recd_plugin_runs.predict import PredictJob
    from recd_plugin_runs.predict import predict as on_rank
    from recd_plugins.api import devices, launcher, run_identity, trained_models

    run_identity.check_same_dataset(chosen, read)
    with file_utils.without_remains(output) as token:
        job = PredictJob(
            read.path,
            checkpoint=chosen,
            plugins_dir=model.plugins_dir,
            overrides=given,
            device=devices.choose_device(read),
            settings=model.settings,
            text=read.text,
            table=table,
            output=output,
            kind=kind,
            keep=keep,
            batch_size=batch_size,
            token=token,
            replaces=force,
        )
        alike = {"--checkpoint": checkpoint, "--batch-size": batch_size}
        found = trained_models.on_ranks(read, on_rank, job, alike)
    if launcher.torchrun_rank() in (None, 0):
        more = "" if found.has_keys else "; --keep COLUMN copies columns of a Parquet table"
        click.echo(
            f"{output}: {found.rows:,} rows scored by {chosen} in {found.seconds:.1f} s "
            f"({found.rows / found.seconds:,.0f} rows/s){more}",
            err=True,
        )


_PROGRAMS = ("model", "user", "candidates")
_FILES = (
    *(f"{name}{tables}.pt2" for name in _PROGRAMS for tables in ("", "_int8")),
    *("signature.json", "encode.py", "sample_request.json"),
)


@click.command()
@cli_options.TRAINED
@cli_options.SETTINGS
@click.option(
    "-o",
    "--output",
    type=cli_options.OUTPUT_FOLDER,
    required=True,
    help="Output folder. Created if missing.",
)
@_RUN
@cli_options.CHECKPOINT
@click.option(
    "--int8",
    is_flag=True,
    help="Also write programs with 8-bit tables, such as model_int8.pt2, and report the error of "
    "their scores.",
)
@click.option("--force", is_flag=True, help="Replace existing files.")
@click.pass_obj
def export(
    plugins_dir: Path | None,
    trained: Path,
    output: Path,
    run_number: RunNumber,
    checkpoint: str | None,
    int8: bool,
    settings: tuple[str, ...],
    force: bool,
) -> None:
    """Export a trained model as programs of torch.export.

    The program model.pt2 accepts raw ids and numbers, preprocesses them as in training, and returns
    probabilities. It needs only torch: load it with torch.export.load. encode.py turns raw rows
    into the inputs of the program, as signature.json describes. sample_request.json is a request
    for examples/serving. Its part request has the columns that all candidates share.

    With user features, user.pt2 computes the user side once per request, and candidates.pt2 returns
    the scores. The converter's option user_features names the features.

    REGISTRY selects its newest finished run. RUN is a run folder, which needs no registry file.
    KEY=VALUE overrides a value, as in recd run.

    \b
    recd export registry.yaml -o exported
    recd export registry.yaml -o exported --int8 --checkpoint newest
    """
    model = _find(trained, run_number, checkpoint, settings, plugins_dir)
    read, chosen = model.registry, model.checkpoint
    if not force and any((output / name).exists() for name in _FILES):
        raise RecdError(
            f"{output}: the folder already has an export. Use another folder or --force."
        )
    cli_options.check_apart(output / "model.pt2", read, chosen)
    file_utils.check_writable(output / "model.pt2")
    from recd_plugin_runs.export import export_to
    from recd_plugin_runs.notes import say_absent
    from recd_plugins.api import trained_models

    imports.silence_upstream()
    read = trained_models.with_trained_columns(read, chosen)
    say_absent(read, chosen)
    error = export_to(read, chosen, output, int8=int8)
    click.echo(f"{output / 'model.pt2'}: exported the model of {chosen}", err=True)
    if (output / "user.pt2").exists():
        parts = f"{output / 'user.pt2'}, {output / 'candidates.pt2'}"
        click.echo(f"{parts}: the same model, with user features once per request", err=True)
    click.echo(f"{output / 'sample_request.json'}: a request for examples/serving", err=True)
    if error is not None:
        click.echo(
            f"{output / 'model_int8.pt2'}: on {error.rows:,} training rows, scores differ from "
            f"model.pt2 by {error.mean:.2g} on average and by at most {error.largest:.2g}",
            err=True,
        )


@click.command()
@cli_options.TRAINED
@click.argument("table")
@cli_options.SETTINGS
@click.option(
    "-o", "--output", type=cli_options.OUTPUT, required=True, help="Parquet file to write."
)
@_RUN
@cli_options.CHECKPOINT
@click.option("--force", is_flag=True, help="Replace the file if it exists.")
@click.pass_obj
def embeddings(
    plugins_dir: Path | None,
    trained: Path,
    table: str,
    output: Path,
    run_number: RunNumber,
    checkpoint: str | None,
    settings: tuple[str, ...],
    force: bool,
) -> None:
    """Write the rows of a trained model's embedding table to a Parquet file.

    TABLE is a feature, or a table of the model as in recd plan: t_ and the feature. The file has
    the columns id, the row of the table, and vector, a fixed-size list of float32. With a
    vocabulary, it also has value, the original id. For a dynamic table, id is the raw id, and value
    its original text.

    REGISTRY selects its newest finished run. RUN is a run folder, which needs no registry file.
    KEY=VALUE overrides a value, as in recd run.

    \b
    recd embeddings registry.yaml t_item_id -o items.parquet
    """
    if output.suffix.lower() != ".parquet":
        raise RecdError(f"{output}: the output is Parquet. Use a name that ends in .parquet.")
    model = _find(trained, run_number, checkpoint, settings, plugins_dir)
    read, chosen = model.registry, model.checkpoint
    cli_options.check_apart(output, read, chosen)
    cli_options.check_output(output, force, "id", "vector")
    from recd_plugin_runs.evaluate import write_embeddings
    from recd_plugin_runs.notes import say_absent
    from recd_plugins.api import trained_models

    read = trained_models.with_trained_columns(read, chosen, rows=False)
    say_absent(read, chosen)
    rows = write_embeddings(read, chosen, table, output)
    click.echo(f"{output}: {rows:,} rows of table {table!r} from {chosen}", err=True)


#: Near the beginning of pages that ``recd report`` writes.
_GENERATOR = b'name="generator" content="recd report"'


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    type=cli_options.OUTPUT,
    help="HTML file to write.  [default: RUN with the suffix .html; report.html in the common "
    "folder of several RUN]",
)
@click.option("--force", is_flag=True, help="Replace a file that recd report did not write.")
@click.pass_obj
def report(
    plugins_dir: Path | None, runs: tuple[Path, ...], output: Path | None, force: bool
) -> None:
    """Write a self-contained HTML page about one run, or a comparison of several runs.

    RUN is a run folder, a folder of runs, a registry file with runs, or a file of `recd run
    --json`. Each variant of a comparison counts as a run. Several RUNs are sorted by their test
    metric, best first.

    \b
    recd report runs/clicks/3
    recd report clicks.yaml -o all.html
    recd report monday.json tuesday.json -o both.html
    """
    from recd_plugin_runs.runs import folder_of_runs

    runs = tuple(
        folder_of_runs(run, plugins_dir) if run.suffix in (".yaml", ".yml") else run for run in runs
    )
    if output is None and len(runs) == 1 and runs[0].name:
        output = runs[0].with_suffix(".html")
    elif output is None:
        common = os.path.commonpath([run.absolute().parent for run in runs])
        output = Path(os.path.relpath(common)) / "report.html"
    own = output.is_file() and _GENERATOR in output.read_bytes()[:200]
    cli_options.check_output(output, force or own, begins=rb"\s*<")
    # This import takes a second.
    from recd_plugin_runs.report import page, read_runs

    found = read_runs(runs)

    file_utils.write_text(output, page(found))
    click.echo(f"{output}: {', '.join(run.name for run in found)}")


class RunPage(RunReport):
    """The option ``--html`` of ``recd run``: writes an HTML page about the run."""

    flag = "--html"
    help = "Write an HTML page about the run to this file, as recd report does."

    def write(self, path: Path, report: Mapping[str, Any]) -> None:
        """Write the HTML page of ``report`` to ``path``, as ``recd report`` does."""
        from recd_plugin_runs.report import page, runs_of

        file_utils.write_text(path, page(runs_of(report)))
