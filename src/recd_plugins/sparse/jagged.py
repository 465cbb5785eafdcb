"""Operations on jagged tensors that TorchRec and PyTorch do not have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from recd_plugins.runtime.errors import DataError
from recd_plugins.sparse.kernels import address_of


class MeasuredRows(JaggedTensor):
    """A JaggedTensor with an upper bound of its row lengths that is known on the host."""

    def __init__(self, values: Tensor, lengths: Tensor, longest: int | None) -> None:
        super().__init__(values=values, lengths=lengths)
        self.longest = longest


def longest_row(rows: JaggedTensor) -> int:
    """Return an upper bound of the row lengths. Waits for the device if ``rows`` has no bound."""
    longest: int | None = getattr(rows, "longest", None)
    if longest is None:
        lengths = rows.lengths()
        return int(lengths.max()) if lengths.numel() else 0
    return longest


def readable(tensor: Tensor) -> Tensor:
    """Return a contiguous CPU tensor with elements of 4 or 8 bytes, which the kernels need."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.element_size() >= 4:
        return tensor
    return tensor.float() if tensor.is_floating_point() else tensor.int()


def offsets_of(lengths: Tensor) -> Tensor:
    """Convert lengths ``[num_rows]`` to offsets ``[num_rows + 1]`` of the same dtype."""
    offsets = lengths.new_zeros(lengths.numel() + 1)
    torch.cumsum(lengths, 0, dtype=lengths.dtype, out=offsets[1:])
    return offsets


def positions_of_rows(offsets: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the int64 indices of the values of ``rows``, and the rows' lengths ``[n]``."""
    starts = offsets.index_select(0, rows)
    lengths = offsets.index_select(0, rows + 1) - starts
    return positions_of_ranges(starts, lengths), lengths


def positions_of_ranges(starts: Tensor, lengths: Tensor, total: int | None = None) -> Tensor:
    """Return the concatenated ranges from ``starts[i]`` to ``starts[i] + lengths[i]``.

    The result is int64 ``[total]``. ``starts`` and ``lengths`` are integer ``[n]``. Pass ``total``,
    the sum of ``lengths``, to avoid a device synchronization.
    """
    ends = torch.cumsum(lengths, 0)
    shift = torch.repeat_interleave(starts.long() - (ends - lengths), lengths, output_size=total)
    return torch.arange(shift.numel(), device=starts.device) + shift


def row_sums(values: Tensor, lengths: Tensor) -> Tensor:
    """Return the sum of the values ``[num_values, D]`` of each row, ``[num_rows, D]``."""
    row = torch.repeat_interleave(lengths, output_size=values.shape[0])
    return values.new_zeros(lengths.shape[0], values.shape[1]).index_add(0, row, values)


def runs_of_equal_rows(columns: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Find the rows that differ from the previous row in any column.

    Returns:
        ``(first_rows, runs)``: the first row of each of U runs of equal rows, int64 ``[U]``, and
        the index of each row's run, int64 ``[B]``.
    """
    begins = torch.zeros_like(columns[0], dtype=torch.bool)
    begins[:1] = True
    for column in columns:
        begins[1:] |= column[1:] != column[:-1]
    return begins.nonzero().flatten(), torch.cumsum(begins, 0) - 1


def rounded_borders(borders: Tensor) -> Tensor:
    """Convert bucket borders to float32 if they stay distinct; otherwise keep float64.

    Values are compared in this dtype, so 0.1 falls into the same bucket in columns of any type.
    """
    rounded = borders.float()
    apart = len(torch.unique(rounded)) == len(torch.unique(borders))
    return rounded if apart else borders.double()


def tensors_of(arrays: Sequence[NDArray[Any]]) -> list[Tensor]:
    """Convert one-dimensional arrays to tensors without a copy.

    Tensors of ascending slices of one array share one storage.
    """
    tensors: dict[int, Tensor] = {}
    slices: dict[int, list[int]] = {}
    for number, array in enumerate(arrays):
        base = array.base
        if (
            isinstance(base, np.ndarray)
            and base.ndim == 1
            and base.dtype == array.dtype
            and base.flags.c_contiguous
            and array.flags.c_contiguous
        ):
            slices.setdefault(id(base), []).append(number)
        else:
            tensors[number] = torch.from_numpy(array)
    for numbers in slices.values():
        base = arrays[numbers[0]].base
        assert base is not None
        start, end = address_of(base), 0
        taken, sizes = [], []
        for number in numbers:
            array = arrays[number]
            at = (address_of(array) - start) // array.itemsize if array.size else end
            if at < end:
                tensors[number] = torch.from_numpy(array)
                continue
            taken.append(number)
            sizes += [at - end, array.size]
            end = at + array.size
        # One call for all slices is three times as fast.
        pieces = torch.split(torch.from_numpy(base), [*sizes, base.size - end])
        tensors.update(zip(taken, pieces[1::2], strict=True))
    return [tensors[number] for number in range(len(arrays))]


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate one-dimensional tensors, without a copy if they are adjacent in memory."""
    if len(parts) == 1:
        return parts[0]
    filled = [part for part in parts if part.numel()] or parts[:1]
    storage, end = filled[0].untyped_storage(), filled[0].data_ptr()
    for part in filled:
        if part.data_ptr() != end or not part.is_contiguous():
            return torch.cat(list(parts))
        end += part.nbytes
    if end > storage.data_ptr() + storage.nbytes():
        return torch.cat(list(parts))
    return filled[0].as_strided((sum(part.numel() for part in filled),), (1,))


def plain_kjt(
    names: Sequence[str], features: Sequence[JaggedTensor], stride: int
) -> KeyedJaggedTensor | None:
    """Return a KJT padded to ``stride`` rows per key, or None if ``names`` is empty."""
    if not names:
        return None
    lengths = []
    for feature in features:
        missing = stride - feature.lengths().numel()
        lengths.append(feature.lengths())
        if missing:
            lengths.append(feature.lengths().new_zeros(missing))
    return KeyedJaggedTensor(
        keys=list(names),
        values=torch.cat([feature.values() for feature in features]),
        lengths=torch.cat(lengths),
        weights=weights_of(names, features),
        stride=stride,
        length_per_key=[feature.values().numel() for feature in features],
    )


def weights_of(names: Sequence[str], features: Sequence[JaggedTensor]) -> Tensor | None:
    """Return the weights of all features, concatenated; None without weights.

    Raises:
        DataError: some features have weights, and others do not.
    """
    weights = {
        name: weight
        for name, feature in zip(names, features, strict=True)
        if (weight := feature.weights_or_none()) is not None
    }
    if not weights:
        return None
    without = [name for name in names if name not in weights]
    if without:
        raise DataError(
            f"features {', '.join(map(repr, weights))} have weights, but "
            f"{', '.join(map(repr, without))} have none. Set weights for all of these features (1 "
            "is neutral), or for none"
        )
    return torch.cat(list(weights.values()))


def with_fields(features: KeyedJaggedTensor, **fields: Any) -> KeyedJaggedTensor:
    """Return a copy of a KeyedJaggedTensor with the constructor arguments in ``fields``."""
    variable = features.variable_stride_per_key()
    kept: dict[str, Any] = {
        "keys": features.keys(),
        "values": features.values(),
        "weights": features.weights_or_none(),
        "lengths": features.lengths_or_none(),
        "offsets": features.offsets_or_none(),
        "stride": None if variable else features.stride(),
        "stride_per_key_per_rank": features.stride_per_key_per_rank() if variable else None,
        "length_per_key": features.length_per_key_or_none(),  # computing it may wait for CUDA
        "inverse_indices": features.inverse_indices_or_none(),
    }
    return KeyedJaggedTensor(**kept | fields)
