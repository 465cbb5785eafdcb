"""A KeyedJaggedTensor that also contains its unique rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx._pytree import register_pytree_flatten_spec
from torch.utils._pytree import register_pytree_node
from torchrec.sparse.jagged_tensor import (
    JaggedTensor,
    KeyedJaggedTensor,
    _kjt_flatten,
    _kjt_flatten_spec,
    _kjt_flatten_with_keys,
    _kjt_unflatten,
)

from recd_plugins.sparse.index_select import jagged_index_select

# A tensor, its version (count of in-place changes), and whether it requires a gradient.
_State = tuple[Tensor | None, int, bool]
# Indices in ``_tensors``.
_LENGTHS, _OFFSETS = 1, 2


class DeduplicatedKJT(KeyedJaggedTensor):
    """A KeyedJaggedTensor of all B rows that also contains the unique rows.

    All methods behave as for a plain KeyedJaggedTensor of all rows. Sharded modules of this package
    call ``unique_rows`` to look up only the unique rows. A copy on another device or in another
    process contains only the unique rows, and expands them when ids are first read.

    Args:
        unique: unique rows, with ``stride_per_key_per_rank`` and ``inverse_indices``.
        plain: the KeyedJaggedTensor with all rows, if already computed.
    """

    def __init__(self, unique: KeyedJaggedTensor, plain: KeyedJaggedTensor | None = None) -> None:
        self._unique = unique
        # The tensors of the plain batch as they were when it was created or set.
        self._seen: list[_State] = []
        if plain is not None:
            self._fill(plain)

    def _fill(self, plain: KeyedJaggedTensor) -> None:
        self.__dict__.update(plain.__dict__)
        self._seen = [_state(tensor) for tensor in _tensors(plain)]

    def __getattr__(self, name: str) -> Any:
        """Expand the unique rows to all rows when a field is read for the first time."""
        if name.startswith("__") or name in ("_unique", "_seen") or self._seen:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        self._fill(repeat_rows(self._unique))
        return getattr(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Expand the unique rows to all rows, then set the field."""
        if name not in ("_unique", "_seen") and not self._seen:
            self._fill(repeat_rows(self._unique))
        super().__setattr__(name, value)

    def __copy__(self) -> DeduplicatedKJT:
        """Return a shallow copy that shares all tensors."""
        other = DeduplicatedKJT.__new__(DeduplicatedKJT)
        other.__dict__.update(self.__dict__)
        return other

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle only the unique rows, which need fewer bytes."""
        unique = unique_rows(self)
        if unique is self:
            fields = {n: each for n, each in vars(self).items() if n not in ("_unique", "_seen")}
            return _plain, (fields,)
        return DeduplicatedKJT, (unique,)

    def stride(self) -> int:
        """Return the number of rows, including duplicates."""
        return super().stride() if self._seen else self._unique.stride()

    def device(self) -> torch.device:
        """Return the device of the ids."""
        return self._unique.device()

    def record_stream(self, stream: torch.Stream) -> None:
        """Do not reuse the memory before ``stream`` has finished its current work."""
        self._unique.record_stream(stream)
        if self._seen:
            super().record_stream(stream)

    def pin_memory(self) -> KeyedJaggedTensor:
        """Return a copy in pinned memory."""
        unique = unique_rows(self)
        return super().pin_memory() if unique is self else DeduplicatedKJT(unique.pin_memory())

    def to(
        self,
        device: torch.device,
        non_blocking: bool = False,
        dtype: torch.dtype | None = None,
    ) -> KeyedJaggedTensor:
        """Return a copy on ``device``, with weights of ``dtype``."""
        unique = unique_rows(self)
        stays = bool(self._seen) and torch.device(device) == self.device()
        plain = super().to(device, non_blocking, dtype) if stays or unique is self else None
        if unique is self:
            return plain
        return DeduplicatedKJT(unique.to(device, non_blocking, dtype), plain)


def unique_rows(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Return the unique rows of a DeduplicatedKJT, or ``features`` if it is a plain KJT.

    ``features`` is also returned if its keys, ids, lengths or weights were changed after
    deduplication, and in inference mode on CPU, where some kernels do not support unique rows.

    Returns:
        A KeyedJaggedTensor with ``stride_per_key_per_rank`` and ``inverse_indices``, or
        ``features``.
    """
    if not isinstance(features, DeduplicatedKJT):
        return features
    if torch.is_inference_mode_enabled() and features.device().type == "cpu":
        return features
    if not features._seen:
        return features._unique
    if features.keys() != features._unique.keys():
        return features
    now = [_state(tensor) for tensor in _tensors(features)]
    for place, (before, after) in enumerate(zip(features._seen, now, strict=True)):
        # Lengths and offsets are computed from each other when they are first read.
        computed = before[0] is None and place in (_LENGTHS, _OFFSETS)
        if not computed and (after[0] is not before[0] or after[1:] != before[1:]):
            return features
        if after[0] is not None and after[0].is_inference():
            return features  # torch does not count changes of this tensor
    return features._unique


def repeat_rows(unique: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Return a plain KeyedJaggedTensor in which the unique rows are repeated to all rows."""
    names, inverse = unique.inverse_indices()
    place = {key: row for row, key in enumerate(names)}
    first_row, rows = 0, []
    for key, stride in zip(unique.keys(), unique.stride_per_key(), strict=True):
        rows.append(inverse[place[key]] + first_row)
        first_row += stride
    stored = JaggedTensor(
        unique.values(), unique.weights_or_none(), unique.lengths(), unique.offsets()
    )
    every_row = jagged_index_select(stored, torch.cat(rows))
    return KeyedJaggedTensor(
        keys=unique.keys(),
        values=every_row.values(),
        weights=every_row.weights_or_none(),
        lengths=every_row.lengths(),
        stride=inverse.shape[1],
    )


def _tensors(kjt: KeyedJaggedTensor) -> tuple[Tensor | None, ...]:
    return kjt.values(), kjt.lengths_or_none(), kjt.offsets_or_none(), kjt.weights_or_none()


def _state(tensor: Tensor | None) -> _State:
    if tensor is None or tensor.is_inference():
        return tensor, 0, False
    return tensor, tensor._version, tensor.requires_grad


def _plain(fields: dict[str, Any]) -> KeyedJaggedTensor:
    plain = KeyedJaggedTensor.__new__(KeyedJaggedTensor)
    plain.__dict__.update(fields)
    return plain


# torch treats a deduplicated batch as a plain one.
register_pytree_node(
    DeduplicatedKJT,
    _kjt_flatten,
    _kjt_unflatten,
    flatten_with_keys_fn=_kjt_flatten_with_keys,
    serialized_type_name="recd_plugins.DeduplicatedKJT",
)
register_pytree_flatten_spec(DeduplicatedKJT, _kjt_flatten_spec)
