"""Scores every row of a table with a trained model and writes the scores in row order."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import torch
import torch.distributed as dist

from recd_plugin_runs.kept_columns import KeptColumns
from recd_plugin_runs.notes import UnknownIds, say_absent
from recd_plugin_runs.score_columns import ROW, SCORE, score_names
from recd_plugins.api import (
    DataError,
    Dataset,
    ModelInput,
    Rows,
    RunConfig,
    Split,
    doing,
    file_utils,
    lookup_kernels,
    plugin_call,
    plugin_items,
    progress_bars,
    rank_agreement,
    row_pipelines,
    row_tables,
    tasks,
    trained_models,
)


class _JsonLines:
    """Writer of JSON lines with the interface of pyarrow's writers."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8")

    def write_batch(self, batch: pa.RecordBatch) -> None:
        for row in batch.to_pylist():
            # Write dates, times and decimals as text.
            text = json.dumps(
                file_utils.finite(row), default=str, ensure_ascii=False, allow_nan=False
            )
            self._file.write(text + "\n")

    def close(self) -> None:
        self._file.close()


@contextmanager
def score_file(
    path: Path, kind: str, schema: pa.Schema, *, token: str = "", replaces: bool = True
) -> Iterator[Any]:
    """Open a writer of score file ``path``. The file appears only when it is complete."""
    with file_utils.new_file(path, token=token, replaces=replaces) as temporary:
        writer: Any
        if kind == "jsonl":
            writer = _JsonLines(temporary)
        elif kind == "csv":
            writer = pyarrow.csv.CSVWriter(temporary, schema)
        else:
            writer = pq.ParquetWriter(temporary, schema)
        try:
            yield writer
        finally:
            writer.close()


@dataclass(frozen=True)
class PredictJob(trained_models.TrainedJob):
    """Job description of ``recd predict`` that is pickled and sent to each rank.

    ``batch_size`` is the number of rows per rank and batch; None means training.batch_size.
    """

    table: str = ""
    output: Path = Path()
    kind: str = "parquet"
    keep: tuple[str, ...] = ()
    batch_size: int | None = None
    token: str = ""
    replaces: bool = False

    def load(self) -> RunConfig:
        """Load the registry. Its dataset is ``AbsentData`` if the training data is missing."""
        return trained_models.with_trained_columns(super().load(), self.checkpoint)

    def prepare(self) -> None:
        """Prepare the dataset of the table to score, for example import the table."""
        registry = self.load()
        say_absent(registry, self.checkpoint)
        registry.dataset.to_score(self.table).prepare()

    def planned_by(self, registry: RunConfig) -> RunConfig:
        """Return the run config to plan with. Missing training data is replaced by the table."""
        if not isinstance(registry.dataset, trained_models.AbsentData):
            return registry
        dataset, size = registry.dataset.to_score(self.table), registry.training.batch_size
        rows = 0
        for each in scanned(dataset):
            rows += len(each)
            if rows >= size:
                break
        if not rows:
            raise DataError(f"{self.table}: the table has no rows. Use a table with rows.")
        planned = replace(registry, dataset=dataset)
        return planned.with_training({"batch_size": min(size, rows)})


@dataclass(frozen=True)
class Predicted:
    """Number of scored rows, and the seconds spent on reading, scoring and writing.

    ``has_keys`` is True if the score file has columns of the table.
    """

    rows: int
    seconds: float
    has_keys: bool


def predict(rank: int, world_size: int, job: PredictJob) -> Predicted:
    """Score each row of a table and write the score file. Collective: call on all ranks."""
    trained = trained_models.load_trained(job)
    prepared = trained.parts.prepared
    registry = trained.registry
    dataset = registry.dataset.to_score(job.table)
    rank_agreement.check_agreement("looking at the table", {"its rows": dataset.identity()})
    size = job.batch_size or registry.training.batch_size
    kept = None
    if rank == 0 and job.keep:
        kept = KeptColumns(job.table, job.keep, size * world_size, dataset.storage())
    # The training split may have fewer rows than one batch of this size.
    scored = replace(registry, dataset=dataset, wrappers=()).with_training({"batch_size": size})
    pipeline = row_pipelines.RowPipeline.of_model(scored, prepared)
    of = dataset.schema().tasks
    unknown = UnknownIds(registry)
    keys = dataset.keys()
    dealt = turns(scanned(dataset), tuple(keys), rank, world_size, size)
    start, rows = time.perf_counter(), 0
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(doing("scoring", long=True))
        if rank == 0:
            advance = stack.enter_context(progress_bars.row_progress(f"scoring {job.table}", None))
            output = stack.enter_context(_Output(job, keys, kept, score_names(of)))
        for turn, logits in score_turns(trained, pipeline, dealt, world_size):
            rows += sum(turn.counts)
            if rank == 0:
                with doing("writing scores"):  # each turn shows that the ranks make progress
                    output.write(turn.keys, tasks.predictions(of, logits).numpy())
                advance(sum(turn.counts))
    unknown.say()
    lookup_kernels.close_kernels(trained.parts.dmp)
    return Predicted(rows, time.perf_counter() - start, bool(keys or job.keep))


def score_turns(
    trained: trained_models.Trained,
    pipeline: row_pipelines.RowPipeline,
    dealt: Iterator[Turn],
    world_size: int,
) -> Iterator[tuple[Turn, torch.Tensor]]:
    """Yield each ``Turn`` with the logits of its rows, float64 ``[N]`` or ``[N, T]``.

    Collective: call on all ranks.
    """
    waiting: deque[Turn] = deque()

    def inputs() -> Iterator[ModelInput]:
        for turn in dealt:
            waiting.append(turn)
            (batch,) = pipeline.read([turn.rows])
            yield batch

    for logits in trained.logits(inputs()):
        turn = waiting.popleft()
        of_ranks = [torch.empty_like(logits) for _ in range(world_size)]
        dist.all_gather(of_ranks, logits.contiguous())
        counted = [each[:count] for each, count in zip(of_ranks, turn.counts, strict=True)]
        yield turn, torch.cat(counted).cpu().double()


class _Output:
    """Writes the score file. The first batch of key columns determines the columns of the file."""

    def __init__(
        self,
        job: PredictJob,
        keys: Mapping[str, str],
        kept: KeptColumns | None,
        score_names: Sequence[str] = (SCORE,),
    ) -> None:
        self._score_names = score_names
        self._job = job
        self._stack = ExitStack()
        self._writer: Any = None
        self._row = 0
        self._names = keys
        self._kept = kept

    def __enter__(self) -> _Output:
        self._stack.__enter__()
        return self

    def write(self, keys: Sequence[pa.RecordBatch], scores: np.ndarray) -> None:
        """Append key columns and scores of some rows to the file."""
        columns: dict[str, pa.Array] = {}
        for column, name in self._names.items():
            columns[name] = _joined([batch.column(column) for batch in keys])
        rows = pa.array(np.arange(self._row, self._row + len(scores)))
        rows = columns.get(ROW, rows)  # the dataset's own number if it makes several rows of one
        if self._kept is not None:
            columns |= self._kept.take(rows.to_numpy(zero_copy_only=False))
        columns.setdefault(ROW, rows)
        of_tasks = scores.reshape(len(scores), len(self._score_names)).T
        columns |= {n: pa.array(each) for n, each in zip(self._score_names, of_tasks, strict=True)}
        self._row += len(scores)
        batch = pa.RecordBatch.from_pydict(columns)
        if self._writer is None:
            job = self._job
            file = score_file(
                job.output, job.kind, batch.schema, token=job.token, replaces=job.replaces
            )
            self._writer = self._stack.enter_context(file)
        self._writer.write_batch(batch)

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            if self._writer is None:  # the table has no rows
                self.write([], np.zeros((0, len(self._score_names))))
            if self._kept is not None:
                self._kept.check_end()
        self._stack.__exit__(*error)  # type: ignore[arg-type]


def _joined(arrays: Sequence[pa.Array]) -> pa.Array:
    if not arrays:
        return pa.nulls(0)
    plain = [
        each.dictionary_decode() if pa.types.is_dictionary(each.type) else each for each in arrays
    ]
    return pa.concat_arrays(plain)


@dataclass(frozen=True)
class Turn:
    """Batches that the ranks score at the same time, one batch per rank.

    Attributes:
        rows: the batch of this rank, padded by repeating a row.
        counts: number of rows without padding in the batch of each rank.
        keys: key columns of the batch of each rank; empty except on rank 0.
    """

    rows: Rows
    counts: tuple[int, ...]
    keys: tuple[pa.RecordBatch, ...]


def turns(
    scanned: Iterable[Rows], keys: tuple[str, ...], rank: int, world_size: int, batch_size: int
) -> Iterator[Turn]:
    """Distribute the batches of a scan to ranks, round-robin. Every rank reads all batches."""
    batches = row_tables.rebatch(scanned, batch_size, rest=True)
    while dealt := list(islice(batches, world_size)):
        counts = tuple(len(each) for each in dealt) + (0,) * (world_size - len(dealt))
        mine = dealt[rank] if rank < len(dealt) else row_tables.slice_rows(dealt[-1], 0, 1)
        last = row_tables.slice_rows(mine, len(mine) - 1, 1)
        yield Turn(
            row_tables.concat_rows([mine, *[last] * (batch_size - len(mine))]),
            counts,
            tuple(each.data.select(list(keys)) for each in dealt) if rank == 0 else (),
        )


def scanned(dataset: Dataset, split: Split = "train") -> Iterator[Rows]:
    """Yield all rows of a split for scoring, in stored order."""
    with plugin_call(dataset, "scan"):
        rows = dataset.scan(split)
    return plugin_items(dataset, "scan", rows)
