"""The shape of ``registry.yaml``; ``recd schema`` and docs/registry.md show the descriptions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, Literal

from pydantic import (
    Field,
    ValidationInfo,
    create_model,
    field_validator,
)

from recd_plugins.built_in_kinds import BY_NAME
from recd_plugins.interfaces import Kind
from recd_plugins.registry.training_spec import Count, Spec, TrainingSpec, Width


class PluginSpec(Spec):
    """One plugin and its options."""

    use: str = Field(description="Name of the plugin: package.part.")
    options: dict[str, Any] = Field(default={}, description="Options of the plugin.")


class WrapperSpec(PluginSpec):
    """A wrapper of the dataset and its options."""

    enabled: bool = Field(default=True, description="False leaves the wrapper out.")


class DatasetSpec(PluginSpec):
    """A dataset, its options, and what is wrapped around it."""

    wrap: list[WrapperSpec] = Field(
        default=[],
        description="Wrappers, which put its rows into another order; each stands around those "
        "before it.",
    )


class EntrySpec(PluginSpec):
    """A plugin of a list."""

    enabled: bool = Field(default=True, description="False leaves the entry out.")


class FeatureEntrySpec(PluginSpec):
    """A plugin for some features."""

    features: list[str] = Field(
        min_length=1, description="Names of features; * ? and [] match as in file names."
    )
    enabled: bool = Field(default=True, description="False leaves the entry out.")


class TableEntrySpec(PluginSpec):
    """A plugin for some tables."""

    tables: list[str] = Field(
        min_length=1,
        description="Names of tables (t_<feature>); * ? and [] match as in file names.",
    )
    enabled: bool = Field(default=True, description="False leaves the entry out.")


class TableSpec(Spec):
    """Sizes of the tables that one pattern matches."""

    num_embeddings: Count = Field(description="Rows of the table.")


class ModelSpec(Spec):
    """The built-in model's kind and sizes. Each feature has a table of its own, t_<feature>."""

    architecture: Literal["dlrm", "dcn"] = Field(
        default="dlrm",
        description="How the features' vectors meet: dlrm takes dot products of all pairs, dcn a "
        "cross network.",
    )
    # FBGEMM's kernels read four scalars at a time.
    embedding_dim: Width = Field(default=16, multiple_of=4, description="Scalars in an embedding.")
    num_embeddings: Count = Field(
        default=100_000, description="Rows of a table that `tables` does not name."
    )
    tables: dict[str, TableSpec] = Field(
        default={}, description="Sizes by name or pattern of a table; the first match counts."
    )
    bottom_mlp: list[Width] = Field(
        default=[64], description="Hidden layers over dense features; embedding_dim is appended."
    )
    top_mlp: list[Width] = Field(
        default=[128, 64], description="Hidden layers over the interaction; 1 is appended."
    )
    cross_net: Literal["low_rank", "full", "vector"] = Field(
        default="low_rank",
        description="Of dcn, the weights of a cross layer: two thin matrices, one square matrix "
        "(both DCN-v2) or one vector (DCN).",
    )
    cross_layers: Width = Field(default=3, description="Of dcn, the cross layers.")
    low_rank_dim: Width | None = Field(
        default=None,
        description="Of cross_net low_rank, the thin side of its matrices; null takes a quarter of "
        "the cross network's inputs.",
    )
    bag_pooling: Literal["sum", "mean"] = Field(
        default="sum", description="Pooling of features that no pooling entry names."
    )
    pool_rows: Literal["unique", "all"] = Field(
        default="unique",
        description="Rows that pooling entries see; with all, duplicates are made again before "
        "pooling: the same results, and what deduplicated compute saves can be measured.",
    )

    @field_validator("cross_net", "cross_layers", "low_rank_dim")
    @classmethod
    def _suit_the_architecture(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse what would change nothing; fields that a file leaves out are not looked at."""
        architecture = info.data.get("architecture", "dcn")
        if architecture != "dcn":
            raise ValueError(
                f"is an option of architecture dcn, and this model's is {architecture}; leave it "
                "out, or set model.architecture: dcn"
            )
        cross_net = info.data.get("cross_net", "low_rank")
        if info.field_name == "low_rank_dim" and value is not None and cross_net != "low_rank":
            raise ValueError(
                f"is an option of cross_net low_rank, and this model's is {cross_net}; leave it out"
            )
        return value


class _Versioned(Spec):
    version: Literal[1] = Field(description="Version of this file format.")


class RegistrySpec(_Versioned):
    """What a registry file says besides plugins."""

    model: ModelSpec | None = Field(default=None, description=BY_NAME["model"].description)
    training: TrainingSpec = Field(default=TrainingSpec(), description="How training runs.")


def registry_spec(
    kinds: Iterable[Kind], data: Mapping[str, Any] | None = None, *, needs_data: bool = True
) -> type[RegistrySpec]:
    """The shape of registry files that have sections of these kinds.

    Args:
        kinds: of plugins.
        data: one file, whose model is a plugin or the built-in one; either may stand there without.
        needs_data: whether what every file of ``recd run`` names has to be there.
    """
    written = {} if data is None else data.get("model")
    plugin = isinstance(written, dict) and not written.keys().isdisjoint(PluginSpec.model_fields)
    model = PluginSpec if plugin else ModelSpec
    either = PluginSpec | ModelSpec if data is None else model
    return _registry_spec(tuple(kinds), either, needs_data)


# Making it takes longer than checking a file with it.
@lru_cache(maxsize=8)
def _registry_spec(kinds: tuple[Kind, ...], model: Any, needs_data: bool) -> type[RegistrySpec]:
    fields: dict[str, Any] = {}
    for kind in kinds:
        entry = _entry_spec(kind)
        if kind.name == "model":
            continue  # it stands in every RegistrySpec
        if kind.claims == "one" and needs_data:
            fields[kind.section] = entry, Field(description=kind.description)
        elif kind.claims in ("one", "optional one"):
            fields[kind.section] = entry | None, Field(None, description=kind.description)
        else:
            fields[kind.section] = list[entry], Field([], description=kind.description)  # type: ignore[valid-type]
    sections: Any = create_model("Sections", __base__=_Versioned, **fields)
    of_model: Any = model | None, RegistrySpec.model_fields["model"]
    # Fields stand in the order of the bases, the last one's first: version, sections, model.
    return create_model(
        "RegistrySpec",
        __base__=(RegistrySpec, sections),
        __doc__="A registry file. Sections stand in the order in which data meets them.",
        model=of_model,
    )


def _entry_spec(kind: Kind) -> type[PluginSpec]:
    """What an entry of a section is."""
    if kind.name == "dataset":
        return DatasetSpec
    if kind.claimed is not None:
        return FeatureEntrySpec if kind.claimed == "feature" else TableEntrySpec
    return EntrySpec if kind.claims == "list" else PluginSpec
