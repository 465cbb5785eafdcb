"""Preprocessing on a batch: each feature in the form it has, over the rows that are stored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins.data.apply_step import apply_step, apply_steps
from recd_plugins.data.arrow import place
from recd_plugins.data.check_numbers import all_finite
from recd_plugins.data.fitted_steps import fitted_steps
from recd_plugins.data.preprocess_partial import transform_partial
from recd_plugins.data.preprocess_unique import transform_together, with_rows
from recd_plugins.errors import DataError, PluginError
from recd_plugins.interfaces import FeatureSchema, Preprocessing, Rows
from recd_plugins.registry import RunConfig
from recd_plugins.sparse import InverseKeyedJaggedTensor, PartialInverseKeyedJaggedTensor
from recd_plugins.values.batch import Batch

# Numbers that a message shows of one row.
_MOST_SHOWN = 4

Steps = tuple[Preprocessing, ...]
_Rows = tuple[Tensor, Tensor]


def build_preprocess(registry: RunConfig, schema: FeatureSchema) -> Preprocess:
    """What the section ``preprocessing`` of a registry says of the features of ``schema``.

    Fits the steps that nobody has fitted yet.

    Raises:
        DataError: a step is fitted, and the data is missing or wrong.
        PluginError: ``fit`` failed.
        RegistryError: a pattern matches no feature, or none that its step takes.
    """
    return Preprocess(fitted_steps(registry, schema), schema.dense)


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
        #: What messages call the last step of each feature that has some.
        self.made_by = {feature: chain[-1].title for feature, chain in self._steps.items()}

    def __call__(self, batch: Batch, rows: Rows | None = None) -> Batch:
        """The batch with transformed features; ``batch`` itself is left as it is.

        Args:
            batch: what a converter made.
            rows: where it came from, for errors to name.

        Raises:
            PluginError: a step failed, or returned something other than its interface allows.
            DataError: a feature with weights: no step knows which weights its values would have; or
                a step makes a dense feature NaN or infinite.
        """
        partials, exact = self._transform_partials(batch.partials)
        return replace(
            batch,
            dense_features=self._transform_dense(batch.dense_features, rows),
            kjt=None if batch.kjt is None else self._transform_kjt(batch.kjt),
            ikjts=(*self._transform_ikjts(batch.ikjts), *exact),
            partials=partials,
        )

    def _transform_ikjts(
        self, ikjts: Sequence[InverseKeyedJaggedTensor]
    ) -> Iterator[InverseKeyedJaggedTensor]:
        """Those with the same steps in one call, if they lie one after the other in memory."""
        for steps, run in groupby(ikjts, self._common_steps):
            group = list(run)
            if steps:
                for ikjt in group:
                    self._refuse_weights(ikjt)
                yield from transform_together(steps, group)
            else:
                yield from map(self._transform_ikjt, group)

    def _common_steps(self, ikjt: InverseKeyedJaggedTensor) -> Steps | None:
        """The steps of its features, or None if they differ."""
        chains = {self._steps.get(key, ()) for key in ikjt.keys()}  # noqa: SIM118
        return chains.pop() if len(chains) == 1 else None

    def _transform_ikjt(self, ikjt: InverseKeyedJaggedTensor) -> InverseKeyedJaggedTensor:
        if self._steps.keys().isdisjoint(ikjt.keys()):
            return ikjt
        self._refuse_weights(ikjt)
        return with_rows(ikjt, *self._transform_rows(ikjt))

    def _transform_kjt(self, kjt: KeyedJaggedTensor) -> KeyedJaggedTensor:
        if self._steps.keys().isdisjoint(kjt.keys()):
            return kjt
        self._refuse_weights(kjt)
        values, lengths = self._transform_rows(kjt)
        return KeyedJaggedTensor(
            keys=kjt.keys(), values=values, lengths=lengths, stride=kjt.stride()
        )

    def _transform_partials(
        self, partials: Sequence[PartialInverseKeyedJaggedTensor]
    ) -> tuple[tuple[PartialInverseKeyedJaggedTensor, ...], tuple[InverseKeyedJaggedTensor, ...]]:
        """Partials, and the features that are exact now: a step looked beyond one id."""
        shared: list[PartialInverseKeyedJaggedTensor] = []
        exact: list[InverseKeyedJaggedTensor] = []
        for partial in partials:
            if self._steps.keys().isdisjoint(partial.keys()):
                shared.append(partial)
                continue
            still_shared, unique = transform_partial(partial, self._runs(partial.keys()))
            shared += [] if still_shared is None else [still_shared]
            exact += unique
        return tuple(shared), tuple(exact)

    def _transform_rows(self, rows: KeyedJaggedTensor | InverseKeyedJaggedTensor) -> _Rows:
        """Values and lengths of the rows that are stored, feature by feature."""
        keys, values, lengths = rows.keys(), rows.values(), rows.lengths()
        runs = list(self._runs(keys))
        if len(runs) == 1:
            return apply_steps(runs[0][1], keys, values, lengths)
        by_feature = lengths.view(len(keys), -1)
        ids_per_feature = by_feature.sum(1).tolist()
        parts: list[_Rows] = []
        feature, value = 0, 0
        for features, steps in runs:
            last = feature + len(features)
            end = value + sum(ids_per_feature[feature:last])
            parts.append(
                apply_steps(steps, features, values[value:end], by_feature[feature:last].flatten())
            )
            feature, value = last, end
        return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])

    def _runs(self, names: Sequence[str]) -> Iterator[tuple[list[str], Steps]]:
        """Neighbouring features with the same steps."""
        for steps, run in groupby(names, lambda name: self._steps.get(name, ())):
            yield list(run), steps

    def _refuse_weights(self, rows: KeyedJaggedTensor | InverseKeyedJaggedTensor) -> None:
        if rows.weights_or_none() is None:
            return
        changed = [key for key in rows.keys() if key in self._steps]  # noqa: SIM118
        raise DataError(
            f"features with weights cannot be transformed: {', '.join(changed)}; take them out "
            "of preprocessing, or give them no weights (no step tells the weights of its ids)"
        )

    def _transform_dense(self, dense: Tensor, rows: Rows | None) -> Tensor:
        if self._steps.keys().isdisjoint(self._dense):
            return dense.float()
        parts, first = [], 0
        for features, steps in self._runs(self._dense):
            part = dense[:, first : first + len(features)]
            parts.append(_transform_columns(steps, features, part, rows) if steps else part.float())
            first += len(features)
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _transform_columns(
    steps: Sequence[Preprocessing], features: Sequence[str], columns: Tensor, rows: Rows | None
) -> Tensor:
    """Apply steps to dense features, each a jagged feature with one number in each row.

    Steps compute in the dtype of ``columns``; what they make is rounded to float32.
    """
    num_rows, num_features = columns.shape
    width = 1
    values = columns.t().flatten()
    offsets = torch.arange(values.numel() + 1)
    stages = [values]
    for step in steps:
        values, offsets = apply_step(step, features, values, offsets)
        width *= step.width
        if not bool((offsets.diff() == width).all()):
            raise PluginError(
                f"{step.title}: transform of dense features {', '.join(features)} returned rows of "
                f"other lengths than {width}; its width is {step.width}: a number becomes so many"
            )
        stages.append(values)
    values = stages[-1] = values.float()
    if not all_finite(values):
        shape = (num_features, num_rows, -1)
        raise _not_finite(steps, features, [each.view(shape) for each in stages], rows)
    by_feature = values.view(num_features, num_rows, width)
    return by_feature.transpose(0, 1).reshape(num_rows, num_features * width)


def _not_finite(
    steps: Sequence[Preprocessing],
    features: Sequence[str],
    stages: Sequence[Tensor],
    rows: Rows | None,
) -> DataError:
    """For numbers ``[num_features, num_rows, width]`` before the first step and after each."""
    feature, row, _ = (~stages[-1].isfinite()).nonzero()[0].tolist()
    passed = [stage[feature, row] for stage in stages]
    # A step may mend what one before it made: that of the last run of steps is at fault.
    finite = [all_finite(numbers) for numbers in passed]
    first = len(finite) - 1 - finite[::-1].index(True) if True in finite else 0
    given, made = (
        ", ".join(f"{number:g}" for number in passed[at][:_MOST_SHOWN].tolist())
        for at in (first, first + 1)
    )
    name = features[feature]
    where = f"row {row}, column {name!r}" if rows is None else place(rows, name, row)
    return DataError(
        f"{where}: {steps[first].title} makes {made} of {given}; give it numbers that "
        "it takes (a step before it may keep them between bounds), or leave the row out"
    )
