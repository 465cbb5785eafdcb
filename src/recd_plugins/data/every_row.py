"""Every row of a split once, dealt to ranks that all take as many batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Self

import torch

from recd_plugins.data.loader import DataLoader, build_dataloader, pinned
from recd_plugins.data.prepared import PreparedModel
from recd_plugins.data.reader import concat_rows
from recd_plugins.data.row_pipeline import RowPipeline, fitted_transforms
from recd_plugins.data.sessions import with_sessions
from recd_plugins.interfaces import Reader, Rows, Split
from recd_plugins.plugin_call import plugin_call
from recd_plugins.values.model_input import ModelInput


class EveryRow:
    """A rank's share of all rows of a split, in batches of ``training.batch_size``.

    Full batches come from the dataset's reader, without wrappers: order does not matter. The rows
    that it leaves out are dealt to the ranks; what their batches lack is filled up with a row that
    is there, since plans and kernels may know batches of one size alone.

    Args:
        prepared: the model.
        rank: whose share.
        world_size: ranks that share.
        split: of the dataset.
        device: of the model.
        sessions: read which rows are of one session, where the dataset knows.

    Raises:
        RecdError: as ``build_dataloader``.
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
        """Batches, and how many of their rows count: the first ones."""
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
        """End what makes batches elsewhere."""
        if self._loader is not None:
            self._loader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
