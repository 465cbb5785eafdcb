"""Which features are made unique together."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.types import ParameterSharding, ShardingType
from torchrec.modules.embedding_configs import BaseEmbeddingConfig

from recd_plugins.distributed.feature_names import refuse_at_signs
from recd_plugins.errors import SetupError


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
    """The groups of a module; None where none of its tables is coalesced.

    Raises:
        SetupError: a feature looks up a coalesced table and one that is not, or one of them twice;
            or its name has an @.
    """
    tables: dict[str, list[str]] = {}
    for config in configs:
        for feature in config.feature_names:
            if config.name in coalesced and config.feature_names.count(feature) > 1:
                raise SetupError(
                    f"table {config.name} is to be coalesced and has feature {feature} twice: name "
                    "it once in feature_names, or leave the table out"
                )
            tables.setdefault(feature, []).append(config.name)
    groups: dict[tuple[str, ...], list[str]] = {}
    others = []
    for feature, names in tables.items():
        chosen = [name for name in names if name in coalesced]
        if chosen and len(chosen) < len(names):
            left = ", ".join(name for name in names if name not in coalesced)
            raise SetupError(
                f"feature {feature} looks up {', '.join(chosen)}, to be coalesced, and {left}, "
                "which is not: coalesce all tables of a feature or none"
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
    """Refuse tables whose ids are not sent.

    Raises:
        SetupError: a coalesced table is data-parallel or has a dense kernel, or, of an
            EmbeddingBagCollection, another table of the module is or does.
    """
    if not (names := [name for name in shardings if name in coalesced]):
        return
    for name, sharding in shardings.items():
        replicated = sharding.sharding_type == ShardingType.DATA_PARALLEL.value
        if not replicated and sharding.compute_kernel != EmbeddingComputeKernel.DENSE.value:
            continue
        kind = "data-parallel" if replicated else "planned with the kernel dense"
        if name in coalesced:
            raise SetupError(
                f"table {name} is to be coalesced and {kind}: ids of such a table are not sent, so "
                "leave it out, or shard it in another way with the kernel fused"
            )
        if pooled:
            raise SetupError(
                f"table {name} is {kind}, in one EmbeddingBagCollection with {names[0]}, which is "
                "to be coalesced: dense kernels take no variable batch, so give it an "
                "EmbeddingBagCollection of its own"
            )
