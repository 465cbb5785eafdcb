"""Preprocessing on a batch: each feature in the form it has, over the rows that are stored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins.data.apply_step import apply_step
from recd_plugins.data.batch import Batch
from recd_plugins.data.feature_steps import feature_steps
from recd_plugins.errors import DataError, PluginError
from recd_plugins.interfaces import FeatureSchema, Preprocessing
from recd_plugins.sparse import InverseKeyedJaggedTensor

if TYPE_CHECKING:
    from recd_plugins.registry import Registry


def build_preprocess(registry: Registry, schema: FeatureSchema) -> Preprocess:
    """What the section ``preprocessing`` of a registry says of the features of ``schema``.

    Raises:
        RegistryError: a pattern matches no feature, or none that its step takes.
    """
    return Preprocess(feature_steps(registry, schema), schema.dense)


class Preprocess:
    """Runs the steps of each feature, in order, over the rows that are stored.

    Neighbouring features with the same steps are transformed in one call, as more rows. What has no
    steps is passed along.

    Args:
        steps: by feature; features that a batch lacks are of no consequence.
        dense: names of the columns of a batch's dense features, in order.
    """

    def __init__(
        self, steps: Mapping[str, Sequence[Preprocessing]], dense: Sequence[str] = ()
    ) -> None:
        self._steps = {feature: tuple(chain) for feature, chain in steps.items() if chain}
        self._dense = tuple(dense)

    def __call__(self, batch: Batch) -> Batch:
        """The batch with transformed features; ``batch`` itself is left as it is.

        Raises:
            PluginError: a step failed, or returned something other than its interface allows.
            DataError: a feature with weights: no step knows which weights its values would have.
        """
        return replace(
            batch,
            dense_features=self._transform_dense(batch.dense_features),
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
                    values, offsets = apply_step(step, features, values, offsets)
                lengths = torch.diff(offsets).to(lengths.dtype)
            yield values, lengths
            first = last

    def _transform_dense(self, dense: Tensor) -> Tensor:
        if self._steps.keys().isdisjoint(self._dense):
            return dense
        parts, first = [], 0
        for steps, run in groupby(self._dense, lambda name: self._steps.get(name, ())):
            features = list(run)
            part = dense[:, first : first + len(features)]
            parts.append(_transform_columns(steps, features, part) if steps else part)
            first += len(features)
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _transform_columns(
    steps: Sequence[Preprocessing], features: Sequence[str], columns: Tensor
) -> Tensor:
    """Steps over dense features, each a jagged feature with one number in each row."""
    num_rows, num_features = columns.shape
    width = 1
    values = columns.t().flatten()
    offsets = torch.arange(values.numel() + 1)
    for step in steps:
        values, offsets = apply_step(step, features, values, offsets)
        width *= step.width
        if not bool((offsets.diff() == width).all()):
            raise PluginError(
                f"{step.name}: transform of dense features {', '.join(features)} returned rows of "
                f"other lengths than {width}; its width is {step.width}: a number becomes so many"
            )
    by_feature = values.view(num_features, num_rows, width)
    return by_feature.transpose(0, 1).reshape(num_rows, num_features * width)
