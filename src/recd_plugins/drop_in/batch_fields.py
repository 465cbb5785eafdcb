"""The KeyedJaggedTensors of a trainer's batch, whatever type holds them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

#: Of a path and the tensor there: what to have in its place.
Replace = Callable[[str, KeyedJaggedTensor], KeyedJaggedTensor]

# They hold no KeyedJaggedTensor, or none that is the batch's to change.
_LEAVES = (Tensor, JaggedTensor, KeyedTensor, nn.Module, str, bytes, int, float, type(None))


def replace_kjts(
    batch: Any, replace: Replace, path: str = "batch", above: tuple[int, ...] = ()
) -> Any:
    """The batch with other KeyedJaggedTensors; itself where none was replaced by another.

    Looks into dicts, lists, tuples, dataclasses and other objects with attributes. What holds one
    that is replaced is copied, so that the batch that was given stays as it is.

    Args:
        batch: of any type.
        replace: called with each KeyedJaggedTensor and where it is, as ``batch.sparse_features`` or
            ``batch['clicks'][0]``.
        path: what to call the batch itself.
        above: ids of what holds it, which it may refer to in turn.
    """
    if isinstance(batch, KeyedJaggedTensor):
        return replace(path, batch)
    if isinstance(batch, _LEAVES) or id(batch) in above:
        return batch
    above = (*above, id(batch))
    if isinstance(batch, Mapping):
        changed = _changed(
            {key: (f"{path}[{key!r}]", value) for key, value in batch.items()}, replace, above
        )
        if not changed:
            return batch
        other = copy.copy(batch)
        for key, value in changed.items():
            other[key] = value  # type: ignore[index]
        return other
    if isinstance(batch, list | tuple):
        changed = _changed(
            {index: (f"{path}[{index}]", value) for index, value in enumerate(batch)},
            replace,
            above,
        )
        items = [changed.get(index, value) for index, value in enumerate(batch)]
        if not changed:
            return batch
        # A named tuple takes its fields one by one.
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    return _with_attributes(batch, replace, path, above)


def _with_attributes(batch: Any, replace: Replace, path: str, above: tuple[int, ...]) -> Any:
    slots = [vars(cls).get("__slots__", ()) for cls in type(batch).__mro__]
    names = [
        *getattr(batch, "__dict__", ()),
        *(name for each in slots for name in ([each] if isinstance(each, str) else each)),
    ]
    changed = _changed(
        {name: (f"{path}.{name}", getattr(batch, name, None)) for name in names}, replace, above
    )
    if not changed:
        return batch
    other = copy.copy(batch)
    for name, value in changed.items():
        object.__setattr__(other, name, value)  # of frozen dataclasses, too
    return other


def _changed(
    parts: Mapping[Any, tuple[str, Any]], replace: Replace, above: tuple[int, ...]
) -> dict[Any, Any]:
    changed = {}
    for key, (path, value) in parts.items():
        other = replace_kjts(value, replace, path, above)
        if other is not value:
            changed[key] = other
    return changed
