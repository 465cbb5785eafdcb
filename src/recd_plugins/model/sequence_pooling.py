"""Sequence pooling on unique rows, with results repeated for duplicate rows."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor

from recd_plugins.config import RunConfig, at_entry
from recd_plugins.interfaces import Pooling, TargetPooling
from recd_plugins.interfaces.batch import ModelInput
from recd_plugins.interfaces.plugin import plugin_call
from recd_plugins.runtime.errors import RecdError
from recd_plugins.sparse.index_select import index_select, jagged_index_select
from recd_plugins.sparse.jagged import MeasuredRows
from recd_plugins.sparse.request_rows import RequestRows

logger = logging.getLogger(__name__)

PoolRows = Literal["unique", "all"]


@dataclass(frozen=True)
class PooledSides:
    """Pooled vectors of user features ``[U, F_user, D]`` and of other features ``[B, F, D]``.

    Vectors of a side without features are None.
    """

    user_features: tuple[str, ...]
    user: Tensor | None
    row_features: tuple[str, ...]
    rows: Tensor | None


class SequencePooling(nn.Module):
    """Pools the outputs of an EmbeddingCollection with pooling plugins.

    Create it in your model without pooling modules; ``prepare`` adds those of the run config.
    Deduplication saves compute, because pooling runs on unique rows, and only the results are
    repeated for duplicates (RecD, section 5). Except for TargetPooling, one call of
    ``Pooling.pool_groups`` pools all features of a ``pooling`` entry. On CPU, one index select
    repeats the results of features with the same inverse indices; on CUDA, of all features.

    Args:
        features: order of the features in the result.
        embedding_dim: dimension of all embeddings and pooled vectors.
        pool_rows: ``all`` restores duplicate rows by a jagged index select before pooling, with
            the same results.
    """

    def __init__(
        self, features: Sequence[str], embedding_dim: int, pool_rows: PoolRows = "unique"
    ) -> None:
        super().__init__()
        self.features = tuple(features)
        self.embedding_dim = embedding_dim
        self.pool_rows = pool_rows
        # Keys have a prefix: a ModuleDict rejects keys such as `items` that are its own attributes.
        self.poolings = nn.ModuleDict()
        self.pooled_by: dict[str, Pooling] = {}

    @property
    def targets(self) -> tuple[str, ...]:
        """Return the target features whose vectors the caller must pass to ``forward``."""
        plugins = self.pooled_by.values()
        named = (plugin.target for plugin in plugins if isinstance(plugin, TargetPooling))
        return tuple(dict.fromkeys(name for name in named if name not in self.features))

    def put(self, feature: str, plugin: Pooling) -> None:
        """Set the pooling plugin of ``feature``. Features with one plugin object share a call."""
        with plugin_call(plugin, f"build for feature {feature!r}"):
            self.poolings[_key(feature)] = plugin.build(self.embedding_dim)
        self.pooled_by[feature] = plugin

    def forward(
        self,
        embeddings: dict[str, JaggedTensor],
        batch: ModelInput,
        targets: Mapping[str, Tensor] | None = None,
        request: RequestRows | None = None,
    ) -> Tensor | PooledSides:
        """Pool all features for all rows.

        Args:
            embeddings: output of the EmbeddingCollection for ``batch.sequence_features``.
            batch: input of the model; its ``inverse_lookup`` maps rows to unique rows per feature.
            targets: dict from each name in the property ``targets`` to its vectors ``[B,
                embedding_dim]``.
            request: returns the vectors of user features for these request rows only.

        Returns:
            ``[B, num_features, embedding_dim]``, or with ``request`` a ``PooledSides``.

        Raises:
            RecdError: the vectors of a target are missing.
        """
        user = self._user_features(request)
        groups = self._groups(embeddings, batch, request, user)
        entries: dict[int, list[_Group]] = {}  # groups by plugin
        of_targets: list[tuple[_Group, TargetPooling]] = []
        for group in groups:
            if isinstance(group.plugin, TargetPooling):
                of_targets.append((group, group.plugin))
            else:
                entries.setdefault(id(group.plugin), []).append(group)
        pooled = [vectors for entry in entries.values() for vectors in self._pooled(entry)]
        first = [group for entry in entries.values() for group in entry]
        rows = tuple(name for name in self.features if name not in user)
        sizes = {user: 0 if request is None else request.num_rows, rows: batch.labels.shape[0]}
        whole, vectors = dict[tuple[str, ...], Tensor](), dict[str, Tensor]()
        if pooled and pooled[0].device.type == "cuda":
            for side, size in sizes.items():
                order = [name for name in side if any(name in each.features for each in first)]
                if order:
                    gathered = _gathered(order, first, pooled, size)
                    vectors |= zip(order, gathered.unbind(1), strict=True)
                    if len(order) == len(side):
                        whole[side] = gathered
        else:
            for group, unique in zip(first, pooled, strict=True):
                every = unique if group.inverse is None else index_select(unique, group.inverse)
                vectors |= group.each(every)
        known = {**(targets or {}), **vectors}
        if request is not None:
            of_user = {plugin.target for _, plugin in of_targets}.intersection(user)
            known |= {name: request.expand(known[name]) for name in of_user}
        for group, plugin in of_targets:
            vectors |= group.each(self._seen_by_target(group, plugin, known))
        for side in sizes:
            if side and side not in whole:
                whole[side] = torch.stack([vectors[feature] for feature in side], dim=1)
        if request is None:
            return whole[rows]
        return PooledSides(user, whole.get(user), rows, whole.get(rows))

    def _user_features(self, request: RequestRows | None) -> tuple[str, ...]:
        """Return the user features of ``request`` whose pooling is no ``TargetPooling``."""
        return tuple(
            name
            for name in self.features
            if request is not None
            and name in request.features
            and not isinstance(self.pooled_by[name], TargetPooling)
        )

    def _groups(
        self,
        embeddings: dict[str, JaggedTensor],
        batch: ModelInput,
        request: RequestRows | None,
        user: Sequence[str],
    ) -> list[_Group]:
        groups: dict[tuple[int, int, bool], _Group] = {}
        of_request: dict[int, Tensor] = {}
        for feature in self.features:
            plugin, inverse = self.pooled_by[feature], batch.inverse_lookup.get(feature)
            on_cuda = embeddings[feature].values().device.type == "cuda"
            # On CUDA, features with different inverse indices may form a group, which has a single
            # gather: equal numbers of rows are enough.
            rows = batch.unique_rows(feature, embeddings[feature], keep_empty=on_cuda)
            if inverse is not None and self.pool_rows == "all":
                every = jagged_index_select(rows, inverse)
                longest = batch.longest.get(feature)
                rows, inverse = MeasuredRows(every.values(), every.lengths(), longest), None
            if request is not None and feature in user:
                if id(inverse) not in of_request:
                    first = request.first_rows
                    of_request[id(inverse)] = first if inverse is None else inverse[first]
                inverse = of_request[id(inverse)]
            merged = on_cuda and not isinstance(plugin, TargetPooling)
            alike = -rows.lengths().numel() if merged else id(inverse)
            side = feature in user
            group = groups.setdefault((id(plugin), alike, side), _Group(plugin, inverse))
            group.add(feature, self.poolings[_key(feature)], rows, inverse)
        return list(groups.values())

    def _pooled(self, entry: list[_Group]) -> list[Tensor]:
        plugin = entry[0].plugin
        with plugin_call(plugin, _described(entry)):
            return list(plugin.pool_groups([(each.modules, each.sequences) for each in entry]))

    def _seen_by_target(
        self, group: _Group, plugin: TargetPooling, vectors: Mapping[str, Tensor]
    ) -> Tensor:
        target = vectors.get(plugin.target)
        if target is None:
            raise RecdError(
                f"{plugin.title}: the vectors of the target feature {plugin.target!r} are missing. "
                "Choose a target whose own pooling has no target, or pass targets={name: vectors} "
                "with [B, embedding_dim] to SequencePooling."
            )
        with plugin_call(plugin, _described([group])):
            return plugin.pool_for(group.modules, group.sequences, target, group.inverse)


@dataclass
class _Group:
    """Features that one pooling plugin pools in one call.

    They share inverse indices, or on CUDA have equally many rows.
    """

    plugin: Pooling
    inverse: Tensor | None
    inverses: list[Tensor | None] = field(default_factory=list)
    features: list[str] = field(default_factory=list)
    modules: list[nn.Module] = field(default_factory=list)
    sequences: list[JaggedTensor] = field(default_factory=list)

    def add(
        self, feature: str, module: nn.Module, sequence: JaggedTensor, inverse: Tensor | None
    ) -> None:
        self.inverses.append(inverse)
        self.features.append(feature)
        self.modules.append(module)
        self.sequences.append(sequence)

    def each(self, vectors: Tensor) -> dict[str, Tensor]:
        """Return a dict from feature to its slice of ``vectors`` ``[num_rows, F, dim]``."""
        return dict(zip(self.features, vectors.unbind(1), strict=True))


def _gathered(
    order: Sequence[str], groups: Sequence[_Group], pooled: Sequence[Tensor], batch_size: int
) -> Tensor:
    """Return ``[B, num_features, D]`` with a single gather from the pooled rows of all groups.

    On CUDA this launches fewer kernels than a gather per group; on CPU it is slower.
    """
    every_row = None
    index: dict[str, tuple[Tensor, int]] = {}
    start = 0
    for group, vectors in zip(groups, pooled, strict=True):
        for name, inverse in zip(group.features, group.inverses, strict=True):
            if inverse is None and every_row is None:
                every_row = torch.arange(batch_size, device=vectors.device)
            rows = every_row if inverse is None else inverse
            assert rows is not None
            index[name] = rows, start
            start += vectors.shape[0]
    # One feature after another, as plugins that pool all features in one call store the vectors.
    flat = [vectors.transpose(0, 1).flatten(0, 1) for vectors in pooled]
    places = torch._foreach_add(
        [index[name][0] for name in order], [index[name][1] for name in order]
    )
    index_of_all = torch.stack(places, dim=1).flatten()
    gathered = index_select(flat[0] if len(flat) == 1 else torch.cat(flat), index_of_all)
    return gathered.view(batch_size, len(order), -1)


def _described(groups: list[_Group]) -> str:
    return f"pooling {', '.join(repr(name) for group in groups for name in group.features)}"


def _key(feature: str) -> str:
    return f"of_{feature}"


def put_poolings(registry: RunConfig, model: nn.Module) -> None:
    """Add the pooling plugins of the run config to the SequencePooling modules of ``model``.

    Raises:
        RecdError: a sequence feature has no pooling.
        RegistryError: a pooling does not fit the model.
    """
    modules = [m for m in model.modules() if isinstance(m, SequencePooling)]
    claims = registry.claim("pooling", [f for module in modules for f in module.features])
    for module in modules:
        for feature in module.features:
            entry = claims.get(feature)
            if entry is not None:
                with at_entry(registry.path, entry):
                    module.put(feature, entry.plugin)
                logger.info("%r pools %r", entry.plugin.name, feature)
            elif feature not in module.pooled_by:
                raise RecdError(
                    f"{registry.path}: the sequence feature {feature!r} has no pooling. Add the "
                    "feature to a pooling: entry."
                )
