"""Preprocessing on the unique rows of IKJTs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from recd_plugins.data.apply_step import apply_steps
from recd_plugins.interfaces import Preprocessing
from recd_plugins.sparse import InverseKeyedJaggedTensor
from recd_plugins.sparse.jagged import offsets_of
from recd_plugins.sparse.slices import adjacent


def transform_together(
    steps: Sequence[Preprocessing], ikjts: Sequence[InverseKeyedJaggedTensor]
) -> list[InverseKeyedJaggedTensor]:
    """All features of ``ikjts`` by the same steps, in one call where memory allows it.

    A call costs what thousands of ids do, and a batch has dozens of IKJTs. Those that one
    converter made lie one after the other, as rows of one large jagged tensor would.

    Raises:
        PluginError: a step failed, or returned something other than its interface allows.
    """
    all_values = adjacent([ikjt.values() for ikjt in ikjts])
    all_lengths = adjacent([ikjt.lengths() for ikjt in ikjts])
    if all_values is None or all_lengths is None:
        return [
            with_rows(ikjt, *apply_steps(steps, ikjt.keys(), ikjt.values(), ikjt.lengths()))
            for ikjt in ikjts
        ]
    keys = [key for ikjt in ikjts for key in ikjt.keys()]  # noqa: SIM118
    values, lengths = apply_steps(steps, keys, all_values, all_lengths)
    rows = [ikjt.lengths().numel() for ikjt in ikjts]
    if lengths is all_lengths:
        ids = [ikjt.values().numel() for ikjt in ikjts]
    else:
        ends = offsets_of(lengths)[list(accumulate(rows))].tolist()
        ids = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    return [
        with_rows(ikjt, *changed)
        for ikjt, *changed in zip(
            ikjts, torch.split(values, ids), torch.split(lengths, rows), strict=True
        )
    ]


def with_rows(
    ikjt: InverseKeyedJaggedTensor, values: Tensor, lengths: Tensor
) -> InverseKeyedJaggedTensor:
    """The same IKJT with other unique rows."""
    return InverseKeyedJaggedTensor(
        keys=ikjt.keys(), values=values, inverse_lookup=ikjt.inverse_lookup(), lengths=lengths
    )
