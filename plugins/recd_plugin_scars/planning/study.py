"""Plans the caches of a registry's tables, beside a given batch or one that is searched."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from recd_plugin_scars.planning.load import TableLoad
from recd_plugin_scars.planning.order import Memory, Optimum, RowOrder, StepCosts
from recd_plugin_scars.planning.plan import STEPS, CachePlan, row_order
from recd_plugin_scars.planning.rates import rates_of
from recd_plugin_scars.planning.report import (
    CachePlanReport,
    CurvePoint,
    Limit,
    traffic_bytes,
)
from recd_plugins.api import (
    AccessProfile,
    RecdError,
    RegistryData,
    RunConfig,
    SetupError,
    Table,
    TopologySpec,
    measure_compute,
    shortened,
    size_text,
    tables_of,
    with_plugins,
    wrapped_dataset,
)

_POINTS = 64


@dataclass(frozen=True)
class CacheQuestion:
    """What is asked for.

    Attributes:
        memory: bytes of fast memory of all ranks together, for cached rows; where the batch size is
            searched, for the batch too. None: as much as pays.
        batch_size: rows of a rank; None searches it.
        largest_batch: of a rank, where it is searched.
        sample_bytes: a: what a sample takes of that memory; None counts it.
        profile: file of an access profile; None counts reads of the data.
        profile_rows: of the training split that are counted; None: all.
        steps: a useful row is read more than once in so many.
        lookahead: rows of a batch are fetched while the one before is computed.
    """

    memory: int | None = None
    batch_size: int | None = None
    largest_batch: int = 1 << 16
    sample_bytes: int | None = None
    profile: Path | None = None
    profile_rows: int | None = 1 << 16
    steps: int = STEPS
    lookahead: bool = True

    @property
    def held(self) -> int:
        """Batches whose rows are in the fast memory when the next one's are fetched."""
        return int(self.lookahead)


def study_caches(
    registry: RunConfig,
    topology: str,
    spec: TopologySpec,
    question: CacheQuestion,
    say: Callable[[str], None],
) -> CachePlanReport:
    """The caches of the tables that the registry's cache entries name, of all without an entry.

    Args:
        registry: not prepared.
        topology: its name.
        spec: ranks, and what steps and fetched bytes cost.
        question: memory and batch size.
        say: told what is being done, in words.

    Raises:
        RecdError: registry, data and model do not go together.
        DataError: the profile is not of these tables.
        SetupError: the memory has no room for a sample of each rank.
    """
    wrapped_dataset(registry).prepare()
    data = RegistryData(registry)
    tables = cached_tables(registry)
    if question.profile is None:
        say(f"counting the reads of {len(tables)} tables")
        profile = data.access(tables, question.profile_rows)
    else:
        profile = AccessProfile.load(question.profile)
    loads = {
        table.name: TableLoad(
            profile.covering(table.name, table.num_embeddings), table.embedding_dim
        )
        for table in tables
    }
    say("choosing how much to cache")
    order = row_order(loads, registry.training.optimizer)
    ranks = spec.world_size
    given = (question.batch_size or registry.training.batch_size) * ranks
    useful = order.useful(question.steps * given)
    costs = rates_of(spec).costs(ranks)
    if question.batch_size is not None:
        shared = Memory(np.inf, 1.0, largest_batch=given)
        room = useful if question.memory is None else order.fitting(question.memory)
        place, last = min(useful, room), useful
        limit: Limit = "useful" if place == useful else "memory"
        batch_size = given
    else:
        shared = _shared(registry, spec, question, loads, data, say)
        best = order.best(shared, costs, useful)
        place, limit = best.place, _limit(order, best, shared, useful)
        last = min(useful, order.fitting(shared.total - shared.sample * shared.least_batch))
        batch_size = int(best.batch_size) // ranks * ranks
    cached = dict(zip(loads, order.rows(place), strict=True))

    def planned(policy: str) -> CachePlan:
        return CachePlan.of(
            loads,
            cached,
            batch_size=batch_size,
            optimizer=registry.training.optimizer,
            useful=dict(zip(loads, order.rows(useful), strict=True)),
            held=question.held,
            policy="lru" if policy == "lru" else "static",
        )

    plan = planned("static")
    lru = traffic_bytes([table.traffic for table in planned("lru").tables.values()])
    return CachePlanReport(
        topology=topology,
        spec=spec,
        source=profile.source,
        plan=plan,
        lru_bytes=lru["both"],
        memory=question.memory,
        shared=shared if question.batch_size is None else None,
        curve=[_point(order, at, shared, costs) for at in _places(place, last)],
        chosen=_point(order, place, shared, costs),
        limit=limit,
        steps=question.steps,
        warnings=_warnings(plan, question, order.bytes(useful), limit, ranks),
    )


def cached_tables(registry: RunConfig) -> list[Table]:
    """The tables of the registry's cache entries; without any, all of its model.

    Raises:
        RecdError: it has no model.
    """
    import torch

    from recd_plugins.api import build_model

    if not registry.has_model:
        raise RecdError(f"{registry.path}: no model: section says which tables there are; add one")
    with torch.device("meta"):
        tables = tables_of(build_model(registry, registry.dataset.schema()))
    claimed = registry.claim("cache", [table.name for table in tables])
    return [table for table in tables if not claimed or table.name in claimed]


def _shared(
    registry: RunConfig,
    spec: TopologySpec,
    question: CacheQuestion,
    loads: Mapping[str, TableLoad],
    data: RegistryData,
    say: Callable[[str], None],
) -> Memory:
    """What rows and batch share: a sample takes its activations, and the rows that it may fetch."""
    assert question.memory is not None, "a batch size is searched in some memory"
    ranks, sample = spec.world_size, question.sample_bytes
    if sample is None:
        say("counting what the model keeps of a sample")
        batch_size = registry.training.batch_size
        candidate = with_plugins(replace(registry, cache=(), wrappers=()), spec, data)
        kept = candidate.activation_bytes(measure_compute(registry), batch_size) / batch_size
        widths = [load.lookups * load.embedding_dim * 4 for load in loads.values()]
        sample = round(kept + (1 + question.held) * sum(widths))
    if question.memory < sample * ranks:
        raise SetupError(
            f"--memory {size_text(question.memory)} has no room for one sample of each of "
            f"{ranks} ranks, of which each takes {size_text(sample)}; give more, or say what a "
            "sample takes with --sample-bytes"
        )
    return Memory(
        question.memory,
        max(1, sample),
        least_batch=ranks,
        largest_batch=question.largest_batch * ranks,
    )


def _limit(order: RowOrder, best: Optimum, shared: Memory, useful: int) -> Limit:
    if best.place == useful:
        return "useful"
    room = order.fitting(shared.total - shared.sample * shared.least_batch)
    return "room" if best.place == room else "batch"


def _places(chosen: int, last: int) -> list[int]:
    """From nothing to the last useful row, with the chosen one: close together at the start."""
    evenly = np.linspace(0, last, _POINTS // 2)
    falling = np.geomspace(1, max(1, last), _POINTS // 2)
    found = {0, chosen, *evenly.astype(int).tolist(), *falling.astype(int).tolist()}
    return sorted(place for place in found if place <= max(chosen, last))


def _point(order: RowOrder, place: int, shared: Memory, costs: StepCosts) -> CurvePoint:
    cached = order.bytes(place)
    batch_size = shared.batch_size(cached)
    return CurvePoint(
        rows=place,
        bytes=cached,
        batch_size=batch_size,
        moved=2 * order.fetched_bytes(place, batch_size),
        seconds=order.cost(place, shared, costs),
    )


def _warnings(
    plan: CachePlan, question: CacheQuestion, useful_bytes: float, limit: Limit, ranks: int
) -> list[str]:
    tables = plan.tables.values()
    found = []
    in_flight = sum(table.traffic.unique_rows * table.traffic.row_bytes for table in tables)
    if not useful_bytes:
        found.append(
            f"no row is read more than once in {question.steps:,} steps: nothing is worth caching"
        )
    elif not plan.cached_bytes:
        found.append("no row has room, or pays for the batch that it makes smaller")
    if question.memory is not None and question.memory < in_flight:
        found.append(
            f"{size_text(question.memory)} is less than the {size_text(in_flight)} that the "
            "distinct rows of one batch take, which are in the fast memory while they are computed "
            "with: smaller batches, or more memory"
        )
    if question.memory is not None and limit == "useful":
        found.append(
            f"all rows worth caching take {size_text(useful_bytes)}: more memory helps no more"
        )
    whole = [table.load.name for table in tables if table.cached == table.load.num_embeddings]
    if whole:
        found.append(f"tables that are cached whole need no cache: {shortened(whole)}")
    samples = min(table.load.access.samples for table in tables)
    if 1 < samples < plan.batch_size:
        found.append(
            f"the profile has seen {samples:,} samples, less than the {plan.batch_size:,} of a "
            "step: rows that it has not seen are taken for never read"
        )
    if limit != "room" and question.batch_size is None:
        largest = question.largest_batch * ranks
        if plan.batch_size >= largest:
            found.append(
                f"the batch is the largest that --largest-batch allows: {question.largest_batch:,} "
                "rows a rank"
            )
    return found
