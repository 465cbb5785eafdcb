"""Deduplicated or plain: the form of the batches that a sharded module gets."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.types import ShardedModule
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins.distributed.exact_contexts import set_stored_rows
from recd_plugins.distributed.feature_names import refuse_at_signs
from recd_plugins.distributed.id_weights import IdWeights
from recd_plugins.distributed.mean_pooling import with_inverse_indices_of
from recd_plugins.distributed.no_rows import num_rows
from recd_plugins.distributed.rank_agreement import check_agreement, tell_all
from recd_plugins.errors import ExactnessError
from recd_plugins.sparse.deduplicated_kjt import repeat_rows, unique_rows
from recd_plugins.words import shortened

logger = logging.getLogger(__name__)


class BatchForm:
    """The one form of a module's batches, which is that of its first.

    TorchRec (1.6 to 1.9) makes a module's input dist at its first batch, for that form; batches of
    the other one fail in it with a message about something else. They are made to fit: rows that
    are stored once are repeated, or each of all rows counts as one that is stored.

    Args:
        name: of the module, for messages.
        plain_only: why its batches are always plain; empty where they need not be.
        features: that the module looks up, where ``ordered`` is to look for them.
        group: of the ranks that share the module; they agree on the form of the first batch.
    """

    def __init__(
        self,
        name: str,
        plain_only: str = "",
        features: Iterable[str] = (),
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.name = name
        self._group = group
        self.plain_only = plain_only
        self._features = tuple(features)
        self._keys: list[str] = []
        self._variable: bool | None = None
        self._order: list[str] = []
        self._told = False

    @property
    def takes_unique_rows(self) -> bool:
        """Whether the module looks up the unique rows of a deduplicated batch."""
        return not self.plain_only

    def require(self, features: object) -> None:
        """Raise where a model feeds its module a field that a batch leaves empty.

        Raises:
            ExactnessError: it does.
        """
        if features is None:
            raise ExactnessError(
                f"{self.name}, which looks up {shortened(self._features)}, got None: a batch has "
                "features of EmbeddingBagCollections in sparse_features, those of "
                "EmbeddingCollections in sequence_features"
            )

    def ordered(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """The features of a batch in the order of the first one, which TorchRec keeps to.

        What no table here looks up may come and go; where it is gone, it has no id.
        A collective call for the first one, in which ranks say what theirs is like.

        Raises:
            ExactnessError: one is missing, or those of a deduplicated batch stand in another order.
            SetupError: the first batch of another rank has other types.
        """
        keys = features.keys()
        if keys == self._keys:
            return features
        read = [name for name in self._keys if name in self._features] or self._keys
        if missing := [name for name in read or self._features if name not in keys]:
            who = "its first batch had" if self._keys else "tables here look up"
            raise ExactnessError(
                f"{self.name}: the batch has no feature {shortened(missing)}, which {who}; its "
                f"features: {shortened(keys)}"
            )
        if not self._keys:
            check_agreement(
                f"the first batch of {self.name}", {"the batch": self._said(features)}, self._group
            )
            self._keys = list(keys)
            return features
        variable = features.variable_stride_per_key()
        if variable and [name for name in keys if name in read] != read:
            raise ExactnessError(
                f"{self.name}: the features of its first batch were {shortened(self._keys)}, "
                f"those of this one {shortened(keys)}, and it is deduplicated: give all batches "
                "one order"
            )
        if variable or not set(self._keys) <= set(keys):
            return _of_keys(features, self._keys, self._order)
        return features.permute([keys.index(name) for name in self._keys])

    def _said(self, features: KeyedJaggedTensor) -> dict[str, Any]:
        weights = features.weights_or_none()
        return {
            "type of ids": features.values().dtype,
            "type of lengths": features.lengths().dtype,
            "type of weights": None if weights is None else weights.dtype,
        }

    def fit(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """``features`` in the form of the module's first batch.

        Raises:
            ExactnessError: they have to be made plain, and lack inverse indices; or these lack a
                feature that those of the first batch have.
            SetupError: the first is deduplicated, and the name of a feature has an @.
        """
        variable = features.variable_stride_per_key()
        if self._variable is None:
            self._begin(features, variable)
        if variable == self._variable:
            return self._in_order(features) if variable else features
        if not variable:
            return _stored_once(features, self._order)
        self._tell_plain()
        return _repeated(features, self.name)

    def _begin(self, features: KeyedJaggedTensor, variable: bool) -> None:
        variable = self._on_any_rank(variable)
        self._variable = variable and not self.plain_only
        if self._variable:
            looked_up = self._features or features.keys()
            refuse_at_signs(looked_up, f"batches of {self.name} are deduplicated")
            names, _ = features.inverse_indices_or_none() or (features.keys(), None)
            self._order = list(names)  # TorchRec keeps it, too

    def _tell_plain(self) -> None:
        if not self._told:
            self._told = True
            first = "as its first batch was: let that be deduplicated, of an evaluation too"
            why = self.plain_only or first
            logger.warning("%s: deduplicated batches become plain, %s", self.name, why)

    def _in_order(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Its inverse indices in the order of the first batch's, by whose places they are found."""
        names, _ = features.inverse_indices_or_none() or (self._order, None)
        if names == self._order:
            return features
        if missing := sorted({*self._order} - {*names}):
            raise ExactnessError(
                f"{self.name}: the batch has no inverse_indices of features {shortened(missing)}, "
                "which its first batch had"
            )
        return with_inverse_indices_of(features, self._order)

    def _on_any_rank(self, variable: bool) -> bool:
        """Whether a rank's first batch is deduplicated: messages of two forms would not fit."""
        if self._group is None or self.plain_only:
            return variable
        return any(tell_all(f"the form of the first batch of {self.name}", variable, self._group))


def _of_keys(features: KeyedJaggedTensor, keys: list[str], order: list[str]) -> KeyedJaggedTensor:
    """Features by name; one that the batch lacks has no id. ``order`` is of inverse indices."""
    given, strides = features.keys(), features.stride_per_key()
    variable = features.variable_stride_per_key()
    none = features.values()[:0]
    rows = dict.fromkeys(keys, 1 if variable else features.stride())
    rows |= dict(zip(given, strides, strict=True))
    lengths = {name: features.lengths().new_zeros(rows[name]) for name in keys}
    lengths |= dict(zip(given, torch.split(features.lengths(), strides), strict=True))
    ids = features.length_per_key()
    values = dict(zip(given, torch.split(features.values(), ids), strict=True))
    weights = features.weights_or_none()
    of_ids = {} if weights is None else dict(zip(given, torch.split(weights, ids), strict=True))
    inverse = features.inverse_indices_or_none()
    if inverse is not None:
        every_row = dict(zip(inverse[0], inverse[1], strict=True))
        first_row = torch.zeros_like(inverse[1][0])
        order = order or keys
        inverse = order, torch.stack([every_row.get(name, first_row) for name in order])
    return KeyedJaggedTensor(
        keys=keys,
        values=torch.cat([values.get(name, none) for name in keys]),
        weights=None
        if weights is None
        else torch.cat([of_ids.get(name, weights[:0]) for name in keys]),
        lengths=torch.cat([lengths[name] for name in keys]),
        stride=None if variable else features.stride(),
        stride_per_key_per_rank=[[rows[name]] for name in keys] if variable else None,
        inverse_indices=inverse,
    )


def _repeated(features: KeyedJaggedTensor, name: str) -> KeyedJaggedTensor:
    """A deduplicated batch with all of its rows, plain."""
    if features.inverse_indices_or_none() is None:
        raise ExactnessError(
            f"{name}: its batches are plain, and this one has stride_per_key_per_rank without "
            "inverse_indices, which say what its B rows are: give it both, or neither"
        )
    return repeat_rows(features)


def _stored_once(features: KeyedJaggedTensor, order: list[str]) -> KeyedJaggedTensor:
    """A plain batch in the form of a deduplicated one: no row is found twice."""
    num_rows = features.stride()
    every_row = torch.arange(num_rows, device=features.device())
    return KeyedJaggedTensor(
        keys=features.keys(),
        values=features.values(),
        weights=features.weights_or_none(),
        lengths=features.lengths(),
        offsets=features.offsets_or_none(),
        stride_per_key_per_rank=[[num_rows]] * len(features.keys()),
        inverse_indices=(order, every_row.repeat(len(order), 1)),
    )


def refuse_inverse_indices(
    features: KeyedJaggedTensor, *, allow_variable_batch: bool = False
) -> None:
    """Refuse an EmbeddingCollection's input whose inverse indices would be lost.

    An unsharded EmbeddingCollection ignores them, and so does a sharded one without
    ``stride_per_key_per_rank``.

    Args:
        features: the input.
        allow_variable_batch: whether a deduplicated batch has its inverse indices applied.

    Raises:
        ExactnessError: says what to feed instead.
    """
    variable = features.variable_stride_per_key()
    if variable and allow_variable_batch:
        return
    if variable or features.inverse_indices_or_none() is not None:
        raise ExactnessError(
            "an EmbeddingCollection got a deduplicated KeyedJaggedTensor and would lose its "
            "gradient or inverse. Pass all rows, or use recd_plugins.PooledSequences. In a model "
            "of recd run, pass batch.sequence_features"
        )


def keep_inverse_indices(features: KeyedJaggedTensor) -> None:
    """Keep the memory of what says where rows are until this stream is done with it.

    A batch may have been copied to a GPU on another stream, and of a KeyedJaggedTensor's tensors
    TorchRec (1.6 to 1.9) forgets these, which backward passes read.
    """
    indices = features.inverse_indices_or_none()
    if indices is not None and indices[1].is_cuda:
        indices[1].record_stream(torch.cuda.current_stream())


def fit_batches(
    sharded: ShardedModule[Any, Any, Any, Any],
    form: BatchForm,
    *,
    remaps: bool = False,
    needs_rows: bool = False,
    weights: IdWeights | None = None,
) -> None:
    """Have a sharded module of TorchRec's, which takes a KeyedJaggedTensor, get one form.

    Args:
        sharded: gets an ``input_dist`` of its own.
        form: of its batches.
        remaps: whether it maps ids to rows, which TorchRec does to 64-bit ids alone.
        needs_rows: whether TorchRec fails where a deduplicated batch has no row.
        weights: what looks at those of its batches.
    """
    input_dist = sharded.input_dist

    def fitted(ctx: Any, features: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(features, KeyedJaggedTensor):
            if form.takes_unique_rows:
                features = unique_rows(features)
            keep_inverse_indices(features)
            features = form.fit(form.ordered(features))
            if weights is not None:
                weights.check_batch(features)
            if needs_rows and features.variable_stride_per_key() and not num_rows(features):
                raise ExactnessError(
                    f"{form.name}: the batch has no row, and TorchRec's {type(sharded).__name__} "
                    "takes no such deduplicated batch: give every rank rows (drop_last of a "
                    "loader), or end the epoch for all ranks where one has none"
                )
            if remaps and features.values().dtype == torch.int32:
                features = _with_long_ids(features)
        return input_dist(ctx, features, *args, **kwargs)

    compute_and_output_dist = sharded.compute_and_output_dist

    def computed(ctx: Any, features: Any) -> Any:
        set_stored_rows(ctx, features)
        return compute_and_output_dist(ctx, features)

    sharded.form = form
    # Found before the class's by its forward and by train pipelines.
    sharded.input_dist, sharded.compute_and_output_dist = fitted, computed


def _with_long_ids(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    return with_tensors(features, features.values().long(), features.weights_or_none())


def with_tensors(
    features: KeyedJaggedTensor, values: Tensor, weights: Tensor | None
) -> KeyedJaggedTensor:
    """The same rows, of other ids or weights."""
    variable = features.variable_stride_per_key()
    return KeyedJaggedTensor(
        keys=features.keys(),
        values=values,
        weights=weights,
        lengths=features.lengths(),
        offsets=features.offsets_or_none(),
        stride=None if variable else features.stride(),
        stride_per_key_per_rank=features.stride_per_key_per_rank() if variable else None,
        inverse_indices=features.inverse_indices_or_none(),
    )
