"""How often ids stand in the positive rows of the training split: how popular items are."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray

from recd_plugins.data.lookups import RegistryLookups
from recd_plugins.data.training_rows import training_rows
from recd_plugins.interfaces import Dataset, Rows
from recd_plugins.registry import RunConfig
from recd_plugins.registry.no_data import NoDataset

Counts = NDArray[np.int64]

# A model is made several times in a process, of one dataset.
_known: WeakKeyDictionary[Dataset, dict[Any, Counts]] = WeakKeyDictionary()


def positive_counts(registry: RunConfig, feature: str, num_embeddings: int) -> Counts:
    """Positive rows by id of a feature after preprocessing, ``[num_embeddings]``.

    Every row of the training split is read, without wrappers, once in a process. Ids that are none
    of the table do not count; a batch with one is refused. Zeros where a trained model goes on
    without its data: its checkpoint has what was made of the counts.

    Raises:
        DataError: the data is missing or wrong.
    """
    if isinstance(registry.dataset, NoDataset):
        return np.zeros(num_embeddings, np.int64)
    known = _known.setdefault(registry.dataset, {})
    key = feature, num_embeddings, registry.path
    if key not in known:
        counts = np.zeros(num_embeddings, np.int64)
        lookups, label = RegistryLookups(registry), registry.dataset.schema().label
        with torch.device("cpu"):  # models are made on the meta device, too
            for rows in training_rows(registry, None):
                _add(counts, lookups, rows, feature, label)
        known[key] = counts
    return known[key]


def _add(counts: Counts, lookups: RegistryLookups, rows: Rows, feature: str, label: str) -> None:
    found = lookups.of(rows, [feature])[feature]
    positive = rows.data.column(label).to_numpy(zero_copy_only=False) > 0.5
    num_lists = len(found.offsets) - 1
    lists = np.arange(num_lists) if found.inverse is None else found.inverse
    of_list = np.bincount(lists[positive], minlength=num_lists)
    times = np.repeat(of_list, np.diff(found.offsets))
    there = (found.ids >= 0) & (found.ids < len(counts))
    np.add.at(counts, found.ids[there], times[there])
