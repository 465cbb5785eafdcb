"""Reader workers: processes that read, convert and preprocess for one rank.

torchdata's StatefulDataLoader runs them and brings what they make in the order of the batches. It
knows no position: that is the reader's alone, which each batch brings along.
"""

from __future__ import annotations

import pickle
import sys
import warnings
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from recd_plugins.data.handover import Packed, pack, unpack
from recd_plugins.data.model_input import ModelInput
from recd_plugins.data.worker_processes import WorkerContext, WorkerDied
from recd_plugins.errors import PluginError, RecdError, SetupError
from recd_plugins.interfaces import Plugin, Reader, Split
from recd_plugins.manager import load_file, modules_of_files
from recd_plugins.processes import portable

if TYPE_CHECKING:
    from recd_plugins.registry import Registry

State = dict[str, Any]


class Workers:
    """``training.workers`` processes that share the batches of one rank.

    Raises:
        PluginError: the options of a plugin cannot be pickled.
    """

    def __init__(self, registry: Registry, rank: int, world_size: int, split: Split) -> None:
        self._num_workers = registry.training.workers
        self._rank = rank
        self._work = _Work.of(registry, rank, world_size, split)

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
                    for block in blocks:
                        for model_input, position in block.batches:
                            reader.load_state_dict(position)
                            deaths = 0
                            yield model_input
                        if isinstance(block.end, RecdError):
                            raise block.end
                        if block.end is not None:
                            reader.load_state_dict(block.end)
                            return
            except WorkerDied as died:
                deaths += 1
                what = f"reader worker {died.worker} of rank {self._rank} {died.how}"
                if deaths == 3:
                    raise SetupError(
                        f"{what}, the third death without a batch in between{died.remedy}. With "
                        "training.workers: 0 the rank reads by itself"
                    ) from None
                print(f"{what}; new workers read on{died.remedy}", file=sys.stderr)

    def _blocks(self, position: State) -> Generator[_Block, None, None]:
        """What the workers make of the batches from ``position`` on, in the order of the batches.

        Raises:
            WorkerDied: a worker did.
        """
        context = WorkerContext()
        loader = packed = None
        try:
            with _quiet():
                loader = StatefulDataLoader(
                    _Share(self._work, position),
                    batch_size=None,
                    num_workers=self._num_workers,
                    # Blocks that a worker is ahead.
                    prefetch_factor=1,
                    multiprocessing_context=context,
                    # Positions are the reader's.
                    snapshot_every_n_steps=None,
                )
                packed = iter(loader)
            for block in packed:
                yield unpack(block)
        except (RuntimeError, OSError, EOFError) as error:
            context.raise_death(error)
            raise
        finally:
            # The last references: torchdata ends the workers.
            del loader, packed
            context.end()


@dataclass(frozen=True)
class _Block:
    """Adjacent batches, each with the position after it.

    Attributes:
        end: None where more may follow, the position at the end of the epoch, or what went wrong.
    """

    batches: list[tuple[ModelInput, State]]
    end: State | RecdError | None = None


@dataclass(frozen=True)
class _Work:
    """All that a worker has to know, but the position.

    Attributes:
        registry: pickled; its classes may be those of ``modules``.
        modules: files of a folder of plugins by the name of their module.
        rank, world_size, split: whose share of which split.
    """

    registry: bytes
    modules: dict[str, Path]
    rank: int
    world_size: int
    split: Split

    @classmethod
    def of(cls, registry: Registry, rank: int, world_size: int, split: Split) -> _Work:
        registry = registry.with_training({"workers": 0})
        # Each process makes its own plugins and shows the converter its sample.
        registry.converter_fitted = False
        try:
            pickled = pickle.dumps(registry)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise PluginError(
                f"{registry.path}: its plugins cannot be sent to a worker: {error}. Plugins travel "
                "by their class, defined at the top of a module, and their options; or set "
                "training.workers: 0"
            ) from error
        return cls(pickled, modules_of_files(_plugins(registry)), rank, world_size, split)

    def load_registry(self) -> Registry:
        for name, file in self.modules.items():
            load_file(name, file)
        registry: Registry = pickle.loads(self.registry)
        return registry


class _Share(IterableDataset[Packed]):
    """What a worker iterates over: its blocks, packed."""

    def __init__(self, work: _Work, position: State) -> None:
        self._work = work
        self._position = position

    def __iter__(self) -> Iterator[Packed]:
        try:
            for block in self._blocks():
                yield pack(block)
        except RecdError as error:
            yield pack(_Block([], portable(error)))

    def _blocks(self) -> Iterator[_Block]:
        # Imported here: the trainer's data loader imports this module.
        from recd_plugins.data.row_pipeline import RowPipeline
        from recd_plugins.training import upstream_noise

        upstream_noise.silence()
        info = get_worker_info()
        assert info is not None, "only workers iterate over it"
        work, batches = self._work, []
        try:
            registry = work.load_registry()
            pipeline = RowPipeline(registry)
            reader = registry.wrapped_dataset.reader(
                rank=work.rank,
                world_size=work.world_size,
                batch_size=registry.training.batch_size,
                split=work.split,
            )
            reader.load_state_dict(self._position)
            for block in pipeline.reading(reader.blocks(info.id, info.num_workers)):
                for model_input in pipeline.read(block):
                    batches.append((model_input, reader.state_dict()))
                yield _Block(batches)
                batches = []
            yield _Block([], reader.state_dict())
        except RecdError as error:
            yield _Block(batches, portable(error))


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what torch says of torchdata's own code, and of more workers than cores."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        yield


def _plugins(registry: Registry) -> Iterator[Plugin]:
    yield registry.dataset
    yield registry.converter
    for entries in (
        registry.wrappers,
        registry.preprocessing,
        registry.pooling,
        registry.sharding,
        registry.cache,
    ):
        for entry in entries:
            yield entry.plugin
