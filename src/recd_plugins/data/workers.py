"""Reader workers: processes that read, convert and preprocess for one rank.

torchdata's StatefulDataLoader runs them and brings what they make in the order of the batches. It
knows no position: that is the reader's alone, which each batch brings along.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from itertools import count

import torch
from torch.utils.data import IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from recd_plugins.activity import doing
from recd_plugins.data.handover import Packed, pack, unpack
from recd_plugins.data.read_task import hand_out
from recd_plugins.data.worker_processes import WorkerContext, WorkerDied
from recd_plugins.errors import RecdError, SetupError
from recd_plugins.interfaces import Feed, Reader
from recd_plugins.interfaces.read_task import BatchBlock, ReadTask, State
from recd_plugins.processes import portable
from recd_plugins.values.model_input import ModelInput


class Workers(Feed):
    """Processes that share the batches of one rank.

    Args:
        task: of the rank.
        num_workers: how many.
        pin_memory: pin batches, in a thread that takes them from the processes.
    """

    def __init__(self, task: ReadTask, num_workers: int, pin_memory: bool) -> None:
        self._task = task
        self._num_workers = num_workers
        self._pin_memory = pin_memory

    def read(self, reader: Reader) -> Iterator[ModelInput]:
        """The batches from the position of ``reader`` to the end of the epoch.

        ``reader`` is moved along, as if it had read them. When a worker dies, all are started anew
        at the first batch that was not handed out, and stderr says so.

        Raises:
            RecdError: what a worker raised.
            SetupError: workers died three times without a batch in between.
        """
        deaths = 0
        while True:
            try:
                with closing(self._blocks(reader.state_dict())) as blocks:
                    for model_input in hand_out(blocks, reader):
                        deaths = 0
                        yield model_input
                    return
            except WorkerDied as died:
                deaths += 1
                what = f"reader worker {died.worker} of rank {self._task.rank} {died.how}"
                if deaths == 3:
                    raise SetupError(
                        f"{what}, the third death without a batch in between{died.remedy}. With "
                        "training.workers: 0 the rank reads by itself"
                    ) from None
                print(f"{what}; new workers read on{died.remedy}", file=sys.stderr)

    def _blocks(self, position: State) -> Generator[BatchBlock, None, None]:
        """What the workers make of the batches from ``position`` on, in the order of the batches.

        Raises:
            WorkerDied: a worker did.
        """
        context = WorkerContext()
        loader = packed = None
        try:
            with _quiet():
                loader = StatefulDataLoader(
                    _Share(self._task, position),
                    batch_size=None,
                    num_workers=self._num_workers,
                    # Blocks that a worker is ahead.
                    prefetch_factor=1,
                    pin_memory=self._pin_memory,
                    multiprocessing_context=context,
                    # Positions are the reader's.
                    snapshot_every_n_steps=None,
                    # Seeds of workers come from it: what a model draws is alike with and without.
                    generator=torch.Generator(),
                )
                packed = iter(loader)
            for number in count():
                # Workers take turns with blocks.
                awaited = context.process(number % self._num_workers)
                with doing("reading data", processes=awaited):
                    block = next(packed, None)
                if block is None:
                    return
                start = time.perf_counter()
                unpacked: BatchBlock = unpack(block)
                yield unpacked.moved(block.seconds, time.perf_counter() - start)
        except (RuntimeError, OSError, EOFError) as error:
            context.raise_death(error)
            raise
        finally:
            # The last references: torchdata ends the workers.
            del loader, packed
            context.end()


class _Share(IterableDataset[Packed]):
    """What a worker iterates over: its blocks, packed."""

    def __init__(self, task: ReadTask, position: State) -> None:
        self._task = task
        self._position = position

    def __iter__(self) -> Iterator[Packed]:
        from recd_plugins import upstream_noise

        upstream_noise.silence()
        info = get_worker_info()
        assert info is not None, "only workers iterate over it"
        try:
            reader = self._task.open()
            for block in reader.blocks(self._position, info.id, info.num_workers):
                yield pack(block)
        except RecdError as error:
            yield pack(BatchBlock(info.id, [], portable(error)))


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what torch says of torchdata's own code, and of more workers than cores."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        yield
