"""Which features are made unique together."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.types import ParameterSharding, ShardingType
from torchrec.modules.embedding_configs import BaseEmbeddingConfig

from recd_plugins.runtime.errors import SetupError
from recd_plugins.runtime.text import shortened


@dataclass(frozen=True)
class FeatureGroups:
    """The features of a module, those of coalesced tables first.

    Attributes:
        groups: features that look up the same coalesced tables; their ids are unique together, and
            travel as those of the first one.
        others: features of the other tables.
    """

    groups: tuple[tuple[str, ...], ...]
    others: tuple[str, ...]

    @property
    def coalesced(self) -> list[str]:
        """Features of the groups, in order."""
        return [name for group in self.groups for name in group]

    @property
    def keys(self) -> list[str]:
        """All features, in order."""
        return [*self.coalesced, *self.others]

    @property
    def carriers(self) -> dict[str, str]:
        """The first feature of its group, by feature."""
        return {name: group[0] for group in self.groups for name in group}


def feature_groups(
    configs: Sequence[BaseEmbeddingConfig], coalesced: Collection[str]
) -> FeatureGroups | None:
    """Return the groups of a module; None if none of its tables is coalesced.

    Raises:
        SetupError: a feature looks up a coalesced table and one that is not, or one of them twice;
            or its name has an @.
    """
    tables: dict[str, list[str]] = {}
    for config in configs:
        for feature in config.feature_names:
            tables.setdefault(feature, []).append(config.name)
    groups: dict[tuple[str, ...], list[str]] = {}
    others = []
    for feature, names in tables.items():
        chosen = [name for name in names if name in coalesced]
        if chosen and (len(chosen) < len(names) or len({*chosen}) < len(chosen)):
            raise SetupError(
                f"feature {feature} looks up tables {', '.join(names)}, of which "
                f"{', '.join(chosen)} are coalesced: coalesce all tables of a feature or none, and "
                "name a feature once in a table"
            )
        if chosen:
            groups.setdefault(tuple(names), []).append(feature)
        else:
            others.append(feature)
    if not groups:
        return None
    refuse_at_signs(tables, "a table of their module is to be coalesced")
    return FeatureGroups(tuple(map(tuple, groups.values())), tuple(others))


def check_coalesced(
    coalesced: Collection[str], shardings: Mapping[str, ParameterSharding], *, pooled: bool
) -> None:
    """Refuse dense kernels of coalesced tables, and of bags beside them.

    Ids of data-parallel tables are not sent, and dense kernels take no variable batch.
    """
    names = [name for name in shardings if name in coalesced]
    for name, sharding in shardings.items():
        dense = (
            sharding.sharding_type == ShardingType.DATA_PARALLEL.value
            or sharding.compute_kernel == EmbeddingComputeKernel.DENSE.value
        )
        if names and dense and (pooled or name in coalesced):
            raise SetupError(
                f"table {name} is data-parallel or has a dense kernel, and is coalesced or in one "
                f"EmbeddingBagCollection with {names[0]}, which is: leave coalesce out, or shard "
                "the table in another way with the kernel fused"
            )


def refuse_at_signs(features: Iterable[str], what: str) -> None:
    """Refuse an @ in names of features if outputs are told apart as ``feature@table``.

    TorchRec (1.6 to 1.9) takes the text before the first @ for the name of a feature.
    """
    if found := sorted({name for name in features if "@" in name}):
        raise SetupError(
            f"features {shortened(found)} have an @ in their names, and {what}, for which TorchRec "
            "takes what stands before an @ for the name of a feature: rename them"
        )
