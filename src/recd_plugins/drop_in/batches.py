"""Finds the KeyedJaggedTensors in a batch and replaces them by deduplicated ones."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from recd_plugins.runtime.errors import DataError
from recd_plugins.sparse.dedup import Deduplicator
from recd_plugins.sparse.deduplicated_kjt import DeduplicatedKJT
from recd_plugins.sparse.unique_groups import deduplicate

#: Called with a path in the batch and the tensor at this path; returns the replacement.
Replace = Callable[[str, KeyedJaggedTensor], KeyedJaggedTensor]

# Types to skip: they hold no KeyedJaggedTensor, or one that must not be replaced.
_LEAVES = (Tensor, JaggedTensor, KeyedTensor, nn.Module, str, bytes, int, float, type(None))


def replace_kjts(
    batch: Any, replace: Replace, path: str = "batch", above: tuple[int, ...] = ()
) -> Any:
    """Return a batch with replaced KeyedJaggedTensors, or ``batch`` itself if none changed.

    Searches dicts, lists, tuples, dataclasses and other objects with attributes, and copies
    containers of replaced tensors. ``replace`` is called with a path, such as
    ``batch['clicks'][0]``, and a KJT. Recursive calls pass the ``path`` of ``batch``, and the ids
    of the objects ``above``.
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
    """Deduplicates KJTs. ``features`` is a dict from a KJT's path to its feature names.

    Reuses working memory between batches, so it is not thread-safe. A call raises DataError if the
    values of a KeyedJaggedTensor do not match its lengths.
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
        return DeduplicatedKJT(_with_unique_rows(kjt, chosen, self._deduplicators[path]), kjt)


def check_lengths(path: str, kjt: KeyedJaggedTensor) -> None:
    """Raise DataError if values do not match lengths; kernels would read values of other rows."""
    if (ids := int(kjt.offsets()[-1])) != kjt.values().numel():
        raise DataError(
            f"{path}: the lengths add up to {ids}, but {kjt.values().numel()} values exist. "
            "Pass lengths that match the values."
        )


def _with_unique_rows(
    kjt: KeyedJaggedTensor, chosen: Collection[str], deduplicator: Deduplicator
) -> KeyedJaggedTensor:
    """Return a KeyedJaggedTensor with unique rows of ``chosen`` and all rows of other features."""
    keys, num_rows = kjt.keys(), kjt.stride()
    places = [place for place, key in enumerate(keys) if key in chosen]
    sizes, kjt_weights = kjt.length_per_key(), kjt.weights_or_none()
    values = list(torch.split(kjt.values(), sizes))
    weights = None if kjt_weights is None else list(torch.split(kjt_weights, sizes))
    lengths = list(kjt.lengths().view(len(keys), num_rows).unbind())
    inverse = torch.arange(num_rows, device=kjt.device()).repeat(len(keys), 1)
    found = deduplicate(kjt, [[keys[place]] for place in places], deduplicator)
    for place, unique in zip(places, found, strict=True):
        values[place], lengths[place] = unique.values, unique.lengths
        inverse[place] = unique.inverse_lookup
        if weights is not None and unique.weights is not None:
            weights[place] = unique.weights
    # Copies, so that a pipeline with clear_data_dist_inputs can free them after sending.
    return KeyedJaggedTensor(
        keys=keys,
        values=torch.cat(values),
        weights=None if weights is None else torch.cat(weights),
        lengths=torch.cat(lengths),
        stride_per_key_per_rank=[[each.numel()] for each in lengths],
        length_per_key=[each.numel() for each in values],
        inverse_indices=(keys, inverse),
    )
