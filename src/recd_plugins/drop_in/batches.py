"""Finds the KeyedJaggedTensors in a batch and replaces them by deduplicated ones."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from recd_plugins.data.lower import StoredFeature, variable_batch_kjt
from recd_plugins.runtime.errors import DataError
from recd_plugins.sparse.dedup import Deduplicator
from recd_plugins.sparse.deduplicated_kjt import DeduplicatedKJT
from recd_plugins.sparse.unique_groups import deduplicate, kernels_can_read

#: Called with a path in the batch and the tensor at this path; returns the replacement.
Replace = Callable[[str, KeyedJaggedTensor], KeyedJaggedTensor]

# Types to skip: they hold no KeyedJaggedTensor, or one that must not be replaced.
_LEAVES = (Tensor, JaggedTensor, KeyedTensor, nn.Module, str, bytes, int, float, type(None))


def replace_kjts(
    batch: Any, replace: Replace, path: str = "batch", above: tuple[int, ...] = ()
) -> Any:
    """Return a batch with replaced KeyedJaggedTensors, or ``batch`` itself if none changed.

    Looks into dicts, lists, tuples, dataclasses and other objects with attributes, and copies the
    containers of replaced tensors. ``replace`` gets each KeyedJaggedTensor and its path, such as
    ``batch['clicks'][0]``; ``above`` are ids of the objects around ``batch``.
    """
    if isinstance(batch, KeyedJaggedTensor):
        return replace(path, batch)
    if isinstance(batch, _LEAVES) or id(batch) in above:
        return batch
    above = (*above, id(batch))
    parts: dict[Any, tuple[str, Any]]
    if isinstance(batch, Mapping):
        parts = {key: (f"{path}[{key!r}]", value) for key, value in batch.items()}
    elif isinstance(batch, list | tuple):
        parts = {index: (f"{path}[{index}]", value) for index, value in enumerate(batch)}
    else:
        names = _attributes(batch)
        parts = {name: (f"{path}.{name}", getattr(batch, name, None)) for name in names}
    changed = {}
    for key, (where, value) in parts.items():
        if (other := replace_kjts(value, replace, where, above)) is not value:
            changed[key] = other
    if not changed:
        return batch
    if isinstance(batch, list | tuple):
        items = [changed.get(index, value) for index, value in enumerate(batch)]
        # The constructor of a named tuple takes its fields as separate arguments.
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    found = copy.copy(batch)
    for key, value in changed.items():
        if isinstance(batch, Mapping):
            found[key] = value
        else:
            object.__setattr__(found, key, value)  # also works for frozen dataclasses
    return found


def _attributes(batch: Any) -> list[str]:
    slots = [vars(cls).get("__slots__", ()) for cls in type(batch).__mro__]
    named = [name for each in slots for name in ([each] if isinstance(each, str) else each)]
    return [*getattr(batch, "__dict__", ()), *named]


class Stored:
    """Deduplicates ``features``, a map from path to feature names, in each batch. Not thread-safe.

    Keeps working memory between batches. A call raises DataError if a KeyedJaggedTensor has values
    that do not match its lengths.
    """

    def __init__(self, features: Mapping[str, Collection[str]]) -> None:
        self._features = features
        self._deduplicators = {path: Deduplicator() for path in features}

    def __call__(self, path: str, kjt: KeyedJaggedTensor) -> KeyedJaggedTensor:
        chosen = self._features.get(path)
        # The trainer has deduplicated it already, or called dedup twice.
        if chosen is None or kjt.variable_stride_per_key() or isinstance(kjt, DeduplicatedKJT):
            return kjt
        check_lengths(path, kjt)
        if kjt.stride() and kjt.weights_or_none() is None and kernels_can_read(kjt):
            unique = _by_kernel(kjt, chosen, self._deduplicators[path])
        else:
            unique = _by_groups(kjt, chosen)
        return DeduplicatedKJT(unique, kjt)


def check_lengths(path: str, kjt: KeyedJaggedTensor) -> None:
    """Refuse values that do not match the lengths. Kernels would read values of other rows."""
    if (ids := int(kjt.offsets()[-1])) != kjt.values().numel():
        raise DataError(
            f"{path}: lengths add up to {ids} ids, and there are {kjt.values().numel()} values"
        )


def _by_kernel(
    kjt: KeyedJaggedTensor, chosen: Collection[str], deduplicator: Deduplicator
) -> KeyedJaggedTensor:
    """Deduplicate all features in one kernel call, as a Python loop would be slow."""
    keys, num_rows = kjt.keys(), kjt.stride()
    positions = [position for position, key in enumerate(keys) if key in chosen]
    found = deduplicator.each(
        kjt.values().numpy(), kjt.offsets().numpy(), np.array(positions), num_rows
    )
    # Allocated by torch, so that a pipeline with clear_data_dist_inputs can free it after sending.
    values = torch.tensor(found.values)
    lengths = torch.tensor(found.lengths, dtype=kjt.lengths().dtype)
    inverse, rows, sizes = torch.from_numpy(found.inverse_lookup), found.num_unique, found.sizes
    if len(positions) < len(keys):
        sizes_of_all, rows_of_all = list(kjt.length_per_key()), [num_rows] * len(keys)
        all_values = list(torch.split(kjt.values(), sizes_of_all))
        all_lengths = list(torch.split(kjt.lengths(), num_rows))
        for position, some_values, some_lengths in zip(
            positions, torch.split(values, sizes), torch.split(lengths, rows), strict=True
        ):
            all_values[position], all_lengths[position] = some_values, some_lengths
            sizes_of_all[position], rows_of_all[position] = len(some_values), len(some_lengths)
        values, lengths = torch.cat(all_values), torch.cat(all_lengths)
        every_row = torch.arange(num_rows).repeat(len(keys), 1)
        every_row[positions] = inverse
        inverse, rows, sizes = every_row, rows_of_all, sizes_of_all
    return KeyedJaggedTensor(
        keys=keys,
        values=values,
        lengths=lengths,
        stride_per_key_per_rank=[[count] for count in rows],
        length_per_key=sizes,
        inverse_indices=(keys, inverse),
    )


def _by_groups(kjt: KeyedJaggedTensor, chosen: Collection[str]) -> KeyedJaggedTensor:
    # TorchRec's to_dict fails if there is no row.
    names = [key for key in kjt.keys() if key in chosen or not kjt.stride()]  # noqa: SIM118
    features = {}
    if len(names) < len(kjt.keys()):
        for name, jagged in kjt.to_dict().items():
            features[name] = StoredFeature(jagged, kjt.stride(), None)
    found = deduplicate(kjt, [[name] for name in names])
    for name, unique in zip(names, found, strict=True):
        rows = JaggedTensor(unique.values, unique.weights, unique.lengths)
        features[name] = StoredFeature(rows, unique.lengths.numel(), unique.inverse_lookup)
    stored = variable_batch_kjt(kjt.keys(), features, kjt.stride())
    assert stored is not None, "it has features"
    return stored
