"""Evaluates a trained model on the test split."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from rich.table import Table

from recd_plugin_runs.notes import UnknownIds
from recd_plugin_runs.slices import columns_of, measure_slices
from recd_plugins.api import (
    Quality,
    RecdError,
    RunConfig,
    file_utils,
    lookup_kernels,
    model_tables,
    plugin_call,
    run_identity,
    run_results,
    table_weights,
    text_table,
    trained_models,
    transforms,
)


@dataclass(frozen=True)
class Evaluated:
    """Metrics of a checkpoint on the test split."""

    checkpoint: str
    step: int
    test: Quality
    metrics: Mapping[str, float]
    #: Metrics per value of each column of option ``--by``.
    by: Mapping[str, list[dict[str, Any]]]
    baselines: Mapping[str, Quality] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return the metrics as JSON values."""
        return {
            "checkpoint": self.checkpoint,
            "step": self.step,
            "test": {**self.test.figures(), **self.metrics},
            "baselines": {name: each.figures() for name, each in self.baselines.items()},
            "by": dict(self.by),
        }

    def baseline_advice(self) -> str | None:
        """Return advice if the logistic regression has a lower log loss than the model."""
        logistic = self.baselines.get("logistic_regression")
        if logistic is None:
            return None
        losses = {
            name: value for name, value in logistic.figures().items() if name.endswith("log_loss")
        }
        test = self.test.figures()
        if not any(value < test[name] for name, value in losses.items()):
            return None
        return (
            "The logistic regression has a lower log loss than the model. Compare runs with other "
            "settings, for example training.learning_rate, training.epochs or model.embedding_dim."
        )

    def tables(self, title: str) -> Iterator[Table]:
        """Yield rich tables: of the model and the baselines, and per column of ``by`` and label."""
        report = self.as_json()
        columns = {"model": report["test"], **report["baselines"]}
        cells = [
            [_heading(name), *(_figure(each.get(name, "")) for each in columns.values())]
            for name in sorted(
                report["test"], key=lambda n: 1 - (n == "num_samples") + n.endswith(".num_samples")
            )
        ]
        yield text_table(title, [""], [_heading(name) for name in columns], cells)
        for column, found in self.by.items():
            _, *names = found[0]
            for label in dict.fromkeys(name.rpartition(".")[0] for name in names):
                of = [name for name in names if name.rpartition(".")[0] == label]
                cells = [[each["value"], *(_figure(each[name]) for name in of)] for each in found]
                headings = [_heading(name.removeprefix(f"{label}.")) for name in of]
                yield text_table(label, [column], headings, cells)


def _heading(name: str) -> str:
    return "rows" if name == "num_samples" else run_results.figure_words(name)


def _figure(value: float | str) -> str:
    if isinstance(value, int | str):
        return value if isinstance(value, str) else f"{value:,}"
    return run_results.figure_text(value, "loss")


@dataclass(frozen=True)
class EvaluateJob(trained_models.TrainedJob):
    """Job description of ``recd evaluate``; ``by`` has the columns of option ``--by``."""

    by: tuple[str, ...] = ()

    def prepare(self) -> None:
        """Prepare missing data, and check the columns of ``by``."""
        super().prepare()
        for name in self.by:
            columns_of(self.load().dataset, name)


def evaluate(rank: int, world_size: int, job: EvaluateJob) -> Evaluated:
    """Evaluate the checkpoint of ``job`` on the test split. Collective: call on all ranks."""
    trained = trained_models.load_trained(job)
    separate = getattr(trained.registry.dataset.options, "test_path", None) is not None
    if rank == 0 and not trained.same_data and not separate:
        trained_models.say_other_data(job.checkpoint)
    registry = trained.parts.prepared.registry
    unknown = UnknownIds(registry)
    quality, metrics = trained.evaluate(rank, world_size)
    unknown.say()
    by = measure_slices(trained, job.by, rank, world_size) if job.by else {}
    lookup_kernels.close_kernels(trained.parts.dmp)
    if quality is None:
        raise RecdError(
            f"{job.registry}: the test split has no rows. Check the options of the test split in "
            "dataset.options."
        )
    return Evaluated(str(job.checkpoint), trained.step, quality, metrics, by)


_ROWS_AT_ONCE = 65_536


def write_embeddings(registry: RunConfig, checkpoint: Path, table: str, output: Path) -> int:
    """Write the rows of a table that have an id to a Parquet file, and return their number.

    The file has columns ``id``, ``vector`` and, if original ids or texts are known, ``value``.
    """
    try:
        weights = table_weights(checkpoint, table).numpy()
    except RecdError:
        if table not in registry.dataset.schema().sparse:
            raise
        table = model_tables.table_name(table)  # the name of a feature was given
        weights = table_weights(checkpoint, table).numpy()
    ids = trained_models.ids_of_rows(registry, checkpoint, table)
    found = np.arange(len(weights)) if ids is None else ids.numpy()
    rows = np.flatnonzero(found >= 0)
    raw = None if ids is None else found[rows]
    values = _values(registry, checkpoint, table, len(weights), raw)
    fields = [("id", pa.int64()), *([] if values is None else [("value", values.type)])]
    schema = pa.schema([*fields, ("vector", pa.list_(pa.float32(), weights.shape[1]))])
    with file_utils.new_file(output) as temporary, pq.ParquetWriter(temporary, schema) as writer:
        for start in range(0, len(rows), _ROWS_AT_ONCE):
            some = rows[start : start + _ROWS_AT_ONCE]
            flat = pa.array(np.ascontiguousarray(weights[some], np.float32).reshape(-1))
            columns = [pa.array(found[some])]
            if values is not None:
                columns.append(values.slice(start, len(some)))
            columns.append(pa.FixedSizeListArray.from_arrays(flat, weights.shape[1]))
            writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))
    return len(rows)


def _values(
    registry: RunConfig,
    checkpoint: Path,
    table: str,
    num_rows: int,
    ids: NDArray[np.int64] | None,
) -> pa.Array | None:
    """Return the original id of each table row, or the texts of raw ``ids``. None if unknown."""
    run_identity.load_fitted(registry, checkpoint)
    run_identity.check_same_preprocessing(checkpoint, registry)
    schema = registry.dataset.schema()
    features = [name for name in schema.sparse if model_tables.table_name(name) == table]
    steps = transforms.fitted_steps(registry, schema)
    last = {id(chain[-1]): chain[-1] for name in features if (chain := steps.get(name))}
    if ids is not None and not last:
        texts = _texts(registry, features)
        return pa.array([texts.get(each) for each in ids.tolist()]) if texts else None
    if ids is not None or len(last) != 1:
        return None
    (step,) = last.values()
    with plugin_call(step, "original_values"):
        values: Sequence[Any] | None = step.original_values()
    if values is None:
        return None
    texts = _texts(registry, features)
    found = pa.array([texts.get(each) for each in values] if texts else values)
    # Rows without a known value.
    return pa.concat_arrays([found, pa.nulls(max(0, num_rows - len(found)), found.type)])


def _texts(registry: RunConfig, features: Sequence[str]) -> dict[int, str]:
    """Return a dict from id to original text, where the dataset knows it."""
    return {id: text for each in features for id, text in registry.dataset.texts(each).items()}
