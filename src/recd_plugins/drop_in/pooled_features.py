"""The features of a model that may come deduplicated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from recd_plugins.distributed.other_sharders import why_plain
from recd_plugins.distributed.stored_rows import takes_stored_rows
from recd_plugins.errors import SetupError
from recd_plugins.model_tables import embedding_modules


@dataclass(frozen=True)
class PooledFeatures:
    """Which features have rows that are pooled by a module that takes unique ones.

    Attributes:
        features: of each module with such features, by its path.
        names: of those.
        sequences: those of them that a PooledSequences looks up, and pools after that.
        expanded: the other features that the model looks up in modules that are sharded, with why:
            their modules get all rows, whatever the form of the batch.
        unsharded: features of modules that take a batch as it comes, and which module that is.
    """

    features: dict[str, frozenset[str]]
    names: frozenset[str]
    sequences: frozenset[str]
    expanded: dict[str, str]
    unsharded: dict[str, str]

    @classmethod
    def of(cls, model: nn.Module) -> Self:
        """Those of a model that is not sharded.

        Raises:
            SetupError: it has no embedding module, as one has that is sharded already.
        """
        names, sequences = set[str](), set[str]()
        expanded, unsharded = dict[str, str](), dict[str, str]()
        by_path = dict[str, frozenset[str]]()
        modules = list(embedding_modules(model))
        if not modules:
            raise SetupError(
                "the model has no EmbeddingBagCollection or EmbeddingCollection: take the model "
                "before DistributedModelParallel has sharded it"
            )
        for module in modules:
            features = {feature for table in module.tables for feature in table.features}
            if _is_subclass(module.shardable):
                unsharded |= dict.fromkeys(features, module.why_left)
            elif takes_stored_rows(module.shardable):
                names |= features
                sequences |= features
                by_path[module.path] = frozenset(features)
            elif isinstance(module.shardable, EmbeddingCollection):
                why = "as an EmbeddingCollection has rows for ids; PooledSequences pools them"
                expanded |= dict.fromkeys(features, why)
            elif why := why_plain(module.shardable):
                expanded |= dict.fromkeys(features, why)
            else:
                names |= features
                by_path[module.path] = frozenset(features)
        return cls(by_path, frozenset(names), frozenset(sequences), expanded, unsharded)

    def why_not(self, keys: Sequence[str]) -> str:
        """Why a KeyedJaggedTensor of these features stays plain; empty where it need not."""
        if not any(key in self.names for key in keys):
            return "none of its features is pooled by an EmbeddingBagCollection or PooledSequences"
        if twice := [key for key, count in Counter(keys).items() if count > 1]:
            return f"its feature {twice[0]} is there twice"
        return ""


def _is_subclass(module: nn.Module) -> bool:
    return isinstance(module, EmbeddingBagCollection | EmbeddingCollection) and type(
        module
    ) not in (EmbeddingBagCollection, EmbeddingCollection)
