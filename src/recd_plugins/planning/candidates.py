"""What is planned: the model of a registry, with its plugins and as plain TorchRec has it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn
from torchrec.distributed.planner import Topology
from torchrec.distributed.types import ModuleSharder

from recd_plugins.data.placement import placement_of
from recd_plugins.data.plain import PlainConverter
from recd_plugins.distributed.sharders import (
    ExactEmbeddingBagCollectionSharder,
    ExactEmbeddingCollectionSharder,
    stock_sharders,
)
from recd_plugins.errors import SetupError
from recd_plugins.interfaces import Table, TrainingData
from recd_plugins.model.build import build_model
from recd_plugins.model.poolings import put_poolings
from recd_plugins.model_tables import all_tables_of, names_of_several, rows_by_feature, tables_of
from recd_plugins.planning.compute import Compute, KeptActivations
from recd_plugins.planning.optimizer_entries import apply_optimizers
from recd_plugins.planning.planner import Planned, RegistryPlanner
from recd_plugins.planning.prepare import prepare
from recd_plugins.planning.prepared import Prepared
from recd_plugins.planning.setting import RegistryData, setting_of
from recd_plugins.planning.storage import activations_of_parts
from recd_plugins.planning.topologies import TopologySpec
from recd_plugins.planning.work import rows_pooled
from recd_plugins.registry import RunConfig
from recd_plugins.values.data_profile import DataProfile
from recd_plugins.words import shortened


@dataclass(frozen=True)
class Candidate:
    """A model that can be planned for any topology and batch size.

    Table parts suit one topology and batch size: see ``with_plugins``.

    Attributes:
        prepared: its model is on the meta device, so that tables of any size take no memory.
        sharders: of its embedding modules.
        profile: of the features as this model is fed them.
    """

    prepared: Prepared
    sharders: list[ModuleSharder[nn.Module]]
    profile: DataProfile

    @property
    def tables(self) -> list[Table]:
        """The embedding tables of the model, those of modules that are left to TorchRec too."""
        return all_tables_of(self.prepared.model)

    @property
    def learns_by_fbgemm(self) -> bool:
        """Whether FBGEMM's own row-wise Adagrad updates rows on a CPU, as TorchRec has it."""
        ours = ExactEmbeddingBagCollectionSharder, ExactEmbeddingCollectionSharder
        is_row_wise = self.prepared.registry.training.optimizer == "rowwise_adagrad"
        return is_row_wise and not any(isinstance(each, ours) for each in self.sharders)

    def as_plain(self) -> Candidate:
        """The same without plugins, fed plain KJTs: the baseline of ``recd run --compare``."""
        registry = self.prepared.registry
        with torch.device("meta"):
            model = build_model(registry, registry.dataset.schema())
            plain = without_plugins(registry, model)
        return Candidate(plain, stock_sharders(registry.training), self.profile.plain())

    def plan(self, topology: Topology, batch_size: int, activation_bytes: int = 0) -> Planned:
        """The plan that training makes with so many rows a rank, with room for activations.

        Raises:
            NoPlanError: no plan fits into memory.
            RecdError: plugins and tables do not go together.
        """
        planner = self._planner(topology, batch_size, activation_bytes)
        return planner.plan_in_detail(self.prepared.model, self.sharders)

    def fits(self, topology: Topology, batch_size: int, activation_bytes: int = 0) -> bool:
        """Whether ``plan`` finds one that fits into memory.

        Raises:
            RecdError: plugins and tables do not go together.
        """
        planner = self._planner(topology, batch_size, activation_bytes)
        return planner.fits(self.prepared.model, self.sharders)

    def activation_bytes(self, compute: Compute, batch_size: int) -> int:
        """What a forward pass of a rank keeps beside its lookups in sharded tables."""
        return activation_bytes(self.prepared, self.profile, compute, batch_size)

    def _planner(
        self, topology: Topology, batch_size: int, activation_bytes: int
    ) -> RegistryPlanner:
        prepared = self.prepared.with_training({"batch_size": batch_size})
        return prepared.planner(
            topology, profile=self.profile, activation_bytes=activation_bytes, replicate=True
        )


def activation_bytes(
    prepared: Prepared, profile: DataProfile, kept: KeptActivations, batch_size: int
) -> int:
    """What a forward pass of a rank keeps beside its lookups in sharded tables."""
    tables = tables_of(prepared.model)
    pooled = rows_pooled(tables, profile, kept, batch_size)
    of_parts = activations_of_parts(prepared.checked_parts, tables, profile, batch_size)
    return round(kept.rest_saved_bytes * batch_size + kept.pooling_saved_bytes * pooled + of_parts)


def with_plugins(
    registry: RunConfig, topology: TopologySpec | None = None, data: TrainingData | None = None
) -> Candidate:
    """What ``recd run`` trains.

    Table parts are made for ``topology`` and the registry's batch size.

    Args:
        registry: not prepared.
        topology: the ranks; those that ``recd run`` would start here without it.
        data: of the registry, where it was looked at already.

    Raises:
        RecdError: the registry has no model, several of its tables have one name, or the data is
            missing or wrong.
    """
    with torch.device("meta"):
        model = build_model(registry, registry.dataset.schema())
        _refuse_one_name(registry, model)
        data = data or RegistryData(registry, model)
        prepared = prepare(registry, model, setting_of(registry, model, topology, data=data))
    assert prepared.setting is not None, "it was prepared for one"
    return Candidate(prepared, prepared.sharders(), prepared.setting.data.profile())


def _refuse_one_name(registry: RunConfig, model: nn.Module) -> None:
    """Refuse tables of one name, which plans tell by it, and what comes of them."""
    if twice := names_of_several(all_tables_of(model)):
        raise SetupError(
            f"{registry.path}: several modules have tables of one name, {shortened(twice)}, and "
            "plans are told by name: give each a name of its own"
        )


def data_of_model(registry: RunConfig) -> RegistryData:
    """The training split of a registry, as the model of its ``model:`` section knows it."""
    with torch.device("meta"):
        return RegistryData(registry, build_model(registry, registry.dataset.schema()))


def without_plugins(
    registry: RunConfig, model: nn.Module, device_type: str | None = None
) -> Prepared:
    """The same data, values, model and optimizers; no deduplication, no sharding, cache or
    pipeline plugin, no overlap, which TorchRec has not, and 32 bits between ranks."""
    registry = registry.with_training({"wire": "fp32", "overlap": False})
    tables = tuple(tables_of(model))
    claims = registry.claim("sharding", [table.name for table in tables])
    placement = placement_of(model, {name: entry.plugin for name, entry in claims.items()})
    put_poolings(registry, model)
    plain = replace(
        registry,
        converter=PlainConverter(PlainConverter.Options()),
        sharding=(),
        cache=(),
        further={**registry.further, "pipeline": ()},
    )
    apply_optimizers(plain, model, list(tables), device_type, {})
    return Prepared(plain, model, placement, rows_by_feature(tables), tables)
