"""The InverseKeyedJaggedTensor of the RecD paper (Zhao et al., MLSys 2023, section 4.2)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from recd_plugins.sparse.index_select import jagged_index_select
from recd_plugins.sparse.jagged import offsets_of
from recd_plugins.sparse.movable import Movable, register_pytree
from recd_plugins.sparse.unique_groups import deduplicate


class InverseKeyedJaggedTensor(Movable):
    """A KeyedJaggedTensor of B rows that stores each distinct row once.

    All F features share one ``inverse_lookup``. In every feature, row ``b`` of the batch is equal
    to unique row ``inverse_lookup[b]``.

    Args:
        keys: names of the F features, F > 0.
        values: ids of the unique rows, feature by feature, ``[num_values]``.
        inverse_lookup: index of the unique row of each batch row, integer ``[B]``.
        weights: weights of the values, ``[num_values]``.
        lengths: lengths of the U unique rows, feature by feature, integer ``[F * U]``.
        offsets: offsets of the unique rows in ``values``, integer ``[F * U + 1]``. At least one of
            ``lengths`` and ``offsets`` is required.

    Raises:
        ValueError: lengths and offsets are both missing, or there are no keys or duplicate keys.

    Example:
        Three rows; the first two are equal::

            InverseKeyedJaggedTensor(
                keys=["viewed", "viewed_seller"],
                values=torch.tensor([7, 8, 9, 70, 80, 90]),
                lengths=torch.tensor([2, 1, 2, 1]),
                inverse_lookup=torch.tensor([0, 0, 1]),
            )
    """

    TENSORS = ("_values", "_lengths", "_inverse_lookup", "_weights", "_offsets")
    _offsets: Tensor | None = None

    def __init__(
        self,
        keys: Sequence[str],
        values: Tensor,
        inverse_lookup: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
    ) -> None:
        if lengths is None:
            if offsets is None:
                raise ValueError("lengths and offsets are both None. Pass one of them")
            lengths = torch.diff(offsets)
        if not keys or len(set(keys)) < len(keys):
            raise ValueError(f"keys must be unique and not empty, got {list(keys)}")
        self._keys = list(keys)
        self._values = values
        self._inverse_lookup = inverse_lookup
        self._weights = weights
        self._lengths = lengths
        self._offsets = offsets

    @staticmethod
    def from_kjt(
        kjt: KeyedJaggedTensor, groups: Sequence[Sequence[str]]
    ) -> tuple[InverseKeyedJaggedTensor, ...]:
        """Deduplicate the rows of each group of features, and return one IKJT per group.

        Rows are merged if all features of the group have equal values and weights. Unique rows are
        in the order of first occurrence.

        Args:
            kjt: B rows of every feature.
            groups: groups of feature names; features in no group are omitted.

        Raises:
            ValueError: a group is empty or has unknown or duplicate keys, the KJT has a variable
                batch per feature (VBE), or the weights require a gradient.
        """
        return tuple(
            InverseKeyedJaggedTensor(
                keys=group,
                values=unique.values,
                inverse_lookup=unique.inverse_lookup,
                weights=unique.weights,
                lengths=unique.lengths,
            )
            for group, unique in zip(groups, deduplicate(kjt, groups), strict=True)
        )

    def keys(self) -> list[str]:
        """Return the names of the F features."""
        return self._keys

    def values(self) -> Tensor:
        """Return the ids of the unique rows, feature by feature, ``[num_values]``."""
        return self._values

    def lengths(self) -> Tensor:
        """Return the lengths of the unique rows, feature by feature, ``[F * U]``."""
        return self._lengths

    def offsets(self) -> Tensor:
        """Return the offsets of the unique rows in ``values()``, ``[F * U + 1]``."""
        if self._offsets is None:
            self._offsets = offsets_of(self._lengths)
        return self._offsets

    def weights_or_none(self) -> Tensor | None:
        """Return the weights of the ids, ``[num_values]``, or None."""
        return self._weights

    def inverse_lookup(self) -> Tensor:
        """Return the index of the unique row of each batch row, ``[B]``."""
        return self._inverse_lookup

    def stride(self) -> int:
        """Return B, the number of batch rows including duplicates."""
        return self._inverse_lookup.numel()

    def num_unique(self) -> int:
        """Return U, the number of unique rows."""
        return self._lengths.numel() // len(self._keys)

    def device(self) -> torch.device:
        """Return the device of the values."""
        return self._values.device

    def dedupe_factor(self) -> float:
        """Return the number of ids in all rows, divided by ids in unique rows; 1.0 without ids."""
        stored = self._values.numel()
        if stored == 0:
            return 1.0
        lengths = self._lengths.view(len(self._keys), -1)
        return float(lengths.index_select(1, self._inverse_lookup).sum().item()) / stored

    def to_kjt(self) -> KeyedJaggedTensor:
        """Return a plain KJT of all B rows, including duplicates."""
        first_rows = torch.arange(len(self._keys), device=self.device()) * self.num_unique()
        rows = (first_rows.unsqueeze(1) + self._inverse_lookup).flatten()
        every_row = jagged_index_select(
            JaggedTensor(self._values, self._weights, self._lengths, self.offsets()), rows
        )
        return KeyedJaggedTensor(
            keys=self._keys,
            values=every_row.values(),
            weights=every_row.weights_or_none(),
            lengths=every_row.lengths(),
            stride=self.stride(),
        )

    def to_unique_kjt(self) -> KeyedJaggedTensor:
        """Return a plain KJT of the U unique rows."""
        return KeyedJaggedTensor(
            keys=self._keys,
            values=self._values,
            weights=self._weights,
            lengths=self._lengths,
            offsets=self._offsets,
            stride=self.num_unique(),
        )

    def __repr__(self) -> str:
        rows = f"{self.num_unique()} unique of {self.stride()} rows"
        return f"{type(self).__name__}(keys={self._keys}, {rows}, device={self.device()})"


# Without offsets, which are computed from the lengths.
register_pytree(InverseKeyedJaggedTensor, InverseKeyedJaggedTensor.TENSORS[:-1], ["_keys"])
