"""The data loader of a rank, resumable, and one over every row of a split."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any, Self

import torch

from recd_plugins.activity import doing
from recd_plugins.data.prepared import PreparedModel
from recd_plugins.data.read_task import IngestionFeed, read_task
from recd_plugins.data.row_pipeline import RowPipeline, fitted_transforms
from recd_plugins.data.rows import concat_rows
from recd_plugins.data.wrapped_dataset import with_sessions, wrapped_dataset
from recd_plugins.errors import PluginError
from recd_plugins.interfaces import Dataset, Feed, Plugin, Reader, Rows, Split
from recd_plugins.plugin_call import plugin_call
from recd_plugins.registry import RunConfig
from recd_plugins.values.batch import ModelInput

_END: Any = object()


class DataLoader:
    """Reads, converts, preprocesses and lowers one batch after the other.

    Iterating goes on from the current position to the end of the epoch. ``state_dict`` is the
    position after the last batch that was handed out.

    Args:
        dataset: that ``reader`` is of.
        reader: at the position to start from.
        feed: makes the batches from that position on; closed with the loader.
        pin_memory: pin batches.
        made_by: the plugin that hands out batches, which errors name; ``dataset`` without it.
    """

    def __init__(
        self,
        dataset: Dataset,
        reader: Reader,
        feed: Feed,
        pin_memory: bool,
        made_by: Plugin | None = None,
    ) -> None:
        self._dataset = dataset
        self._made_by = made_by or dataset
        self._at_start = True
        self._reader = reader
        self._feed = feed
        self._pin_memory = pin_memory

    def __len__(self) -> int:
        with plugin_call(self._dataset, "len(reader)"):
            return len(self._reader)

    def __iter__(self) -> Iterator[ModelInput]:
        """Yield batches from the position on."""
        expected = self.num_left()
        if expected is None and self._at_start:
            expected = len(self)
        self._at_start = False
        batches = iter(self._feed.read(self._reader))
        number = 0
        while True:
            with doing("reading data"):
                model_input = next(batches, _END)
            if model_input is _END:
                break
            number += 1
            if expected is not None and number > expected:
                raise self._other_number(f"has batch {number}", expected)
            yield pinned(model_input) if self._pin_memory else model_input
        if expected is not None and number < expected:
            raise self._other_number(f"ended after {number}", expected)
        self._at_start = True

    def _other_number(self, what: str, expected: int) -> PluginError:
        """Ranks with different numbers of batches would wait for each other for ever."""
        return PluginError(
            f"{self._made_by.name}: reading {what}, and the reader of {self._dataset.name} said "
            f"that {expected} batches are left of the epoch (len, or num_left)"
        )

    def num_left(self) -> int | None:
        """Return the batches left in the epoch; None where the dataset cannot say."""
        with plugin_call(self._dataset, "num_left of a reader"):
            return self._reader.num_left()

    def batches_a_block(self) -> float:
        """Return the adjacent batches that one reader makes at a time, a mean.

        1 where the dataset does not say: then readers take turns with single batches.
        """
        with plugin_call(self._dataset, "num_blocks of a reader"):
            blocks = self._reader.num_blocks()
        return len(self) / blocks if blocks else 1.0

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch that was handed out, whoever read it.

        A train pipeline takes batches ahead of training: feed it from
        ``recd_plugins.api.BatchSource``, which knows the position that training
        has reached.
        """
        with plugin_call(self._dataset, "state_dict of a reader"):
            return self._reader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._at_start = False
        with plugin_call(self._dataset, "load_state_dict of a reader"):
            self._reader.load_state_dict(state)

    def report(self) -> Mapping[str, float]:
        """Return figures of the ingestion by name, also when it is closed; none without one."""
        return self._feed.report()

    def close(self) -> None:
        """End processes that make batches. Left as a context, the loader is closed."""
        self._feed.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def build_dataloader(
    registry: RunConfig,
    rank: int,
    world_size: int,
    split: Split = "train",
    device: torch.device | None = None,
    *,
    prepared: PreparedModel | None = None,
) -> DataLoader:
    """Make a loader of this rank's share of a split, ``training.batch_size`` rows a batch.

    Batches are in host memory, pinned where ``device`` is a CUDA device. ``training.workers``
    processes make them, the same ones in the same order as this process alone.

    Args:
        registry: whose data is read.
        rank: of those that share it.
        world_size: how many.
        split: of the dataset.
        device: of the model.
        prepared: the model, by ``registry``: batches suit it, and their ids its tables. Without it
            they suit the demo model, to look at data: ids are not checked.

    Raises:
        DataError: the data is missing or wrong.
        PluginError: a plugin failed.
        RegistryError: a pattern matches no feature, or a wrapper of the dataset does not suit the
            model.
    """
    if prepared is not None and split == "train":
        prepared.check_wrappers()
    dataset = wrapped_dataset(registry) if prepared is None else prepared.wrapped_dataset
    reader = dataset.reader(
        rank=rank, world_size=world_size, batch_size=registry.training.batch_size, split=split
    )
    pin_memory = device is not None and device.type == "cuda"
    feed = _feed(registry, rank, world_size, split, prepared, pin_memory)
    made_by = registry.ingestion.plugin if registry.ingestion is not None else None
    return DataLoader(dataset, reader, feed, pin_memory, made_by)


def _feed(
    registry: RunConfig,
    rank: int,
    world_size: int,
    split: Split,
    prepared: PreparedModel | None,
    pin_memory: bool,
) -> Feed:
    if registry.ingestion is None and not registry.training.workers:
        return _OwnFeed(RowPipeline(registry, fitted_transforms(registry, prepared)))
    task = read_task(registry, rank, world_size, split, prepared)
    if registry.ingestion is not None:
        return IngestionFeed(registry.path, registry.ingestion, task)
    from recd_plugins.data.workers import Workers

    return Workers(task, registry.training.workers, pin_memory)


class _OwnFeed(Feed):
    """This process alone."""

    def __init__(self, pipeline: RowPipeline) -> None:
        self._pipeline = pipeline

    def read(self, reader: Reader) -> Iterator[ModelInput]:
        return self._pipeline.read(reader)


def pinned(model_input: ModelInput) -> ModelInput:
    """Return the same in pinned memory."""
    # Only from pinned memory does a copy to the device overlap with compute.
    start = time.perf_counter()
    copy = model_input.pin_memory()
    return replace(copy, making=copy.making.arrived(time.perf_counter() - start))


class EveryRow:
    """A rank's share of all rows of a split, in batches of ``training.batch_size``.

    Full batches come from the dataset's reader, without wrappers: order does not matter. The rows
    that it leaves out are dealt to the ranks. Their batches are filled up with a row that is there,
    since plans and kernels may know batches of one size alone.

    Args:
        prepared: the model.
        rank: whose share.
        world_size: ranks that share.
        split: of the dataset.
        device: of the model.
        sessions: read which rows are of one session, where the dataset knows.
    """

    def __init__(
        self,
        prepared: PreparedModel,
        rank: int,
        world_size: int,
        split: Split,
        device: torch.device,
        *,
        sessions: bool,
    ) -> None:
        registry = prepared.registry
        dataset = registry.dataset
        wrappers = with_sessions(dataset) if sessions else ()
        prepared = replace(prepared, registry=replace(registry, wrappers=wrappers))
        self._prepared = prepared
        self._split: Split = split
        self._pin_memory = device.type == "cuda"
        self._batch_size = size = registry.training.batch_size
        self._loader: DataLoader | None = None
        with plugin_call(dataset, "len(reader)"):
            num_rows = len(self._row_by_row())
        in_full = 0
        if num_rows >= world_size * size:
            self._loader = build_dataloader(
                prepared.registry, rank, world_size, split, device, prepared=prepared
            )
            in_full = len(self._loader) * world_size * size
        left = num_rows - in_full
        share = -(-left // world_size)
        self._rest = [
            (min(start, left - 1), max(0, min(size, share - done, left - start)))
            for done in range(0, share, size)
            for start in [rank * share + done]
        ]
        self._in_full = in_full

    def __len__(self) -> int:
        """Batches of each rank."""
        return len(self._rest) + (0 if self._loader is None else len(self._loader))

    def __iter__(self) -> Iterator[tuple[ModelInput, int]]:
        """Yield batches, and how many of their rows count: the first ones."""
        if self._loader is not None:
            for batch in self._loader:
                yield batch, self._batch_size
        if not self._rest:
            return
        registry = self._prepared.registry
        pipeline = RowPipeline(registry, fitted_transforms(registry, self._prepared))
        for start, count in self._rest:
            (batch,) = pipeline.read([self._filled(start, count)])
            yield pinned(batch) if self._pin_memory else batch, count

    def _filled(self, start: int, count: int) -> Rows:
        """``count`` rows, may be none, from ``start`` on behind the full batches, filled up."""
        reader = self._row_by_row()
        with plugin_call(self._prepared.registry.dataset, "reading"):
            reader.skip(self._in_full + start)
            rows = list(islice(reader, max(count, 1)))
        return concat_rows(rows + rows[-1:] * (self._batch_size - len(rows)))

    def _row_by_row(self) -> Reader:
        dataset = self._prepared.wrapped_dataset
        return dataset.reader(rank=0, world_size=1, batch_size=1, split=self._split)

    def close(self) -> None:
        """End processes that make batches."""
        if self._loader is not None:
            self._loader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
