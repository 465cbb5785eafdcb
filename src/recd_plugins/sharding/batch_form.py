"""Converts every batch of a sharded module to one form: deduplicated or plain.

A deduplicated KeyedJaggedTensor stores each distinct row once and has ``inverse_indices``. A plain
one stores all rows. TorchRec (1.6 to 1.9) builds a module's input dist for the form and feature
order of its first batch. A later batch in the other form fails, and another feature order silently
looks up wrong tables. TorchRec also divides by the number of rows. A batch without rows therefore
gets one empty row, which is removed from the output.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionContext
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionContext
from torchrec.distributed.types import ShardedModule
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from recd_plugins.compat.mean_pooling import refuse_weighted_mean, with_inverse_indices_of
from recd_plugins.runtime.errors import ExactnessError, SetupError
from recd_plugins.runtime.rank_agreement import all_gather_object
from recd_plugins.runtime.text import shortened
from recd_plugins.sharding.coalesced.input_dist import Coalesced, refuse_at_signs
from recd_plugins.sparse.deduplicated_kjt import repeat_rows, unique_rows
from recd_plugins.sparse.jagged import plain_kjt, with_fields

logger = logging.getLogger(__name__)

# an attribute, so that copies of the module keep it
_MARK = "recd_accepts_deduplicated"


class BatchForm:
    """Converts all batches of a module to the form of its first batch: deduplicated or plain.

    ``plain_only`` is the reason why every batch must be plain, or "" if no such reason exists. The
    ranks of ``group`` agree on the form of the first batch.
    """

    def __init__(
        self,
        name: str,
        plain_only: str = "",
        features: Iterable[str] = (),
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.name = f"module {name!r}"
        self.plain_only = plain_only
        self._features = tuple(features)
        self._group = group
        self._keys: list[str] = []
        self._variable: bool | None = None
        self._order: list[str] = []
        self._told = False

    @property
    def takes_unique_rows(self) -> bool:
        """Return True if the module looks up only the unique rows of deduplicated batches."""
        return not self.plain_only or isinstance(self, StoredRows)

    def ordered(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Return ``features`` reordered to the feature order of the module's first batch.

        Raises:
            ExactnessError: a feature is missing, or the batch is deduplicated and its order
                differs.
        """
        keys = features.keys()
        if keys == self._keys:
            return features
        if missing := [name for name in self._keys or self._features if name not in keys]:
            raise ExactnessError(
                f"{self.name}: the batch lacks the features {shortened(missing)} and has only "
                f"{shortened(keys)}. Pass every feature "
                f"{'of the first batch' if self._keys else 'that the tables look up'}."
            )
        if not self._keys:
            self._keys = list(keys)
            return features
        if features.variable_stride_per_key():
            raise ExactnessError(
                f"{self.name}: the first batch has the features {shortened(self._keys)} in this "
                f"order, but this deduplicated batch has {shortened(keys)}. Use the same feature "
                "order in all batches."
            )
        return features.permute([keys.index(name) for name in self._keys])

    def fit(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Convert ``features`` to the form (deduplicated or plain) of the module's first batch.

        Raises:
            ExactnessError: inverse indices are missing.
            SetupError: the first batch is deduplicated, and a feature name contains "@".
        """
        variable = features.variable_stride_per_key()
        if self._variable is None:
            self._begin(features)
        if variable == self._variable:
            return self._in_order(features) if variable else features
        if not variable:
            return _stored_once(features, self._order)
        if features.inverse_indices_or_none() is None:
            raise ExactnessError(
                f"{self.name}: the batch has stride_per_key_per_rank but no inverse_indices, so "
                "its rows cannot be expanded. Pass both fields, or pass a plain batch."
            )
        if not self._told:
            self._told = True
            first = (
                "because the first batch was plain. Deduplicate all training and evaluation batches"
            )
            why = self.plain_only or first
            logger.warning("%s: deduplicated batches are expanded to all rows, %s", self.name, why)
        return repeat_rows(features)

    def _begin(self, features: KeyedJaggedTensor) -> None:
        variable = features.variable_stride_per_key() and not self.plain_only
        if self._group is not None and not self.plain_only:
            step = f"the form of the first batch of {self.name}"
            forms = all_gather_object(step, (variable, features.values().dtype), self._group)
            variable = any(each for each, _ in forms)
            if len(types := {kind for _, kind in forms}) > 1:
                raise SetupError(
                    f"{self.name}: the dtype of the ids differs between ranks "
                    f"({' and '.join(map(str, types))}). Use the same integer dtype on all ranks."
                )
        self._variable = variable
        if variable:
            looked_up = self._features or features.keys()
            refuse_at_signs(looked_up, f"batches of {self.name} are deduplicated")
            names, _ = features.inverse_indices_or_none() or (features.keys(), None)
            self._order = list(names)  # TorchRec keeps it too

    def _in_order(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        names, _ = features.inverse_indices_or_none() or (self._order, None)
        if names == self._order:
            return features
        if missing := sorted({*self._order} - {*names}):
            raise ExactnessError(
                f"{self.name}: the batch has no inverse_indices for the features "
                f"{shortened(missing)}, but the first batch had. Pass inverse_indices for the same "
                "features in all batches."
            )
        return with_inverse_indices_of(features, self._order)


class StoredRows(BatchForm):
    """Converts a deduplicated batch to a plain batch that consists of its unique rows."""

    def fit(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Return the unique rows as a plain batch; features with fewer rows get empty rows."""
        keys = features.keys()
        chosen = [key for key in keys if key in self._features]
        if features.variable_stride_per_key():
            rows = features.to_dict()
            most = max(len(rows[key].lengths()) for key in chosen)
            plain = plain_kjt(chosen, [rows[key] for key in chosen], most)
            assert plain is not None, "it has features"
            return plain
        # TorchRec keeps to the places of features, so these are as in deduplicated batches.
        if len(chosen) == len(keys):
            return features
        return features.permute([keys.index(key) for key in chosen])


def set_accepts_deduplicated(module: nn.Module) -> None:
    """Mark an EmbeddingCollection whose callers accept one output row per unique input row."""
    setattr(module, _MARK, True)


def accepts_deduplicated(module: Any) -> bool:
    """Return True if ``set_accepts_deduplicated`` marked the module or its unsharded original."""
    return getattr(module, _MARK, False) or returns_unique_rows(module)


def returns_unique_rows(module: Any) -> bool:
    """Return True if a sharded module returns one output row per unique row of a batch."""
    return isinstance(getattr(module, "form", None), StoredRows)


def refuse_lost_weights(features: KeyedJaggedTensor, means: Sequence[str]) -> None:
    """Check the id weights of ``features``. ``means`` are the module's tables with mean pooling.

    Raises:
        ExactnessError: the weights need a gradient, which TorchRec drops, or ``means`` is not
            empty.
    """
    weights = features.weights_or_none()
    if weights is None:
        return
    if weights.requires_grad:
        raise ExactnessError(
            f"the weights of the features {', '.join(map(repr, features.keys()))} require a "
            "gradient, but TorchRec's input dist drops this gradient. Use a "
            "FeatureProcessedEmbeddingBagCollection, or detach the weights."
        )
    refuse_weighted_mean(means)


def refuse_inverse_indices(
    features: KeyedJaggedTensor, *, allow_variable_batch: bool = False
) -> None:
    """Raise an error if an EmbeddingCollection would ignore the inverse indices of a batch.

    An unsharded EmbeddingCollection always ignores them. A sharded one ignores them if the batch
    has no ``stride_per_key_per_rank``.
    """
    variable = features.variable_stride_per_key()
    if variable and allow_variable_batch:
        return
    if variable or features.inverse_indices_or_none() is not None:
        raise ExactnessError(
            "an EmbeddingCollection got a deduplicated KeyedJaggedTensor and would ignore its "
            "inverse_indices. Pass all rows, or use recd_plugins.PooledSequences. With "
            "recd run, pass batch.sequence_features."
        )


def keep_inverse_indices(features: KeyedJaggedTensor) -> None:
    """Call ``record_stream`` on the inverse indices, because TorchRec 1.6 to 1.9 does not."""
    indices = features.inverse_indices_or_none()
    if indices is not None and indices[1].is_cuda:
        indices[1].record_stream(torch.cuda.current_stream())


def fit_batches(
    sharded: ShardedModule[Any, Any, Any, Any],
    form: BatchForm,
    *,
    remaps: bool = False,
    needs_rows: bool = False,
    means: Sequence[str] | None = None,
) -> None:
    """Make a sharded TorchRec module convert each input batch with ``form``, in place.

    ``remaps`` means that the module remaps ids and therefore needs int64 ids. ``needs_rows``
    refuses deduplicated batches without rows. ``means`` are the tables for ``refuse_lost_weights``,
    if any.
    """
    input_dist, look_up = sharded.input_dist, sharded.compute_and_output_dist

    def fitted(ctx: Any, features: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(features, KeyedJaggedTensor):
            if form.takes_unique_rows:
                features = unique_rows(features)
            keep_inverse_indices(features)
            features = form.fit(form.ordered(features))
            if means is not None:
                refuse_lost_weights(features, means)
            if needs_rows and features.variable_stride_per_key() and not num_rows(features):
                raise ExactnessError(
                    f"{form.name}: the deduplicated batch has no rows, but TorchRec's "
                    f"{type(sharded).__name__} needs rows. Pass at least one row on every rank."
                )
            if remaps and features.values().dtype == torch.int32:
                features = with_fields(features, values=features.values().long())
        return input_dist(ctx, features, *args, **kwargs)

    def computed(ctx: Any, features: Any) -> Any:
        set_unique_strides(ctx, features)
        return look_up(ctx, features)

    sharded.form = form
    # Found before the class's by its forward and by train pipelines.
    sharded.input_dist, sharded.compute_and_output_dist = fitted, computed


def _stored_once(features: KeyedJaggedTensor, order: list[str]) -> KeyedJaggedTensor:
    """Add inverse indices for the features in ``order`` to a plain batch; keep duplicate rows."""
    rows = features.stride()
    every_row = torch.arange(rows, device=features.device())
    return with_fields(
        features,
        stride=None,
        stride_per_key_per_rank=[[rows]] * len(features.keys()),
        inverse_indices=(order, every_row.repeat(len(order), 1)),
    )


@dataclass
class _ExactContext:
    """Mixin for TorchRec's module contexts that adds data about the local batch.

    ``no_rows`` is True if the batch was empty and got an empty row.
    """

    coalesced: Coalesced | None = None
    no_rows: bool = False

    def record_stream(self, stream: torch.Stream) -> None:
        """Record that ``stream`` uses the context's tensors, as ``Tensor.record_stream`` does."""
        super().record_stream(stream)  # type: ignore[misc]
        if self.coalesced is not None:
            self.coalesced.record_stream(stream)


@dataclass
class ExactBagContext(_ExactContext, EmbeddingBagCollectionContext):
    """EmbeddingBagCollectionContext plus data to expand distinct ids to all ids of the batch."""


@dataclass
class ExactSequenceContext(_ExactContext, EmbeddingCollectionContext):
    """EmbeddingCollectionContext plus data to expand distinct ids to all ids of the batch."""

    def __post_init__(self) -> None:
        if not is_dataclass(EmbeddingCollectionContext):  # TorchRec 1.6
            EmbeddingCollectionContext.__init__(self)


def set_unique_strides(ctx: Any, features: KJTList) -> None:
    """Store in ``ctx``, a TorchRec module context, how many unique rows each rank sent.

    In TorchRec 1.6 to 1.9, ``attach`` of a train pipeline replaces the context of batches in
    flight, so the new context lacks these numbers.
    """
    if not getattr(ctx, "variable_batch_per_feature", False):
        return
    for kjt, context in zip(features, ctx.sharding_contexts, strict=False):
        strides = kjt.stride_per_key_per_rank() if kjt.variable_stride_per_key() else []
        if context is not None and strides and not context.batch_size_per_rank_per_feature:
            context.batch_size_per_rank_per_feature = [
                list(each) for each in zip(*strides, strict=True)
            ]


def num_rows(features: KeyedJaggedTensor) -> int:
    """Return the number of rows of the batch, including duplicates of a deduplicated batch."""
    indices = features.inverse_indices_or_none()
    return features.stride() if indices is None else indices[1].shape[1]


def with_an_empty_row(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Add one empty row per feature to a batch without rows; it stays deduplicated if it was."""
    num_keys, indices = len(features.keys()), features.inverse_indices_or_none()
    variable = features.variable_stride_per_key()
    return with_fields(
        features,
        lengths=features.lengths().new_zeros(num_keys),
        offsets=None,
        stride=None if variable else 1,
        stride_per_key_per_rank=[[1]] * num_keys if variable else None,
        inverse_indices=indices and (indices[0], indices[1].new_zeros(num_keys, 1)),
    )


def pooled_without_rows(embeddings: KeyedTensor) -> KeyedTensor:
    """Remove the row that ``with_an_empty_row`` added from pooled embeddings."""
    return KeyedTensor(
        keys=embeddings.keys(),
        length_per_key=embeddings.length_per_key(),
        values=embeddings.values()[:0],
    )


def without_rows(embeddings: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
    """Remove the row that ``with_an_empty_row`` added from sequence embeddings."""
    return {
        name: JaggedTensor(
            rows.values(), weights=rows.weights_or_none(), lengths=rows.lengths()[:0]
        )
        for name, rows in embeddings.items()
    }
