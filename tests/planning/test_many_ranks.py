"""Plans for many ranks are those that TorchRec makes, in less time."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner
from torchrec.distributed.planner.perf_models import NoopPerfModel
from torchrec.distributed.planner.types import PlannerError, Topology
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from recd_plugins.distributed.sharders import stock_sharders
from recd_plugins.planning.partitioner import RankPartitioner
from recd_plugins.planning.performance import StepTime
from recd_plugins.planning.planner import SortedEnumerator
from recd_plugins.planning.quick_option import QuickOption
from recd_plugins.planning.topologies import load_topology

KINDS = (
    "row_wise",
    "table_row_wise",
    "table_wise",
    "row_wise",
    "column_wise",
    "data_parallel",
    "table_column_wise",
    "table_row_wise",
    "table_column_wise",
    "table_wise",
)


@pytest.fixture
def topology() -> Topology:
    return load_topology("dgx-a100-80g", nodes=2).to_torchrec()


@pytest.fixture
def proposal(make_registry, topology: Topology) -> list[QuickOption]:
    """A table of each kind, whose last shards are smaller than the others."""
    tables = [
        EmbeddingBagConfig(
            name=f"t_{i}", embedding_dim=256, num_embeddings=10_001 + i, feature_names=[f"f_{i}"]
        )
        for i in range(len(KINDS))
    ]
    module = EmbeddingBagCollection(tables, device=torch.device("meta"))
    training = make_registry().training
    found = SortedEnumerator(topology, {}, training).enumerate(module, stock_sharders(training))
    options: dict[str, QuickOption] = {}
    for option in found:
        if option.sharding_type == KINDS[int(option.name[2:])]:
            options.setdefault(option.name, option)
    assert len(options) == len(KINDS)
    return list(options.values())


@pytest.mark.parametrize("full", [(), (0,), (3, 5), range(1, 8), range(8, 15)])
def test_shards_have_the_ranks_that_torchrec_gives_them(
    proposal: list[QuickOption], topology: Topology, full: Iterable[int]
) -> None:
    for rank in full:  # no room for more than what is on all ranks
        parts = (o.shards[rank].storage for o in proposal if o.partition_by == "uniform")
        topology.devices[rank].storage.hbm = sum(part.hbm for part in parts) + 1000
    theirs = [option.copied(option.get_shards_assignment()) for option in proposal]
    assert all(
        mine.shards[0] is not copied.shards[0]
        for mine, copied in zip(proposal, theirs, strict=True)
    )
    placed = RankPartitioner(()).partition(proposal, topology)
    expected = GreedyPerfPartitioner().partition(theirs, topology)
    assert [each.shards for each in placed.options()] == [each.shards for each in expected]
    # 0.05 ms for each collective: four of five sharding types and one of copies.
    busiest = NoopPerfModel(topology).rate(expected)
    collectives = 5 * 4 + 1
    assert StepTime(topology).rate(placed) == pytest.approx(busiest + collectives * 0.05)


def test_what_does_not_fit_is_refused(proposal: list[QuickOption], topology: Topology) -> None:
    for device in topology.devices[1:]:
        device.storage.hbm = 1000
    with pytest.raises(PlannerError, match="a shard of t_0 fits on no rank"):
        RankPartitioner(()).partition(proposal, topology)
