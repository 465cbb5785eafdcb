"""The feeder process of a rank, which runs Ray Data, and the readers in Ray tasks."""

from __future__ import annotations

import logging
import os
import pickle
import time
import traceback
import uuid
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing, suppress
from functools import lru_cache
from multiprocessing.connection import Connection
from queue import Queue
from threading import Thread
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import ray
import ray.data
from ray.data import DataContext, ExecutionOptions, ExecutionResources

# Ray Data has no public API to limit the tasks of a running Dataset. Ray 2.60.
from ray.data._internal.execution.backpressure_policy import (
    ENABLED_BACKPRESSURE_POLICIES,
    ENABLED_BACKPRESSURE_POLICIES_CONFIG_KEY,
)
from ray.data._internal.execution.backpressure_policy.backpressure_policy import (
    BackpressurePolicy,
)
from ray.data._internal.execution.operators.map_operator import MapOperator
from ray.exceptions import (
    OutOfMemoryError,
    RayError,
    RayTaskError,
    UserCodeException,
    WorkerCrashedError,
)

# A key-value store of the cluster; there is no public one.
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_put

from recd_plugin_dsi.helper import Sender, serve
from recd_plugins.api import RecdError, feeds, imports, ipc, processes

if TYPE_CHECKING:
    from ray.data._internal.execution.interfaces import PhysicalOperator


class AtMost(BackpressurePolicy):
    """Backpressure policy of Ray Data that limits the number of running tasks to ``tasks``."""

    tasks = 1

    def can_add_input(self, op: PhysicalOperator) -> bool:
        return not isinstance(op, MapOperator) or op.num_active_tasks() < AtMost.tasks


def main() -> None:
    """Send blocks to the trainer that started this process, until it closes the connection."""
    connection = serve()
    with suppress(EOFError, OSError):
        _, start = connection.recv()
        _Feeder(connection, **start).serve()
    # A regular exit would wait for Ray's threads.
    os._exit(0)


class _Feeder:
    """Reads blocks with Ray Data and sends them to the trainer. ``RayFeed`` lists the messages."""

    def __init__(
        self,
        connection: Connection,
        address: str,
        task: bytes,
        cpus_per_reader: float,
        memory: int,
        deaths: int,
    ) -> None:
        self._connection = connection
        self._task, self._cpus_per_reader = task, cpus_per_reader
        self._memory, self._deaths = memory, deaths
        self._sender = Sender(connection)
        self._asked: Queue[dict[str, Any]] = Queue()
        self._position: dict[str, Any] = {}
        self._wanted = 0  # readers
        # Before Ray starts: joining a lost cluster would take longer than the trainer waits.
        Thread(target=self._listen, daemon=True).start()
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except Exception as error:
            self._sender.send("failed", message=f"{type(error).__name__}: {error}")
            raise EOFError from None
        context = DataContext.get_current()
        context.enable_progress_bars = False
        context.print_on_execution_start = False
        policies = [*ENABLED_BACKPRESSURE_POLICIES, AtMost]
        context.set_config(ENABLED_BACKPRESSURE_POLICIES_CONFIG_KEY, policies)
        self._sender.send("ready", cpus=_cpus())

    def serve(self) -> None:
        while True:
            self._stream(**self._asked.get())

    def _listen(self) -> None:
        try:
            while True:
                kind, fields = self._connection.recv()
                if kind == "read":
                    self._asked.put(fields)
                elif kind == "taken":
                    self._sender.taken()
                else:
                    self._scale(**fields)
        except (EOFError, OSError):
            os._exit(0)

    def _scale(self, readers: int) -> None:
        """Change the number of readers, as far as the cluster has CPUs."""
        cpus = _cpus()
        # CPUs are briefly free between two tasks: never exceed their total number.
        most = min(AtMost.tasks + self._room(_cpus(free=True)), self._room(cpus))
        self._wanted = min(readers, max(AtMost.tasks, most))
        if self._wanted > AtMost.tasks:
            Thread(target=self._add, args=(self._wanted, readers, cpus), daemon=True).start()
        else:
            AtMost.tasks = self._wanted
            self._sender.send("scaled", readers=self._wanted, asked=readers, cpus=cpus)

    def _add(self, wanted: int, asked: int, cpus: float) -> None:
        """Start new reader processes, and use them after they have read one block.

        Blocks are sent in order, so a reader that is still starting would delay all blocks. Ray
        starts new processes for these tasks, because the existing readers are busy.
        """
        warm: Any = ray.remote(num_cpus=self._cpus_per_reader, max_retries=0)(warm_up)
        new = [warm.remote(self._task, self._position) for _ in range(wanted - AtMost.tasks)]
        with suppress(RayError):  # errors are reported when blocks are made
            ray.get(new)
        if wanted == self._wanted:
            AtMost.tasks = wanted
            self._sender.send("scaled", readers=wanted, asked=asked, cpus=cpus)

    def _room(self, cpus: float) -> int:
        return int(cpus / self._cpus_per_reader + 1e-6)

    def _stream(self, position: dict[str, Any], num_blocks: int | None, readers: int) -> None:
        """Send blocks to the trainer in order, from ``position`` to the end of the epoch."""
        self._position, self._wanted = position, readers
        if num_blocks is None:
            AtMost.tasks = 1
            rows = self._strides(position, readers)
        else:
            AtMost.tasks = readers
            # The last block is followed by one with the position at the end of the epoch.
            rows = self._rows(position, range(num_blocks + 1), None, self._memory)
        try:
            with closing(rows):
                for row in rows:
                    data = memoryview(row.column("data").chunk(0)[0].as_buffer())
                    fields = row.drop_columns("data").to_pylist()[0]
                    self._sender.send_block(data, **fields)
                    if fields["last"]:
                        break
        except (WorkerCrashedError, OutOfMemoryError) as error:
            self._sender.send("died", message=str(error))
        except Exception as error:
            # Errors of a reader also arrive as errors of Ray.
            if isinstance(error, RayError) and not isinstance(
                error, RayTaskError | UserCodeException
            ):
                self._sender.send("lost", message=f"{type(error).__name__}: {error}")
            else:
                self._sender.send("raised", message="".join(traceback.format_exception(error)))
        self._sender.send("done")

    def _strides(self, position: dict[str, Any], readers: int) -> Generator[pa.Table, None, None]:
        """Yield blocks of a dataset that cannot skip rows.

        Each reader reads all rows, but encodes only every ``readers``-th block.
        """
        memory = self._memory // readers
        streams = [
            self._rows(position, range(number, number + 1), readers, memory)
            for number in range(readers)
        ]
        while True:
            for stream in streams:
                yield next(stream)

    def _rows(
        self, position: dict[str, Any], numbers: range, stride: int | None, memory: int
    ) -> Generator[pa.Table, None, None]:
        function: Any = make_blocks  # Ray's annotation lacks the arguments
        items = [{"number": number} for number in numbers]
        dataset = ray.data.from_items(items, override_num_blocks=len(items)).map_batches(
            function,
            batch_size=1,
            batch_format="pyarrow",
            fn_kwargs={
                "task": self._task,
                "position": position,
                "stride": stride,
                "stream": uuid.uuid4().hex,
            },
            num_cpus=self._cpus_per_reader,
            max_retries=self._deaths,
        )
        options = ExecutionOptions()
        options.preserve_order = True
        options.resource_limits = ExecutionResources.for_limits(object_store_memory=memory)
        dataset.context.execution_options = options
        if stride is not None:
            # Yield each block at once, so that it is not held back for later ones.
            dataset.context.target_max_block_size = 1
        batches = dataset.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0)
        tables: Iterator[Any] = iter(batches)
        for table in tables:
            for row in range(table.num_rows):
                yield table.slice(row, 1)


def _cpus(free: bool = False) -> float:
    resources: Any = ray.available_resources if free else ray.cluster_resources  # untyped
    return float(resources().get("CPU", 0.0))


def make_blocks(
    numbers: pa.Table, task: bytes, position: dict[str, Any], stride: int | None, stream: str
) -> Iterator[pa.Table]:
    """Read blocks in a Ray task, given their numbers.

    Yields one table per block, with one row: the encoded block in the column ``data``, and metadata
    of the block in the other columns.
    """
    for number in numbers["number"].to_pylist():
        begun = f"recd/{stream}/{number}".encode()
        again = bool(_internal_kv_put(begun, b"", overwrite=False))
        for block in _blocks(number, task, position, stride):
            yield _row(block, again)
            again = False
        _internal_kv_del(begun)


def warm_up(task: bytes, position: dict[str, Any]) -> None:
    """Make this Ray process a reader: open the dataset, read one block and discard it."""
    with suppress(RecdError):
        _open(task).block(position, 0)


def _blocks(
    number: int, task: bytes, position: dict[str, Any], stride: int | None
) -> Iterable[feeds.BatchBlock]:
    try:
        reader = _open(task)
    except Exception as error:
        return [feeds.BatchBlock(number, [], processes.portable(error))]
    if stride is None:
        return [reader.block(position, number)]
    return reader.blocks(position, number, stride)


# Ray reuses its processes for later tasks and epochs.
@lru_cache(maxsize=1)
def _open(task: bytes) -> feeds.TaskReader:
    imports.silence_upstream()
    reader: feeds.TaskReader = pickle.loads(task).open()
    return reader


def _row(block: feeds.BatchBlock, again: bool) -> pa.Table:
    start = time.perf_counter()
    data = ipc.encode(block)
    row: dict[str, Any] = {
        "last": block.end is not None,
        "process": os.getpid(),
        "again": again,
        "packing": time.perf_counter() - start,
    }
    columns = {name: pa.array([value]) for name, value in row.items()}
    offsets = pa.array([0, data.nbytes], pa.int64()).buffers()[1]
    columns["data"] = pa.Array.from_buffers(
        pa.large_binary(), 1, [None, offsets, pa.py_buffer(data)]
    )
    return pa.table(columns)


if __name__ == "__main__":
    # Ray pickles functions of ``__main__`` by value.
    from recd_plugin_dsi import feeder

    feeder.main()
