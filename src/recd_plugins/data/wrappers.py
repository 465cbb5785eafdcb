"""Wrappers of a dataset, looked at before training reads through them."""

from __future__ import annotations

from recd_plugins.data.lookups import wrapped_dataset
from recd_plugins.errors import DataError
from recd_plugins.interfaces import Dataset, DatasetWrapper, Split
from recd_plugins.plugin_call import plugin_call
from recd_plugins.registry import RunConfig
from recd_plugins.registry.entries import at_entry


def check_wrappers_keep_rows(registry: RunConfig, split: Split) -> None:
    """Refuse a wrapper whose reader says that it has other rows than what it wraps, and not why.

    Raises:
        RegistryError: names the line of its entry.
        PluginError: a plugin failed.
    """
    dataset = wrapped_dataset(registry)
    for entry in reversed(registry.wrappers):
        assert isinstance(dataset, DatasetWrapper), "each entry is one wrapper"
        if dataset.rows_together > 1:
            dataset = dataset.inner
            continue
        rows, inner = _num_rows(dataset, split), _num_rows(dataset.inner, split)
        with at_entry(registry.path, entry):
            if rows != inner:
                remedy = (
                    "leave rows out in the dataset"
                    if rows < inner
                    else "repeat rows in the dataset, or say by rows_together that it adds some"
                )
                raise DataError(
                    f"{dataset.name} has {rows:,} rows of the {split} split, of {inner:,} that it "
                    "wraps; a wrapper keeps each row, once, since what measures the data reads it "
                    f"without wrappers: {remedy}"
                )
        dataset = dataset.inner


def _num_rows(dataset: Dataset, split: Split) -> int:
    size = smallest_batch(dataset)
    reader = dataset.reader(rank=0, world_size=1, batch_size=size, split=split)
    with plugin_call(dataset, "len(reader)"):
        return len(reader) * size


def smallest_batch(dataset: Dataset) -> int:
    """The number of rows of which training batches of a dataset are multiples."""
    size = 1
    while isinstance(dataset, DatasetWrapper):
        size *= dataset.rows_together
        dataset = dataset.inner
    return size
