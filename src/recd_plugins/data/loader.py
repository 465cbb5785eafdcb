"""``Registry.dataloader``: from a reader's rows to the input of a model, resumable."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from recd_plugins.data.check_batch import check_batch, check_rows
from recd_plugins.data.check_ids import check_ids
from recd_plugins.data.model_input import ModelInput, lower
from recd_plugins.data.preprocess import build_preprocess
from recd_plugins.errors import PluginError
from recd_plugins.interfaces import Converter, FeatureSchema, Reader, Rows, Split
from recd_plugins.plugin_call import plugin_call

if TYPE_CHECKING:
    from recd_plugins.registry import Registry


class DataLoader:
    """Reads, converts, preprocesses and lowers one batch after the other.

    Iterating goes on from the current position to the end of the epoch. ``state_dict`` is the
    position after the last batch that was handed out.
    """

    def __init__(
        self,
        registry: Registry,
        reader: Reader,
        schema: FeatureSchema,
        converter: Converter,
        pin_memory: bool,
    ) -> None:
        # Imported here: the demo model's placement needs torchrec's modules, readers do not.
        from recd_plugins.training.placement import plan_placement

        self._dataset = registry.dataset
        self._batch_size = registry.training.batch_size
        self._reader = reader
        self._schema = schema
        self._converter = converter
        self._pin_memory = pin_memory
        prepared = registry.prepared
        self._placement = prepared.placement if prepared else plan_placement(registry, schema)
        self._num_embeddings = prepared.num_embeddings if prepared else {}
        self._preprocess = build_preprocess(registry, schema)

    def __len__(self) -> int:
        return len(self._reader)

    def __iter__(self) -> Iterator[ModelInput]:
        for rows in self._read():
            with plugin_call(self._converter, "convert"):
                batch = self._converter.convert(rows, self._schema)
            check_batch(self._converter, batch, len(rows), self._schema)
            batch = self._preprocess(batch)
            check_ids(batch, self._num_embeddings, rows)
            model_input = lower(batch, self._placement)
            # Only from pinned memory does a copy to the device overlap with compute.
            yield model_input.pin_memory() if self._pin_memory else model_input

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch that was handed out.

        A train pipeline takes batches ahead of training: feed it from
        ``recd_plugins.training.source.Source``, which knows the position that training has reached.
        """
        return self._reader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._reader.load_state_dict(state)

    def _read(self) -> Iterator[Rows]:
        batches = iter(self._reader)
        while True:
            with plugin_call(self._dataset, "reading"):
                rows = next(batches, None)
            if rows is None:
                return
            check_rows(self._dataset, rows, self._batch_size)
            yield rows


def build_dataloader(
    registry: Registry,
    rank: int,
    world_size: int,
    split: Split = "train",
    device: torch.device | None = None,
) -> DataLoader:
    """A loader of this rank's share of a split, ``training.batch_size`` rows a batch.

    Batches are in host memory, pinned where ``device`` is a CUDA device. They suit the model that
    ``Registry.prepare`` saw last; without one, the demo model.

    Raises:
        DataError: the data is missing or wrong.
        PluginError: a plugin failed, or returned what its kind does not allow.
        RegistryError: a pattern matches no feature.
    """
    schema = registry.dataset.schema()
    fit_converter(registry)
    reader = registry.dataset.reader(
        rank=rank, world_size=world_size, batch_size=registry.training.batch_size, split=split
    )
    pin_memory = device is not None and device.type == "cuda"
    return DataLoader(registry, reader, schema, registry.converter, pin_memory)


def fit_converter(registry: Registry) -> None:
    """Show the converter the first rows of the training split, the same on every rank, once."""
    if registry.converter_fitted:
        return
    reader = registry.dataset.reader(
        rank=0, world_size=1, batch_size=registry.training.batch_size, split="train"
    )
    with plugin_call(registry.dataset, "reading"):
        rows = next(iter(reader), None)
    if rows is None:
        raise PluginError(
            f"{registry.dataset.name}: its reader has no batch; where a split has too few rows for "
            "one, `reader` raises a DataError that says so"
        )
    check_rows(registry.dataset, rows, registry.training.batch_size)
    with plugin_call(registry.converter, "fit"):
        registry.converter.fit(rows, registry.dataset.schema())
    registry.converter_fitted = True
