"""Functions that create TorchRec jagged tensors from numpy columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins.sparse.dedup import Deduplicator, JaggedColumn, UniqueRows
from recd_plugins.sparse.dictionaries import DictionaryColumn, unique_lists
from recd_plugins.sparse.ikjt import InverseKeyedJaggedTensor
from recd_plugins.sparse.jagged import tensors_of
from recd_plugins.sparse.partial import RowPacker
from recd_plugins.sparse.partial_ikjt import PartialInverseKeyedJaggedTensor


def kjt_from_columns(columns: Mapping[str, JaggedColumn], num_rows: int) -> KeyedJaggedTensor:
    """Create a plain KJT with int32 lengths from one or more columns, keyed by feature."""
    values = [ids[offsets[0] : offsets[-1]] for ids, offsets in columns.values()]
    lengths = [np.diff(offsets) for _, offsets in columns.values()]
    return KeyedJaggedTensor(
        keys=list(columns),
        values=torch.from_numpy(np.concatenate(values)),
        lengths=torch.from_numpy(np.concatenate(lengths, dtype=np.int32, casting="same_kind")),
        stride=num_rows,
    )


def ikjts_from_columns(
    groups: Sequence[Mapping[str, JaggedColumn]], num_rows: int, deduplicate: Deduplicator
) -> tuple[InverseKeyedJaggedTensor, ...]:
    """Deduplicate each group of columns of one dtype to an IKJT with int32 lengths."""
    return _ikjts(groups, deduplicate([list(group.values()) for group in groups], num_rows))


def ikjts_from_dictionaries(
    groups: Sequence[Mapping[str, DictionaryColumn]], num_rows: int
) -> tuple[InverseKeyedJaggedTensor, ...]:
    """Deduplicate each group of dictionary columns to an IKJT with int32 lengths.

    Raises:
        BrokenListError: the size of a list is not a multiple of 8 bytes.
    """
    return _ikjts(groups, unique_lists([list(group.values()) for group in groups], num_rows))


def _ikjts(
    groups: Sequence[Mapping[str, object]], unique: Sequence[UniqueRows]
) -> tuple[InverseKeyedJaggedTensor, ...]:
    # Slices of one storage: preprocessing runs on all of them at once.
    values = tensors_of([rows.values[0] for rows in unique])
    lengths = tensors_of([rows.lengths for rows in unique])
    return tuple(
        InverseKeyedJaggedTensor(
            keys=list(group),
            values=ids,
            inverse_lookup=torch.from_numpy(rows.inverse_lookup),
            lengths=sizes,
        )
        for group, rows, ids, sizes in zip(groups, unique, values, lengths, strict=True)
    )


def partial_from_columns(
    columns: Mapping[str, JaggedColumn], num_rows: int, pack: RowPacker
) -> PartialInverseKeyedJaggedTensor:
    """Create a partially deduplicated tensor from columns of one dtype, keyed by feature."""
    packed = pack(list(columns.values()), num_rows)
    return PartialInverseKeyedJaggedTensor.from_packed(list(columns), packed)


def partial_from_dictionaries(
    columns: Mapping[str, DictionaryColumn], num_rows: int, pack: RowPacker
) -> PartialInverseKeyedJaggedTensor:
    """Create a partially deduplicated tensor from dictionary columns, keyed by feature.

    Raises:
        BrokenListError: the size of a list is not a multiple of 8 bytes.
    """
    unique = unique_lists([[column] for column in columns.values()], num_rows)
    rows = max(lists.lengths.size for lists in unique)
    packed = pack([(lists.values[0], _offsets(lists.lengths, rows)) for lists in unique], rows)
    lookups = torch.from_numpy(np.stack([lists.inverse_lookup for lists in unique]))
    return PartialInverseKeyedJaggedTensor(
        keys=list(columns),
        values=torch.from_numpy(packed.values),
        offsets=torch.from_numpy(packed.offsets).gather(1, lookups).flatten(),
        lengths=torch.from_numpy(packed.lengths).gather(1, lookups).flatten(),
        length_per_key=packed.sizes,
    )


def _offsets(lengths: NDArray[np.int32], num_rows: int) -> NDArray[np.int64]:
    offsets = np.empty(num_rows + 1, np.int64)
    offsets[0] = 0
    np.cumsum(lengths, out=offsets[1 : lengths.size + 1])
    offsets[lengths.size + 1 :] = offsets[lengths.size]
    return offsets
