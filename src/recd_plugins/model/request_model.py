"""``RequestModel``: base class of ranking models that compute user layers once per request."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from recd_plugins.runtime.text import did_you_mean, shortened
from recd_plugins.sparse.deduplicated_kjt import unique_rows
from recd_plugins.sparse.jagged import runs_of_equal_rows
from recd_plugins.sparse.request_rows import RequestRows

Vectors: TypeAlias = KeyedTensor | Mapping[Any, Tensor]


class RequestModel(nn.Module, ABC):
    """A ranking model that runs ``user`` once per request and ``candidate`` on all rows.

    Results equal those of a model that computes all layers per row, up to floating-point rounding.
    Dropout in ``user`` draws one mask per request row. Batch normalization in ``user`` weights each
    request row by its number of batch rows.

    Example::

        class Ranker(RequestModel):
            def __init__(self, tables):
                super().__init__()
                self.bags = EmbeddingBagCollection(tables=tables)
                self.encoder = nn.Sequential(nn.Linear(32, 64), nn.ReLU())
                self.head = nn.Linear(64 + 16, 1)

            def look_up(self, batch):
                return self.bags(batch.sparse_features)

            def user(self, batch):
                vectors = [batch.vectors["user"], batch.vectors["clicks"]]
                return self.encoder(torch.cat(vectors, dim=1))

            def candidate(self, batch, user):
                vectors = [user.expanded, batch.vectors["item"]]
                return self.head(torch.cat(vectors, dim=1)).squeeze(1)
    """

    def look_up(self, batch: Any) -> Vectors:  # noqa: ARG002
        """Return the embeddings of user and candidate features, ``[B, D]`` by feature name.

        Call each embedding module here, and only once: train pipelines require it.
        """
        return {}

    @abstractmethod
    def user(self, batch: UserBatch) -> Any:
        """Return tensors ``[U, ...]`` computed from user features, in any dict, list or tuple."""

    @abstractmethod
    def candidate(self, batch: CandidateBatch, user: UserSide) -> Tensor:
        """Return the logits, ``[B]`` or ``[B, T]`` for T tasks, given the output of ``user``."""

    def request_rows(self, batch: Any) -> RequestRows | None:
        """Return the request rows of a batch. None computes ``user`` for each batch row.

        By default this is ``batch.request``, which ``recd run`` sets. Override it for other batch
        types, for example with ``request_rows(batch.sparse, ["user", "clicks"])``.
        """
        request: RequestRows | None = batch.request
        return request

    def loss(self, logits: Tensor, batch: Any) -> Tensor:
        """Return the scalar mean loss. The default is binary cross-entropy."""
        return F.binary_cross_entropy_with_logits(logits, batch.labels)

    def scores(self, batch: Any) -> Tensor:
        """Return the logits of all rows, ``[B]`` or ``[B, T]`` for T tasks."""
        request, vectors = self.request_rows(batch), self.look_up(batch)
        with self._normalizing(request):
            try:
                user = self.user(UserBatch(batch, vectors, request))
            except RuntimeError as error:
                if isinstance(request, RequestRows):
                    error.add_note(
                        f"tensors of the batch have {request.inverse.numel()} rows, but vectors in "
                        f"user() have {request.num_rows}. Read other tensors with batch.select()"
                    )
                raise
        return self.candidate(CandidateBatch(batch, vectors), UserSide(user, request))

    def forward(self, batch: Any) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """Return the loss, and detached loss, logits and labels, ``[B]`` or ``[B, T]``."""
        logits = self.scores(batch)
        loss = self.loss(logits, batch)
        return loss, (loss.detach(), logits.detach(), batch.labels)

    def _normalizing(self, request: RequestRows | None) -> AbstractContextManager[Any]:
        if not self._normalizes or not self.training or not isinstance(request, RequestRows):
            return nullcontext()
        return _BatchNormPerRow(request)

    @cached_property
    def _normalizes(self) -> bool:
        return any(isinstance(module, _BatchNorm) for module in self.modules())


class CandidateBatch:
    """Wraps the model's input for ``RequestModel.candidate``.

    ``vectors`` is the output of ``look_up``, with B rows. Other attributes are those of the input.
    """

    def __init__(self, batch: Any, vectors: Vectors | UserVectors) -> None:
        self._batch, self.vectors = batch, vectors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batch, name)


class UserBatch(CandidateBatch):
    """Wraps the model's input for ``RequestModel.user``.

    ``vectors`` has the embeddings of user features by name, ``[U, D]``. Other attributes are those
    of the input and have B rows.
    """

    def __init__(self, batch: Any, vectors: Vectors, request: RequestRows | None) -> None:
        super().__init__(batch, UserVectors(vectors, request))
        self.request = request

    def select(self, rows: Tensor) -> Tensor:
        """Return one row per request of a tensor ``[B, ...]``, as ``[U, ...]``.

        Raises:
            ValueError: rows of one request differ. CUDA raises a device-side assertion instead.
        """
        return _select(rows, self.request)


class UserVectors:
    """Embeddings of user features by name, one row per request row."""

    def __init__(self, vectors: Vectors, request: RequestRows | None) -> None:
        self._vectors, self._request = vectors, request

    def __getitem__(self, feature: str) -> Tensor:
        """Return ``[U, D]``. Raises LookupError if ``feature`` is not a user feature."""
        try:
            rows = self._vectors[feature]
        except KeyError:
            names = list(self._vectors.keys())
            hint = did_you_mean(feature, names) or f". It has {shortened(names)}"
            raise LookupError(f"batch.vectors has no feature {feature!r}{hint}") from None
        return _select_feature(rows, feature, self._request)


class UserSide:
    """Output of ``RequestModel.user``, as ``RequestModel.candidate`` receives it.

    Attributes:
        unique: the output for the U request rows, ``[U, ...]``.
        request: the request rows of the batch; None if ``unique`` has all B rows.
    """

    def __init__(self, unique: Any, request: RequestRows | None) -> None:
        self.unique, self.request = unique, request

    @cached_property
    def expanded(self) -> Any:
        """The output with each request row repeated for its batch rows, ``[B, ...]``."""
        if self.request is None:
            return self.unique
        return tree_map(self.request.expand, self.unique)


def request_rows(
    features: KeyedJaggedTensor, names: Iterable[str], dense: Tensor | None = None
) -> RequestRows | None:
    """Return request rows: one per run of adjacent rows with equal user features.

    Args:
        features: a deduplicated batch, from ``Wrapped.dedup``.
        names: sparse user features, such as the user's id and history.
        dense: dense user features, ``[B, n]``.

    Returns:
        The request rows, or None if the batch is not deduplicated. Synchronizes with CUDA.
    """
    unique = unique_rows(features)
    indices = unique.inverse_indices_or_none()
    if indices is None:
        return None
    place = {name: row for row, name in enumerate(indices[0])}
    chosen = tuple(names)
    if unknown := [name for name in chosen if name not in place]:
        hint = did_you_mean(unknown[0], [*place]) or f". It has {shortened([*place])}"
        raise LookupError(f"request_rows: the batch has no feature {unknown[0]!r}{hint}")
    columns = [indices[1][place[name]] for name in chosen]
    columns += [] if dense is None else dense.unbind(1)
    first_rows, inverse = runs_of_equal_rows(columns)
    return RequestRows(inverse, first_rows, chosen)


def _select(rows: Tensor, request: RequestRows | None) -> Tensor:
    if request is None:
        return rows
    unique = request.select(rows)
    equal = (request.expand(unique) == rows).unsqueeze(-1).flatten(1).all(1)
    if rows.device.type != "cpu" or torch.compiler.is_exporting():
        torch._assert_async(equal.all())
    elif not bool(equal.all()):
        row = int((~equal).nonzero()[0])
        first = int(request.first_rows[request.inverse[row]])
        values = rows[[first, row]].unsqueeze(-1).flatten(1)
        column = int((values[0] != values[1]).nonzero()[0])
        one, other = values[:, column].tolist()
        raise ValueError(
            f"batch.select: rows {first} and {row} are the same request, but column {column} has "
            f"{one!r} and {other!r}. Read it in candidate()"
        )
    return unique


def _select_feature(rows: Tensor, feature: str, request: RequestRows | None) -> Tensor:
    if request is None:
        return rows
    if feature not in request.features:
        raise LookupError(
            f"batch.vectors: {feature!r} is not a user feature; these are "
            f"{shortened(request.features)}. Read it in candidate()"
        )
    return request.select(rows)


# Train pipelines trace `forward` with symbolic batches, which these functions cannot inspect.
torch.fx.wrap("request_rows")
torch.fx.wrap("_select")
torch.fx.wrap("_select_feature")


class _BatchNormPerRow(TorchFunctionMode):
    """Expands request rows to batch rows for batch normalization, so statistics cover all rows."""

    def __init__(self, request: RequestRows) -> None:
        super().__init__()
        self._request = request

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not F.batch_norm or not kwargs["training"]:
            return func(*args, **kwargs)
        rows, *others = args
        return self._request.select(func(self._request.expand(rows), *others, **kwargs))
