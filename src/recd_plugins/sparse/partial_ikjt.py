"""A partially deduplicated KeyedJaggedTensor (RecD, Zhao et al., MLSys 2023, section 7)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins.sparse.ikjt import InverseKeyedJaggedTensor
from recd_plugins.sparse.jagged import positions_of_ranges, readable, runs_of_equal_rows
from recd_plugins.sparse.movable import Movable, register_pytree
from recd_plugins.sparse.partial import MAX_SHIFT, PackedRows, RowPacker
from recd_plugins.sparse.unique_groups import check_features


class PartialInverseKeyedJaggedTensor(Movable):
    """A KeyedJaggedTensor of B rows in which overlapping rows share stored ids.

    Row ``b`` of a feature consists of ``lengths[b]`` ids, starting at index ``offsets[b]`` of the
    feature's stored ids. If a history drops its oldest id and appends a new id, only the new id is
    stored. Weights are not supported.

    Args:
        keys: names of the F features, F > 0.
        values: stored ids, feature by feature, ``[num_values]``.
        offsets: start of each row, relative to the feature's first stored id, feature by feature,
            integer ``[F * B]``.
        lengths: lengths of the rows, feature by feature, integer ``[F * B]``.
        length_per_key: number of stored ids of each feature. The sum is ``num_values``.

    Raises:
        ValueError: there are no keys or duplicate keys.

    Example:
        Three rows, [7, 8, 9], [8, 9, 5] and [8, 9, 5]::

            PartialInverseKeyedJaggedTensor(
                keys=["viewed"],
                values=torch.tensor([7, 8, 9, 5]),
                offsets=torch.tensor([0, 1, 1]),
                lengths=torch.tensor([3, 3, 3]),
                length_per_key=[4],
            )
    """

    TENSORS = ("_values", "_offsets", "_lengths")

    def __init__(
        self,
        keys: Sequence[str],
        values: Tensor,
        offsets: Tensor,
        lengths: Tensor,
        length_per_key: Sequence[int],
    ) -> None:
        if not keys or len(set(keys)) < len(keys):
            raise ValueError(f"keys must be unique and not empty, got {list(keys)}")
        self._keys = list(keys)
        self._values = values
        self._offsets = offsets
        self._lengths = lengths
        self._length_per_key = list(length_per_key)

    @staticmethod
    def from_packed(keys: Sequence[str], packed: PackedRows) -> PartialInverseKeyedJaggedTensor:
        """Create the tensor from partially deduplicated columns, without a copy."""
        return PartialInverseKeyedJaggedTensor(
            keys,
            torch.from_numpy(packed.values),
            torch.from_numpy(packed.offsets).flatten(),
            torch.from_numpy(packed.lengths).flatten(),
            packed.sizes,
        )

    @staticmethod
    def from_kjt(
        kjt: KeyedJaggedTensor, keys: Sequence[str] | None = None, max_shift: int = MAX_SHIFT
    ) -> PartialInverseKeyedJaggedTensor:
        """Partially deduplicate a KJT, in which each row may share ids with the previous row.

        Args:
            kjt: B rows of every feature, without weights. Rows of a session should be adjacent.
            keys: features to include. The default is all.
            max_shift: maximum number of ids that a row may drop from the previous row.

        Raises:
            ValueError: keys are empty, unknown or duplicate, or the KJT has weights or a variable
                batch per feature (VBE).
        """
        keys = kjt.keys() if keys is None else keys
        check_features(kjt, keys)
        if kjt.weights_or_none() is not None:
            raise ValueError(
                "partial deduplication does not support weights. Use "
                "InverseKeyedJaggedTensor.from_kjt"
            )
        values, offsets = readable(kjt.values()).numpy(), kjt.offsets().cpu().numpy()
        stride = kjt.stride()
        places = [kjt.keys().index(key) * stride for key in keys]
        columns = [(values, offsets[first : first + stride + 1]) for first in places]
        packed = PartialInverseKeyedJaggedTensor.from_packed(
            keys, RowPacker(max_shift)(columns, stride)
        )
        packed._values = packed._values.to(kjt.values().dtype)
        return packed.to(kjt.device())

    def keys(self) -> list[str]:
        """Return the names of the F features."""
        return self._keys

    def values(self) -> Tensor:
        """Return the stored ids, feature by feature, ``[num_values]``."""
        return self._values

    def offsets(self) -> Tensor:
        """Return the start of each row, relative to its feature's first stored id, ``[F * B]``."""
        return self._offsets

    def lengths(self) -> Tensor:
        """Return the lengths of the rows, feature by feature, ``[F * B]``."""
        return self._lengths

    def length_per_key(self) -> list[int]:
        """Return the number of stored ids of each feature."""
        return self._length_per_key

    def stride(self) -> int:
        """Return B, the number of batch rows."""
        return self._lengths.numel() // len(self._keys)

    def device(self) -> torch.device:
        """Return the device of the values."""
        return self._values.device

    def dedupe_factor(self) -> float:
        """Return the number of ids in all rows, divided by stored ids; 1.0 without ids."""
        stored = self._values.numel()
        return float(self._lengths.sum().item()) / stored if stored else 1.0

    def split(self) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
        """Yield ``(key, stored ids, offsets [B], lengths [B])`` of each feature."""
        return zip(
            self._keys,
            torch.split(self._values, self._length_per_key),
            self._offsets.view(len(self._keys), -1),
            self._lengths.view(len(self._keys), -1),
            strict=True,
        )

    def to_kjt(self) -> KeyedJaggedTensor:
        """Return a plain KJT of all B rows, without shared ids."""
        firsts = torch.tensor([0, *accumulate(self._length_per_key)][:-1], device=self.device())
        starts = self._offsets.long().view(len(self._keys), -1) + firsts.unsqueeze(1)
        positions = positions_of_ranges(starts.flatten(), self._lengths)
        return KeyedJaggedTensor(
            keys=self._keys,
            values=self._values.index_select(0, positions),
            lengths=self._lengths,
            stride=self.stride(),
        )

    def to_ikjt(
        self, groups: Sequence[Sequence[str]] | None = None
    ) -> tuple[InverseKeyedJaggedTensor, ...]:
        """Return exact IKJTs, in which a run of equal consecutive rows is one unique row.

        Equal rows that are not consecutive stay separate, unlike with
        ``InverseKeyedJaggedTensor.from_kjt``.

        Args:
            groups: groups of features that share an inverse lookup. By default, each feature has
                its own inverse lookup.
        """
        groups = [[key] for key in self._keys] if groups is None else groups
        features = {key: rest for key, *rest in self.split()}
        return tuple(_unique_rows(group, [features[key] for key in group]) for group in groups)

    def __repr__(self) -> str:
        rows = f"{self._values.numel()} ids of {self.stride()} rows"
        return f"{type(self).__name__}(keys={self._keys}, {rows}, device={self.device()})"


def _unique_rows(
    keys: Sequence[str], features: Sequence[Sequence[Tensor]]
) -> InverseKeyedJaggedTensor:
    first_rows, inverse_lookup = runs_of_equal_rows(
        [column for _, offsets, lengths in features for column in (offsets, lengths)]
    )
    unique_values, unique_lengths = [], []
    for values, offsets, lengths in features:
        kept = lengths.index_select(0, first_rows)
        positions = positions_of_ranges(offsets.index_select(0, first_rows), kept)
        unique_values.append(values.index_select(0, positions))
        unique_lengths.append(kept)
    return InverseKeyedJaggedTensor(
        keys=keys,
        values=torch.cat(unique_values),
        inverse_lookup=inverse_lookup,
        lengths=torch.cat(unique_lengths),
    )


_Partial = PartialInverseKeyedJaggedTensor
register_pytree(_Partial, _Partial.TENSORS, ["_keys", "_length_per_key"])
