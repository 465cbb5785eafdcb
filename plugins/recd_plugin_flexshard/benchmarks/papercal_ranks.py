"""What each rank does: all sides of the PAPERCAL comparison at once, in turns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from recd_plugin_flexshard.benchmarks.one_table_ranks import by_tier, mean_over_ranks
from recd_plugin_flexshard.benchmarks.papercal import SIDES
from recd_plugin_flexshard.benchmarks.trainers import CPU, RankTrainer, from_every_rank, timed_turns
from recd_plugin_flexshard.part import TieredPart
from recd_plugin_flexshard.planning import TableTiers
from recd_plugin_flexshard.report.tier_report import TierReport
from recd_plugins.api.commands import silence_upstream
from recd_plugins.api.distributed import Traffic, stock_sharders
from recd_plugins.api.registry import Prepared, load_registry
from recd_plugins.api.training import assemble, sections_of
from recd_plugins.testing.benchmark import all_gradients_sent, keep_freed_memory


@dataclass(frozen=True)
class Job:
    """What is trained; travels to the ranks by pickle.

    Attributes:
        registries: by side.
        num_batches: of a rank, which go round.
        turns: timed turns; one more warms up.
    """

    registries: Mapping[str, Path]
    num_batches: int
    turns: int


@dataclass
class Trained:
    """One side, over all ranks.

    Attributes:
        sent: bytes that a rank sends in a step, the mean over ranks.
        ids: of a step and rank.
        predicted: share of row-wise's all-to-all that the plan says it saves, if there is one.
        seconds: of a step, by turn.
        losses: by step, the mean over ranks.
        hot: rows on every rank, of all tables.
        flex: rows in every node.
    """

    sent: Mapping[Traffic, float] = field(default_factory=dict)
    ids: float = 0
    predicted: float | None = None
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    hot: int = 0
    flex: int = 0


def measure(rank: int, world_size: int, job: Job) -> dict[str, Trained]:
    """Every side, by name. A collective call."""
    silence_upstream()
    # Or each large tensor is memory that the system clears page by page, the baseline's above all.
    keep_freed_memory()
    trained: dict[str, Trained] = {}
    trainers: dict[str, RankTrainer] = {}
    for name, path in job.registries.items():
        registry = load_registry(path)
        stock = SIDES[name].sharders == "stock"
        sharders = stock_sharders(registry.training) if stock else None
        with all_gradients_sent():  # what tiers save, beside what is predicted of them
            parts = assemble(registry, "plugins", CPU, sharders=sharders)
            tiers = sections_of(parts, None, [], taken=()).get("tiers")
        loader = parts.prepared.dataloader(rank=rank, world_size=world_size, device=CPU)
        batches = list(islice(loader, job.num_batches))
        trainers[name] = RankTrainer(parts.dmp, parts.optimizer, batches)
        ids = sum(from_every_rank(trainers[name].num_ids)) / world_size
        tables = _tables(parts.prepared)
        assert tiers is None or isinstance(tiers, TierReport)
        trained[name] = Trained(
            ids=ids,
            predicted=None if tiers is None else tiers.a2a_reduction[1],
            hot=sum(table.hot for table in tables),
            flex=sum(table.flex for table in tables),
        )
    for name, trainer in trainers.items():
        trained[name].sent = mean_over_ranks(by_tier(trainer.counted_round()))
    seconds = timed_turns(trainers, job.turns)
    for name, trainer in trainers.items():
        trained[name].seconds = seconds[name]
        trained[name].losses = trainer.losses()
    return trained


def _tables(prepared: Prepared) -> list[TableTiers]:
    """The tables that have tiers."""
    parts = (part for part in prepared.table_parts if isinstance(part, TieredPart))
    return [table for part in parts for table in part.plan.tables]
