"""Preprocessing on a batch: on all rows of a plain feature, on the unique rows of the others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins.data.batch import Batch
from recd_plugins.errors import DataError, PluginError
from recd_plugins.interfaces.preprocessing import Preprocessing
from recd_plugins.plugin_call import plugin_call
from recd_plugins.sparse import InverseKeyedJaggedTensor


class Preprocess:
    """Runs the steps of each feature, in order, over the rows that are stored.

    Neighbouring features with the same steps are transformed in one call, as more rows. What has no
    steps is passed along.

    Args:
        steps: by feature; features that a batch lacks are of no consequence.
    """

    def __init__(self, steps: Mapping[str, Sequence[Preprocessing]]) -> None:
        self._steps = {feature: tuple(chain) for feature, chain in steps.items() if chain}

    def __call__(self, batch: Batch) -> Batch:
        """The batch with transformed features; ``batch`` itself is left as it is.

        Raises:
            PluginError: a step failed, or returned no jagged int64 ids, or other rows than it got.
            DataError: a feature with weights: no step knows which weights its values would have.
        """
        return replace(
            batch,
            kjt=None if batch.kjt is None else self._transform_kjt(batch.kjt),
            ikjts=tuple(map(self._transform_ikjt, batch.ikjts)),
        )

    def _transform_ikjt(self, ikjt: InverseKeyedJaggedTensor) -> InverseKeyedJaggedTensor:
        unique = ikjt.to_unique_kjt()
        transformed = self._transform_kjt(unique)
        if transformed is unique:
            return ikjt
        return InverseKeyedJaggedTensor(
            keys=ikjt.keys(),
            values=transformed.values(),
            inverse_lookup=ikjt.inverse_lookup(),
            lengths=transformed.lengths(),
        )

    def _transform_kjt(self, kjt: KeyedJaggedTensor) -> KeyedJaggedTensor:
        changed = [key for key in kjt.keys() if key in self._steps]  # noqa: SIM118
        if not changed:
            return kjt
        if kjt.weights_or_none() is not None:
            raise DataError(
                f"features with weights cannot be transformed: {', '.join(changed)}; take them out "
                "of preprocessing, or give them no weights (no step tells the weights of its ids)"
            )
        values, lengths = zip(*self._transform_runs(kjt), strict=True)
        return KeyedJaggedTensor(
            keys=kjt.keys(),
            values=values[0] if len(values) == 1 else torch.cat(values),
            lengths=torch.cat(lengths),
            stride=kjt.stride(),
        )

    def _transform_runs(self, kjt: KeyedJaggedTensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Values and lengths of each run of features with the same steps."""
        starts, stride, first = kjt.offset_per_key(), kjt.stride(), 0
        for steps, run in groupby(kjt.keys(), lambda key: self._steps.get(key, ())):
            features = list(run)
            last = first + len(features)
            values = kjt.values()[starts[first] : starts[last]]
            lengths = kjt.lengths()[first * stride : last * stride]
            if steps:
                offsets = kjt.offsets()[first * stride : last * stride + 1] - starts[first]
                for step in steps:
                    values, offsets = _apply(step, features, values, offsets)
                lengths = torch.diff(offsets).to(lengths.dtype)
            yield values, lengths
            first = last


def _apply(
    step: Preprocessing, features: Sequence[str], values: Tensor, offsets: Tensor
) -> tuple[Tensor, Tensor]:
    of = f"of {', '.join(features)}"
    with plugin_call(step, f"transform {of}"):
        result = step.transform(values, offsets)
    if not (
        isinstance(result, tuple)
        and len(result) == 2
        and all(isinstance(part, Tensor) for part in result)
    ):
        raise PluginError(
            f"{step.name}: transform {of} returned {_form(result)}; expected a pair of tensors, "
            "values and offsets"
        )
    new_values, new_offsets = result
    if new_values.dtype != torch.int64 or new_values.dim() != 1:
        raise PluginError(
            f"{step.name}: transform {of} returned values as {_form(new_values)}; expected ids, "
            "torch.int64 [num_values]"
        )
    if new_offsets.dtype not in (torch.int32, torch.int64):
        raise PluginError(
            f"{step.name}: transform {of} returned offsets as {_form(new_offsets)}; expected "
            "torch.int64 or torch.int32"
        )
    if new_offsets.shape != offsets.shape:
        raise PluginError(
            f"{step.name} returned {new_offsets.numel() - 1} rows for {offsets.numel() - 1} {of}; "
            "preprocessing changes what is in a row, never how many rows there are"
        )
    first, last = int(new_offsets[0]), int(new_offsets[-1])
    if (first, last) != (0, new_values.numel()):
        raise PluginError(
            f"{step.name}: transform {of} returned {new_values.numel()} values and offsets from "
            f"{first} to {last}; offsets start at 0 and end at the number of values"
        )
    return new_values, new_offsets


def _form(value: object) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
