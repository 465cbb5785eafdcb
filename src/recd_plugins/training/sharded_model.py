"""Builds a sharded model and its optimizer from a run config, with or without plugins."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Literal

import click
import torch
import torch.distributed as dist
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ModuleSharder, ShardingEnv
from torchrec.optim.keyed import CombinedOptimizer

from recd_plugins.config import RunConfig
from recd_plugins.interfaces import Candidate, FeatureSchema, PlanContext, Table
from recd_plugins.interfaces.model_tables import embedding_modules, tables_of
from recd_plugins.model.build import build_model
from recd_plugins.model.deferred_tables import deferred_tables
from recd_plugins.planning.choosing import (
    activation_bytes,
    choose,
    chooser_of,
    prepare,
    with_offers,
    without_plugins,
)
from recd_plugins.planning.compute import measure_compute
from recd_plugins.planning.plan_context import RegistryData, plan_context
from recd_plugins.planning.prepared import Prepared, prepare_parts
from recd_plugins.planning.topologies import TopologySpec, machine_of
from recd_plugins.runtime.errors import PluginError
from recd_plugins.runtime.generators import generators_kept, seed_generators
from recd_plugins.runtime.rank_agreement import all_gather_object, check_agreement
from recd_plugins.runtime.text import shortened
from recd_plugins.sharding.build import build_sharders
from recd_plugins.sharding.gradient_dedup import all_gradients_sent, gradient_dedup_pays
from recd_plugins.sharding.sharders import stock_sharders
from recd_plugins.training.checkpoint_files import DamagedError
from recd_plugins.training.dense_gradients import summed_in_fixed_buckets
from recd_plugins.training.identity import (
    identity_of_data,
    newest_first,
    read_identity,
    read_schema,
    sharding_identity,
)
from recd_plugins.training.optimizer import build_optimizer
from recd_plugins.training.rank_state import broadcast_state, copy_weights, first_weights

logger = logging.getLogger(__name__)

#: ``plugins`` trains with the registry's plugins, ``baseline`` with plain TorchRec on the same
#: data.
Variant = Literal["plugins", "baseline"]


@dataclass(frozen=True)
class ShardedModel:
    """A DistributedModelParallel, its optimizer, tables and planning inputs."""

    prepared: Prepared
    dmp: DistributedModelParallel
    optimizer: CombinedOptimizer
    tables: tuple[Table, ...]
    context: PlanContext | None


def build_sharded_model(
    registry: RunConfig,
    variant: Variant,
    device: torch.device,
    *,
    sharders: Sequence[ModuleSharder[torch.nn.Module]] | None = None,
    topology: TopologySpec | None = None,
) -> ShardedModel:
    """Build, prepare, plan and shard the model of a run config. All ranks must call this.

    The initial weights depend only on the seed, not on variant and plan. The baseline trains the
    same model on plain KeyedJaggedTensors with TorchRec's own sharders. Its planner avoids
    shardings that TorchRec trains incorrectly on CPU. ``sharders`` replace those of the variant.
    The default ``topology`` is that of this machine.
    """
    schema = registry.dataset.schema()
    seen = {"the schema": schema, "the rows": identity_of_data(registry.dataset)}
    check_agreement("reading the data", seen)
    prepared, context = _prepared(registry, schema, variant, device, topology)
    model = prepared.model
    tables = tuple(tables_of(model))  # sharding replaces its modules in place
    own = stock_sharders(registry.training) if variant == "baseline" else build_sharders(prepared)
    chosen = list(sharders) if sharders is not None else own
    profile = prepared.measured_profile() if context is None else context.data.profile()

    def activations() -> int:
        with generators_kept():
            kept = measure_compute(registry)
        return activation_bytes(prepared, profile, kept, registry.training.batch_size)

    planner = prepared.planner(
        None if topology is None else topology.to_torchrec(),
        profile=profile,
        activation_bytes=activations,
        world_size=dist.get_world_size(),
        device=device,
        replicate=True,  # build_optimizer has one rule for all tables
    )
    plan = planner.collective_plan(model, chosen, dist.group.WORLD)
    if extra := [name for name in model.state_dict() if name.endswith("_extra_state")]:
        raise PluginError(
            f"{registry.path}: the model has extra state {shortened(extra)} (get_extra_state), "
            "which checkpoints do not store. Keep the state in buffers."
        )
    weights = first_weights(model)
    # Ranks measure slightly different costs: rank 0 decides.
    if topology is None and registry.training.topology is not None:
        topology = machine_of(registry.training, device=device)
    costs = None if topology is None else topology.costs
    pays = all_gather_object("sharding the model", gradient_dedup_pays(costs))[0]
    with nullcontext() if pays else all_gradients_sent():
        dmp = DistributedModelParallel(
            module=model,
            env=ShardingEnv.from_process_group(dist.group.WORLD),
            device=device,
            plan=plan,
            sharders=chosen,
            data_parallel_wrapper=summed_in_fixed_buckets(
                always_trained=all(entry.plugin.always_trained for entry in registry.pooling)
            ),
        )
    state = dmp.state_dict()
    copy_weights(state, weights)
    # Dense weights and replicated tables.
    broadcast_state(
        each for each in state.values() if type(each) in (torch.Tensor, torch.nn.Parameter)
    )
    dmp.load_state_dict(state)  # copies of rows follow their tables
    optimizer = build_optimizer(dmp, registry.training)
    return ShardedModel(prepared, dmp, optimizer, tables, context)


def _prepared(
    registry: RunConfig,
    schema: FeatureSchema,
    variant: Variant,
    device: torch.device,
    topology: TopologySpec | None,
) -> tuple[Prepared, PlanContext | None]:
    """Build and prepare the model without allocating tables, unless a plugin reads them."""
    try:
        with deferred_tables() as deferred:
            made = _whole(registry, schema, variant, device, topology)
        why = deferred.touched
    except PluginError as error:  # a plugin may read the values of a table
        why = str(error)
    if not why:
        return made
    made = _whole(registry, schema, variant, device, topology)
    logger.warning("each rank creates the unsharded model before sharding: %s", why)
    return made


def _whole(
    registry: RunConfig,
    schema: FeatureSchema,
    variant: Variant,
    device: torch.device,
    topology: TopologySpec | None,
) -> tuple[Prepared, PlanContext | None]:
    seed_generators(registry.training.seed)
    model = build_model(registry, schema)
    modules = list(embedding_modules(model))
    if variant == "plugins":
        context = plan_context(registry, modules, topology, device=device)
        prepared = prepare(registry, model, context)
        return prepared, prepared.context
    if not registry.wrappers:
        return without_plugins(registry, model, device.type), None
    # Dataset wrappers read the table plugins of the registry, before the model changes.
    context = plan_context(registry, modules, topology, device=device)
    entries, *_ = choose(registry, model, modules, context)
    plain = without_plugins(registry, model, device.type)
    modules = list(embedding_modules(plain.model))
    data = RegistryData(replace(entries, sharding=()), modules)  # a baseline coalesces nothing
    context = plan_context(entries, modules, topology, device=device, data=data)
    return replace(plain, batch_parts=prepare_parts(entries, plain.tables, context)), None


def resume_choice(registry: RunConfig, *, quiet: bool = False, verbose: bool = True) -> RunConfig:
    """Replace a chooser, such as ``use: auto``, by its earlier choice in the newest checkpoint.

    A chooser measures candidates, so it could choose differently after each start. Return the run
    config unchanged if it has no chooser, or if its tables or plugins have changed since then.
    Print the reused sharding only if ``verbose``, and a new search unless ``quiet``.
    """
    chooser = chooser_of(registry)
    if chooser is None:
        return registry
    for checkpoint in newest_first(registry):
        try:
            identity = read_identity(checkpoint)
        except DamagedError:  # reported when weights are loaded
            continue
        entries, tables = identity["sharding"], list(identity["model"]["tables"])
        at = registry.sharding.index(chooser)
        own = sharding_identity(registry, tables)
        before, after = own[:at], own[at + 1 :]
        end = len(entries) - len(after)
        chosen = entries[at:end]
        same = end >= at and entries[:at] == before and entries[end:] == after
        sparse = tuple(registry.dataset.schema().sparse)
        installed = {each["use"] for each in chosen} <= {cls.name for cls in registry.offering}
        fits = same and installed and read_schema(checkpoint).sparse == sparse
        if not quiet and (verbose or not fits):
            uses = ", ".join(each["use"] for each in chosen) or "the planner"
            again = f"searches again, because tables or plugins differ from those in {checkpoint}"
            said = f"reuses the sharding in {checkpoint}: {uses}" if fits else again
            click.echo(f"{chooser.plugin.name!r} {said}", err=True)
        if not fits:
            return registry
        offers = [(Candidate(e["use"], e.get("options", {})), e["tables"]) for e in chosen]
        return with_offers(registry, chooser, offers)
    return registry
