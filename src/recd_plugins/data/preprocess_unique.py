"""Preprocessing on the unique rows of IKJTs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from recd_plugins.data.apply_step import apply_steps, apply_to_ids
from recd_plugins.interfaces import Preprocessing
from recd_plugins.sparse import InverseKeyedJaggedTensor
from recd_plugins.sparse.jagged import offsets_of
from recd_plugins.sparse.slices import adjacent, adjacent_runs


def transform_together(
    steps: Sequence[Preprocessing], ikjts: Sequence[InverseKeyedJaggedTensor]
) -> list[InverseKeyedJaggedTensor]:
    """All features of ``ikjts`` by the same steps, in one call where memory allows it.

    A call costs what thousands of ids do, and a batch has dozens of IKJTs. Those that one
    converter made lie one after the other, as rows of one large jagged tensor would.

    Raises:
        PluginError: a step failed, or returned something other than its interface allows.
    """
    transformed: list[InverseKeyedJaggedTensor] = []
    for count, values in adjacent_runs([ikjt.values() for ikjt in ikjts]):
        transformed += _transform_run(steps, ikjts[len(transformed) :][:count], values)
    return transformed


def _transform_run(
    steps: Sequence[Preprocessing], ikjts: Sequence[InverseKeyedJaggedTensor], all_values: Tensor
) -> list[InverseKeyedJaggedTensor]:
    keys = [key for ikjt in ikjts for key in ikjt.keys()]  # noqa: SIM118
    if all(step.scope == "id" for step in steps):
        values = all_values
        for step in steps:
            values = apply_to_ids(step, keys, values)
        parts = torch.split(values, [ikjt.values().numel() for ikjt in ikjts])
        return [ikjt.with_values(part) for ikjt, part in zip(ikjts, parts, strict=True)]
    all_lengths = adjacent([ikjt.lengths() for ikjt in ikjts])
    if all_lengths is None:
        return _transform_each(steps, ikjts)
    values, lengths = apply_steps(steps, keys, all_values, all_lengths)
    num_rows = [ikjt.lengths().numel() for ikjt in ikjts]
    ends = offsets_of(lengths)[list(accumulate(num_rows))].tolist()
    num_ids = [end - start for start, end in pairwise([0, *ends])]
    return [
        with_rows(ikjt, *rows)
        for ikjt, *rows in zip(
            ikjts, torch.split(values, num_ids), torch.split(lengths, num_rows), strict=True
        )
    ]


def _transform_each(
    steps: Sequence[Preprocessing], ikjts: Sequence[InverseKeyedJaggedTensor]
) -> list[InverseKeyedJaggedTensor]:
    return [
        with_rows(ikjt, *apply_steps(steps, ikjt.keys(), ikjt.values(), ikjt.lengths()))
        for ikjt in ikjts
    ]


def with_rows(
    ikjt: InverseKeyedJaggedTensor, values: Tensor, lengths: Tensor
) -> InverseKeyedJaggedTensor:
    """The same IKJT with other unique rows."""
    return InverseKeyedJaggedTensor(
        keys=ikjt.keys(), values=values, inverse_lookup=ikjt.inverse_lookup(), lengths=lengths
    )
