"""The process that runs Ray Data for one rank, and passes on the blocks that its readers make."""

from __future__ import annotations

import logging
import os
import traceback
import uuid
from collections.abc import Generator, Iterator
from contextlib import closing, suppress
from multiprocessing.connection import Connection
from queue import Queue
from threading import Event, Thread
from typing import Any

import pyarrow as pa
import ray
import ray.data
from ray.data import DataContext, ExecutionOptions, ExecutionResources
from ray.exceptions import (
    OutOfMemoryError,
    RayError,
    RayTaskError,
    UserCodeException,
    WorkerCrashedError,
)

from recd_plugin_dsi.helper import Sender, serve
from recd_plugin_dsi.limit import install, limit, set_limit
from recd_plugin_dsi.readers import make_blocks, warm_up


def main() -> None:
    """Serve a trainer until its connection ends."""
    connection = serve()
    with suppress(EOFError, OSError):
        (_, start), (_, opened) = connection.recv(), connection.recv()
        _Feeder(connection, **start, opened=opened).serve()
    # Not by the interpreter's end, which would wait for Ray's threads: Ray notices.
    os._exit(0)


class _Feeder:
    """See ``feed.py`` for the messages.

    Args:
        connection: to the trainer.
        address: of the cluster.
        opened: for its first feed, as ``_open`` takes it.
    """

    # Of the feed that is open: a pickled ``ReadTask``, and options.
    _task: bytes
    _cpus_per_reader: float
    _memory: int
    _deaths: int

    def __init__(self, connection: Connection, address: str, opened: dict[str, Any]) -> None:
        self._connection = connection
        self._sender = Sender(connection)
        self._asked: Queue[dict[str, Any]] = Queue()
        self._position: dict[str, Any] = {}
        # The newest number of readers that was asked for.
        self._wanted = 0
        self._stopped = Event()
        # Before Ray is there: joining one that has gone would outlast the trainer.
        Thread(target=self._listen, daemon=True).start()
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except Exception as error:
            self._sender.send("failed", message=f"{type(error).__name__}: {error}")
            raise EOFError from None
        context = DataContext.get_current()
        context.enable_progress_bars = False
        context.print_on_execution_start = False
        install(context)
        self._open(**opened)

    def serve(self) -> None:
        while True:
            self._stream(**self._asked.get())

    def _listen(self) -> None:
        try:
            while True:
                kind, fields = self._connection.recv()
                if kind == "read":
                    self._stopped.clear()
                    self._asked.put(fields)
                elif kind == "stop":
                    self._stopped.set()
                elif kind == "taken":
                    self._sender.taken()
                elif kind == "open":
                    self._open(**fields)
                else:
                    self._scale(**fields)
        except (EOFError, OSError):
            os._exit(0)

    def _open(self, task: bytes, cpus_per_reader: float, memory: int, deaths: int) -> None:
        """Read for a feed, from now on."""
        self._task, self._cpus_per_reader = task, cpus_per_reader
        self._memory, self._deaths = memory, deaths
        self._wanted = 0  # readers that the feed before was still to get are none of this one's
        self._sender.send("ready", cpus=_cpus())

    def _scale(self, readers: int) -> None:
        """As many readers as asked for, or as there is room for in the cluster."""
        cpus = _cpus()
        # CPUs are free for a moment between two tasks, too: never more than there are.
        most = min(limit() + self._room(_cpus(free=True)), self._room(cpus))
        self._wanted = min(readers, max(limit(), most))
        if self._wanted > limit():
            Thread(target=self._add, args=(self._wanted, readers, cpus), daemon=True).start()
        else:
            set_limit(self._wanted)
            self._sender.send("scaled", readers=limit(), asked=readers, cpus=cpus)

    def _add(self, wanted: int, asked: int, cpus: float) -> None:
        """More readers, once they are ready: in order, all would wait for the first block of one.

        Those that wait too long for their trainer are busy, so the tasks start new processes.
        """
        warm: Any = ray.remote(num_cpus=self._cpus_per_reader, max_retries=0)(warm_up)
        new = [warm.remote(self._task, self._position) for _ in range(wanted - limit())]
        with suppress(RayError):  # what is wrong shows where blocks are made
            ray.get(new)
        if wanted == self._wanted:
            set_limit(wanted)
            self._sender.send("scaled", readers=wanted, asked=asked, cpus=cpus)

    def _room(self, cpus: float) -> int:
        return int(cpus / self._cpus_per_reader + 1e-6)

    def _stream(self, position: dict[str, Any], num_blocks: int | None, readers: int) -> None:
        """Send the blocks from a position on, in their order, up to the last, or until stopped."""
        self._position, self._wanted = position, readers
        if num_blocks is None:
            set_limit(1)
            rows = self._strides(position, readers)
        else:
            set_limit(readers)
            # Behind the last block is one with the position at the end of the epoch.
            rows = self._rows(position, range(num_blocks + 1), None, self._memory)
        try:
            with closing(rows):
                for row in rows:
                    if self._stopped.is_set():
                        break
                    data = memoryview(row.column("data").chunk(0)[0].as_buffer())
                    fields = row.drop_columns("data").to_pylist()[0]
                    self._sender.send_block(data, **fields)
                    if fields["last"]:
                        break
        except (WorkerCrashedError, OutOfMemoryError) as error:
            self._sender.send("died", message=str(error))
        except RayError as error:
            # What a reader raised is one of these too, and anything else of Ray itself.
            if isinstance(error, RayTaskError | UserCodeException):
                self._sender.send("raised", message="".join(traceback.format_exception(error)))
            else:
                self._sender.send("lost", message=f"{type(error).__name__}: {error}")
        except Exception as error:
            self._sender.send("raised", message="".join(traceback.format_exception(error)))
        self._sender.send("done")

    def _strides(self, position: dict[str, Any], readers: int) -> Generator[pa.Table, None, None]:
        """Of a dataset that cannot pass over rows: each reader reads all, and makes its share."""
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
        function: Any = make_blocks  # Ray's type knows no arguments
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
            # A reader goes on after a block: each is passed on when it is made, not with others.
            dataset.context.target_max_block_size = 1
        batches = dataset.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0)
        tables: Iterator[Any] = iter(batches)
        for table in tables:
            for row in range(table.num_rows):
                yield table.slice(row, 1)


def _cpus(free: bool = False) -> float:
    """Of the cluster."""
    resources: Any = ray.available_resources if free else ray.cluster_resources  # untyped
    return float(resources().get("CPU", 0.0))


if __name__ == "__main__":
    main()
