"""Rows of the training split as they are stored, for those who look at data before it is read."""

from __future__ import annotations

from collections.abc import Iterator

from recd_plugins.data.rows_of_split import rows_of_split
from recd_plugins.interfaces import Rows
from recd_plugins.plugin_call import plugin_call
from recd_plugins.registry import RunConfig


def training_rows(registry: RunConfig, limit: int | None) -> Iterator[Rows]:
    """The first rows of the training split; a dataset that cannot scan is read as one rank."""
    dataset = registry.dataset
    batches = rows_of_split(dataset, "train", registry.training.batch_size)
    left = limit
    while left is None or left > 0:
        with plugin_call(dataset, "reading"):
            rows = next(batches, None)
        if rows is None:
            return
        if left is not None:
            if len(rows) > left:
                rows = Rows(rows.data.slice(0, left), rows.origins)
            left -= len(rows)
        if len(rows):
            yield rows
