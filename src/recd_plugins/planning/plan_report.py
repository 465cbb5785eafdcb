"""What ``recd plan`` finds: the plan with the plugins, and next to it the plain one."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner.types import ShardingOption

from recd_plugins.distributed.pipeline import will_overlap
from recd_plugins.interfaces import Section, Table
from recd_plugins.planning.candidates import Candidate
from recd_plugins.planning.compute import NO_COMPUTE, Compute
from recd_plugins.planning.equal_gradients import as_run_sends
from recd_plugins.planning.planner import Planned
from recd_plugins.planning.stage_times import check_some_time, predict_stages
from recd_plugins.planning.storage import (
    RESERVED_SHARE,
    dense_bytes,
    memory_of_parts,
    row_memory,
    state_bytes,
)
from recd_plugins.planning.topologies import TopologySpec
from recd_plugins.planning.work import work_of_step
from recd_plugins.values.data_profile import DataProfile
from recd_plugins.values.stage_costs import StageCosts
from recd_plugins.values.stages import StageTimes

#: What takes the memory of a rank, beside what table parts name.
COMPONENTS = (
    "embeddings",
    "optimizer",
    "inputs and outputs",
    "activations",
    "dense layers",
    "reserve",
)


@dataclass(frozen=True)
class PlannedTable:
    """How one table is sharded.

    Attributes:
        name: of the table.
        features: that look it up.
        num_embeddings: rows.
        embedding_dim: scalars a row.
        pooled: in bags, else a sequence.
        sharding_type: TorchRec's name.
        compute_kernel: likewise.
        ranks: that hold a part of it.
        bytes_per_rank: of its largest part, with optimizer state, inputs and outputs.
        dedupe_factor: ids of its features over those that it is asked for.
        cached_rows: that stay in fast memory; None of a table without a cache.
        vectors: embeddings that a rank gets from all in a step.
        uncoalesced_vectors: the same without coalescing; None of a table that is not coalesced.
        figures: of its table parts.
        words: of its table parts, a line each.
    """

    name: str
    features: tuple[str, ...]
    num_embeddings: int
    embedding_dim: int
    pooled: bool
    sharding_type: str
    compute_kernel: str
    ranks: tuple[int, ...]
    bytes_per_rank: int
    dedupe_factor: float
    cached_rows: int | None = None
    vectors: float = 0.0
    uncoalesced_vectors: float | None = None
    figures: Mapping[str, Any] = field(default_factory=dict)
    words: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """JSON values; those of parts stand between the others."""
        shown = asdict(self)
        del shown["words"]
        return shown.pop("figures") | shown


@dataclass(frozen=True)
class SideReport:
    """A plan for the model with the plugins, or without them.

    Attributes:
        batch_size: rows of a rank.
        largest_batch_size: that fits; None where it was not looked for.
        batch_step: rows more than ``largest_batch_size`` that were found not to fit, or not to be
            there.
        data_ends: why the data has none of so many rows, where that and not memory is the limit.
        tables: in the order of the model.
        memory: bytes ``[world_size]`` by component, of GPUs where there are some.
        host_memory: bytes ``[world_size]`` of tables that GPUs read from their node's memory.
        seconds: of a step by stage.
        seconds_of_tables: likewise, if the model computed nothing besides.
    """

    batch_size: int
    largest_batch_size: int | None
    batch_step: int | None
    data_ends: str
    tables: tuple[PlannedTable, ...]
    memory: Mapping[str, NDArray[np.int64]]
    host_memory: NDArray[np.int64]
    seconds: StageTimes
    seconds_of_tables: StageTimes

    def held(self, component: str) -> NDArray[np.int64]:
        """Bytes ``[world_size]`` of a component, which this side need not have."""
        return self.memory.get(component, np.zeros_like(self.host_memory))

    @property
    def memory_by_rank(self) -> NDArray[np.int64]:
        """Bytes ``[world_size]`` of all components."""
        return np.sum(list(self.memory.values()), axis=0, dtype=np.int64)

    def samples_per_second(self, world_size: int) -> float:
        """Samples a second of all ranks."""
        return world_size * self.batch_size / self.seconds.total

    def as_json(self) -> dict[str, Any]:
        """JSON values."""
        total = self.memory_by_rank
        return {
            "batch_size": self.batch_size,
            "largest_batch_size": self.largest_batch_size,
            "batch_step": self.batch_step,
            "data_ends": self.data_ends or None,
            "tables": [table.as_json() for table in self.tables],
            "memory_bytes": {
                "max": int(total.max()),
                "mean": float(total.mean()),
                "by_rank": {name: part.tolist() for name, part in self.memory.items()},
                "host_by_rank": self.host_memory.tolist(),
            },
            "seconds": {**self.seconds.as_dict(), "total": self.seconds.total},
            "samples_per_second": self.samples_per_second(len(total)),
        }


@dataclass(frozen=True)
class PlanReport:
    """Both plans and what they were made for.

    Attributes:
        topology: its name.
        spec: nodes and ranks.
        costs_source: where the costs come from that ``seconds`` are reckoned with, in words.
        profile: of the data, deduplicated.
        plugins: the plan that ``recd run`` takes.
        plain: TorchRec's own, without plugins; None where there is none, as it does not fit.
        plain_problem: why not.
        wire: ``training.wire``, the format of what ranks send.
        chosen: what a chooser came to; None without one.
        too_few_rows: why the data has no such batch for each rank; empty where it has.
    """

    topology: str
    spec: TopologySpec
    costs_source: str
    profile: DataProfile
    plugins: SideReport
    plain: SideReport | None
    plain_problem: str = ""
    wire: str = "fp32"
    chosen: Section | None = None
    too_few_rows: str = ""

    @property
    def time_of_step(self) -> str:
        """What the seconds are, in words: a prediction only where costs were measured."""
        return "least time" if self.spec.costs is None else "predicted time"

    @property
    def components(self) -> tuple[str, ...]:
        """What takes the memory of a rank."""
        return tuple(self.plugins.memory)

    def changed(self) -> dict[tuple[str, str], list[str]]:
        """Tables whose sharding type the plugins changed, by the types before and after."""
        if self.plain is None:
            return {}
        before = {table.name: table.sharding_type for table in self.plain.tables}
        found: dict[tuple[str, str], list[str]] = defaultdict(list)
        for table in self.plugins.tables:
            # A plugin may have replaced a table by several.
            if before.get(table.name, table.sharding_type) != table.sharding_type:
                found[before[table.name], table.sharding_type].append(table.name)
        return dict(found)

    def as_json(self) -> dict[str, Any]:
        """What ``recd plan --json`` writes; ratios are plugins over plain."""
        batch_size = self.plugins.batch_size
        pooled = {name: table.pooled for table in self.plugins.tables for name in table.features}
        return {
            "topology": {
                "name": self.topology,
                **self.spec.model_dump(),
                "world_size": self.spec.world_size,
            },
            "costs": self.costs_source,
            "wire": self.wire,
            "data": {
                "source": self.profile.source,
                "samples_per_session": self.profile.samples_per_session,
                "too_few_rows": self.too_few_rows or None,
                "features": {
                    name: {
                        "length": feature.length,
                        "deduplicated": feature.deduplicated,
                        "dedupe_factor": feature.dedupe_factor(
                            batch_size, pooled=pooled.get(name, True)
                        ),
                    }
                    for name, feature in self.profile.features.items()
                },
            },
            "plugins": self.plugins.as_json(),
            "plain": None if self.plain is None else self.plain.as_json(),
            "plain_problem": self.plain_problem or None,
            **({} if self.chosen is None else {self.chosen.name: self.chosen.as_json()}),
            "ratios": self._ratios(),
            "changed": [
                {"before": before, "after": after, "tables": names}
                for (before, after), names in self.changed().items()
            ],
        }

    def _ratios(self) -> dict[str, float]:
        if self.plain is None:
            return {}
        mine, plain, ranks = self.plugins, self.plain, self.spec.world_size
        return {
            "memory_max": float(mine.memory_by_rank.max() / plain.memory_by_rank.max()),
            "step_seconds": mine.seconds.total / plain.seconds.total,
            "samples_per_second": mine.samples_per_second(ranks) / plain.samples_per_second(ranks),
            **(
                {"largest_batch_size": mine.largest_batch_size / plain.largest_batch_size}
                if mine.largest_batch_size and plain.largest_batch_size
                else {}
            ),
        }


def report_side(
    candidate: Candidate,
    planned: Planned,
    spec: TopologySpec,
    *,
    batch_size: int,
    largest_batch_size: int | None,
    batch_step: int | None,
    data_ends: str = "",
    compute: Compute,
    costs: StageCosts,
) -> SideReport:
    """Memory and time of a plan, reckoned.

    Raises:
        SetupError: by ``costs`` a step takes no time.
    """
    training = candidate.prepared.registry.training
    overlapped = will_overlap(candidate.prepared, planned.sharding, spec.device, spec.nodes)

    def step(compute: Compute) -> StageTimes:
        works = work_of_step(
            candidate.tables,
            planned.sharding,
            as_run_sends(candidate.profile, spec.costs),
            compute,
            batch_size=batch_size,
            world_size=spec.world_size,
            local_world_size=spec.ranks_per_node,
            parts=candidate.prepared.checked_parts,
            wire=training.wire,
            overlapped=overlapped,
            gloo=spec.device == "cpu",
            learns_by_fbgemm=spec.device == "cpu" and candidate.learns_by_fbgemm,
        )
        return predict_stages(works, costs, overlapped=overlapped)

    return SideReport(
        batch_size,
        largest_batch_size,
        batch_step,
        data_ends,
        _tables(candidate, planned, batch_size),
        _memory(candidate, planned, spec, candidate.activation_bytes(compute, batch_size)),
        _host_memory(planned, spec),
        check_some_time(step(compute)),
        step(NO_COMPUTE),
    )


def _tables(candidate: Candidate, planned: Planned, batch_size: int) -> tuple[PlannedTable, ...]:
    options = {option.name: option for option in planned.options}
    groups = {name: group for group in planned.groups for name in group.tables}
    parts = candidate.prepared.checked_parts
    found = []
    for table in candidate.tables:
        if (option := options.get(table.name)) is None:
            continue  # nobody shards it: each rank has it as it has dense layers
        per_rank = Counter[int]()
        for shard in option.shards:
            per_rank[shard.rank] += shard.storage.hbm + shard.storage.ddr
        features = [candidate.profile.of(feature) for feature in table.features]
        all_ids = sum(feature.length for feature in features) * batch_size
        ids = candidate.profile.ids(table, batch_size)
        found.append(
            PlannedTable(
                table.name,
                table.features,
                table.num_embeddings,
                table.embedding_dim,
                table.pooled,
                option.sharding_type,
                option.compute_kernel,
                tuple(sorted(per_rank)),
                max(per_rank.values()),
                all_ids / ids if ids else 1.0,
                _cached_rows(option),
                *_vectors(candidate.profile, table, batch_size),
                {
                    **(groups[table.name].as_json() if table.name in groups else {}),
                    **{n: each for part in parts for n, each in part.figures(table.name).items()},
                },
                (
                    *([groups[table.name].words] if table.name in groups else []),
                    *(line for part in parts for line in part.words(table.name)),
                ),
            )
        )
    return tuple(found)


def _vectors(profile: DataProfile, table: Table, batch_size: int) -> tuple[float, float | None]:
    """``vectors`` and ``uncoalesced_vectors``: of a pooled table one a row, else one an id."""

    def sent(known: DataProfile) -> float:
        count = known.rows if table.pooled else known.ids
        return count(table, batch_size)

    uncoalesced = replace(profile, distinct={})
    return sent(profile), sent(uncoalesced) if table.name in profile.distinct else None


def _cached_rows(option: ShardingOption) -> int | None:
    cached = option.compute_kernel == EmbeddingComputeKernel.FUSED_UVM_CACHING.value
    if not cached or option.cache_load_factor is None:
        return None
    return round(option.cache_load_factor * option.tensor.shape[0])


def _memory(
    candidate: Candidate, planned: Planned, spec: TopologySpec, activation_bytes: int
) -> dict[str, NDArray[np.int64]]:
    training = candidate.prepared.registry.training
    on_gpu = spec.device == "cuda"
    of_entries = candidate.prepared.checked_parts
    beside = memory_of_parts(of_entries, spec.ranks_per_node, training.optimizer)
    tables = ("embeddings", "optimizer")
    names = (*tables, *beside, *(name for name in COMPONENTS if name not in tables))
    parts = {name: np.zeros(spec.world_size, np.int64) for name in names}
    of_shards = planned.static()
    for option in planned.options:
        for shard, static in zip(option.shards, of_shards[option.name], strict=True):
            held = static.hbm if on_gpu else static.ddr
            whole = shard.storage.hbm if on_gpu else shard.storage.ddr
            known = row_memory(of_entries, option, shard, training.optimizer, spec.device)
            if known is not None:
                state = known.optimizer
            else:
                on_host = on_gpu and "uvm" in option.compute_kernel
                state = 0 if on_host else state_bytes(option, shard, training)
            parts["embeddings"][shard.rank] += held - state
            parts["optimizer"][shard.rank] += state
            parts["inputs and outputs"][shard.rank] += whole - held
    for name, held in beside.items():
        parts[name] += held
    parts["activations"] += activation_bytes
    parts["dense layers"] += dense_bytes(candidate.prepared.model, candidate.sharders, training)
    parts["reserve"] += round(RESERVED_SHARE * spec.memory_bytes)
    return parts


def _host_memory(planned: Planned, spec: TopologySpec) -> NDArray[np.int64]:
    found = np.zeros(spec.world_size, np.int64)
    if spec.device == "cuda":
        for option in planned.options:
            for shard in option.shards:
                found[shard.rank] += shard.storage.ddr
    return found
