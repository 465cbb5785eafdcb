"""Output of a coalesced EmbeddingCollection."""

from __future__ import annotations

from torchrec.distributed.types import LazyAwaitable
from torchrec.sparse.jagged_tensor import JaggedTensor

from recd_plugins.distributed.coalesced.groups import FeatureGroups
from recd_plugins.distributed.coalesced.input_dist import Coalesced
from recd_plugins.distributed.coalesced.rows import expand


class CoalescedSequences(LazyAwaitable[dict[str, JaggedTensor]]):
    """The embeddings of all ids, from those of the unique ones.

    Args:
        unique: of the module with unique ids.
        batch: what stayed on this rank.
        groups: of the module's features.
        need_indices: as EmbeddingCollection has it: outputs have the ids as weights.
    """

    def __init__(
        self,
        unique: LazyAwaitable[dict[str, JaggedTensor]],
        batch: Coalesced,
        groups: FeatureGroups,
        need_indices: bool,
    ) -> None:
        super().__init__()
        self._unique = unique
        self._batch = batch
        self._carriers = groups.carriers
        self._need_indices = need_indices

    def _wait_impl(self) -> dict[str, JaggedTensor]:
        outputs = dict(self._unique.wait())
        carried: list[tuple[str, str, str]] = []
        for name in outputs:
            # TorchRec calls the outputs of a feature of several tables feature@table.
            feature, at, table = name.partition("@")
            if feature in self._carriers:
                carried.append((name, feature, self._carriers[feature] + at + table))
        sources = list(dict.fromkeys(carrier for _, _, carrier in carried))
        expanded = expand(
            [outputs[carrier].values() for carrier in sources],
            [sources.index(carrier) for _, _, carrier in carried],
            [self._batch.inverse[feature] for _, feature, _ in carried],
        )
        for (name, feature, _), values in zip(carried, expanded, strict=True):
            outputs[name] = JaggedTensor(
                values=values,
                lengths=self._batch.lengths[feature],
                weights=self._batch.ids[feature] if self._need_indices else None,
            )
        return outputs
