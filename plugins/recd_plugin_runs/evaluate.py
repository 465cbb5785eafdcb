"""Evaluates a trained model on the test split."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch.distributed as dist

from recd_plugins.api import (
    MOST_UNKNOWN,
    Preprocessing,
    Quality,
    RecdError,
    RunConfig,
    file_utils,
    lookup_kernels,
    model_tables,
    plugin_call,
    rank_agreement,
    run_identity,
    table_weights,
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

    def as_json(self) -> dict[str, Any]:
        """Return the metrics as JSON values."""
        return {
            "checkpoint": self.checkpoint,
            "step": self.step,
            "test": {**self.test.figures(), **self.metrics},
        }


def evaluate(rank: int, world_size: int, job: trained_models.TrainedJob) -> Evaluated:
    """Evaluate the checkpoint of ``job`` on the test split. Collective: call on all ranks."""
    trained = trained_models.load_trained(job)
    if rank == 0 and not trained.same_data:
        trained_models.say_other_data(job.checkpoint)
    registry = trained.parts.prepared.registry
    unknown = UnknownIds(registry)
    quality, metrics = trained.evaluate(rank, world_size)
    unknown.say()
    lookup_kernels.close_kernels(trained.parts.dmp)
    if quality is None:
        raise RecdError(
            f"{job.registry}: the test split has no rows. Check its options in dataset.options."
        )
    return Evaluated(str(job.checkpoint), trained.step, quality, metrics)


_ROWS_AT_ONCE = 65_536


def write_embeddings(registry: RunConfig, checkpoint: Path, table: str, output: Path) -> int:
    """Write the rows of an embedding table to a Parquet file, and return their number.

    The file has columns ``id``, ``vector`` and, if a vocabulary is known, ``value``.
    """
    weights = table_weights(checkpoint, table).numpy()
    values = _values(registry, checkpoint, table, len(weights))
    fields = [("id", pa.int64()), *([] if values is None else [("value", values.type)])]
    schema = pa.schema([*fields, ("vector", pa.list_(pa.float32(), weights.shape[1]))])
    with file_utils.new_file(output) as temporary, pq.ParquetWriter(temporary, schema) as writer:
        for start in range(0, len(weights), _ROWS_AT_ONCE):
            some = weights[start : start + _ROWS_AT_ONCE]
            flat = pa.array(np.ascontiguousarray(some, np.float32).reshape(-1))
            columns = [pa.array(np.arange(start, start + len(some)))]
            if values is not None:
                columns.append(values.slice(start, len(some)))
            columns.append(pa.FixedSizeListArray.from_arrays(flat, weights.shape[1]))
            writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))
    return len(weights)


def _values(registry: RunConfig, checkpoint: Path, table: str, num_rows: int) -> pa.Array | None:
    """Return the original id of each table row. None unless one vocabulary maps all its ids."""
    run_identity.load_fitted(registry, checkpoint)
    run_identity.check_same_preprocessing(checkpoint, registry)
    schema = registry.dataset.schema()
    features = [name for name in schema.sparse if model_tables.table_name(name) == table]
    steps = transforms.fitted_steps(registry, schema)
    last = {id(chain[-1]): chain[-1] for name in features if (chain := steps.get(name))}
    if len(last) != 1:
        return None
    (step,) = last.values()
    with plugin_call(step, "original_values"):
        values: Sequence[Any] | None = step.original_values()
    if values is None:
        return None
    texts: dict[int, str] = {}
    for feature in features:
        texts.update(registry.dataset.texts(feature))
    found = pa.array([texts.get(each) for each in values] if texts else values)
    # Rows without a known value.
    return pa.concat_arrays([found, pa.nulls(max(0, num_rows - len(found)), found.type)])


def say_absent(registry: RunConfig, checkpoint: Path) -> None:
    """Print a note if the training data is missing, with the reason."""
    if isinstance(registry.dataset, trained_models.AbsentData):
        click.echo(
            f"The training data cannot be read ({registry.dataset.error}). The command uses the "
            f"columns stored in {checkpoint}.",
            err=True,
        )


class UnknownIds:
    """Counts out-of-vocabulary ids per feature, from the creation of this object on.

    Ids that worker processes (``training.workers``) preprocess are not counted.
    """

    def __init__(self, registry: RunConfig) -> None:
        self._counted: dict[int, tuple[list[str], set[int]]] = {}
        schema = registry.dataset.schema()
        for feature, steps in transforms.fitted_steps(registry, schema).items():
            for step in steps if feature in schema.sparse else ():  # numbers have no ids
                if type(step).fit is Preprocessing.fit:
                    continue
                if step.unknown_ids is None:  # features with the same vocabulary share the set
                    step.unknown_ids = set()
                names, _ = self._counted.setdefault(id(step.unknown_ids), ([], step.unknown_ids))
                names.append(feature)

    def say(self) -> None:
        """Sum the counts over all ranks and print them on rank 0. Collective: call on all ranks."""
        ranks = rank_agreement.together(lambda: [ids for _, ids in self._counted.values()])
        counts = [len(set[int]().union(*of_ranks)) for of_ranks in zip(*ranks, strict=True)]
        told = [
            f"{' and '.join(names)} {min(count, MOST_UNKNOWN):,}"
            + " or more" * (count >= MOST_UNKNOWN)
            for (names, _), count in zip(self._counted.values(), counts, strict=True)
            if count
        ]
        if told and dist.get_rank() == 0:
            click.echo(
                "Number of out-of-vocabulary ids per feature, scored as unknown ids: "
                f"{', '.join(told)}",
                err=True,
            )
