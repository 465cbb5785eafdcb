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
        carried: dict[str, list[str]] = {}
        for name in outputs:
            # TorchRec calls the outputs of a feature of several tables feature@table.
            feature, at, table = name.partition("@")
            if feature in self._carriers:
                carried.setdefault(self._carriers[feature] + at + table, []).append(name)
        rows = {carrier: outputs[carrier].values() for carrier in carried}
        for carrier, names in carried.items():
            features = [name.partition("@")[0] for name in names]
            expanded = expand(rows[carrier], [self._batch.inverse[f] for f in features])
            for name, feature, values in zip(names, features, expanded, strict=True):
                outputs[name] = JaggedTensor(
                    values=values,
                    lengths=self._batch.lengths[feature],
                    weights=self._batch.ids[feature] if self._need_indices else None,
                )
        return outputs
