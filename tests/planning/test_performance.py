from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.sharded import configs, sequences
from torch import nn
from torchrec.distributed.planner.types import ShardingOption, Topology
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from recd_plugins.interfaces.step_cost import AllReduceCost, OtherCost, StageCosts
from recd_plugins.planning.constraints import table_constraints
from recd_plugins.planning.estimates import PerfEstimator, step_rating
from recd_plugins.planning.planner import Planned, SortedEnumerator
from recd_plugins.planning.step_cost import LEARNED
from recd_plugins.planning.study import ShardableModel, with_plugins
from recd_plugins.planning.topologies import load_topology

FEW = 1000


class Model(nn.Module):
    """A pooled table for each given number of rows, and two of sequences; without memory."""

    def __init__(self, *pooled: int) -> None:
        super().__init__()
        meta = torch.device("meta")
        tables = []
        for i, rows in enumerate(pooled):
            features = [("item_0", "usr_0", "usr_1")[i % 3]]
            tables += configs(EmbeddingBagConfig, features, rows, 16, name=f"bag_{i}")
        self.bags = EmbeddingBagCollection(tables=tables, device=meta)
        self.sequences = sequences("seq_0_0", "seq_0_1", rows=FEW, dim=16, device=meta)


def candidate(make_registry, variant: str, model: nn.Module) -> ShardableModel:
    plugins = with_plugins(make_registry())
    chosen = plugins if variant == "plugins" else plugins.as_plain()
    return replace(chosen, prepared=replace(chosen.prepared, model=model))


def sharding(planned: Planned, module: str) -> Counter[str]:
    return Counter(o.sharding_type for o in planned.options if o.path == module)


@pytest.mark.parametrize("variant", ["plugins", "plain"])
def test_tables_that_fit_stay_whole_on_cpu(make_registry, variant: str) -> None:
    # So large that replicating them costs more than sending what is looked up.
    model = candidate(make_registry, variant, Model(*[20 * FEW] * 24))
    planned = model.plan(load_topology("machine", ranks=2).to_torchrec(), 256)
    assert sharding(planned, "bags") == {"table_wise": 24}
    assert len(sharding(planned, "sequences")) == 1
    busy = Counter(o.shards[0].rank for o in planned.options if o.path == "bags")
    assert set(busy) == {0, 1}


@pytest.mark.parametrize("batch_size", [256, 20_000])
def test_a_table_that_fits_no_rank_is_split(make_registry, batch_size: int) -> None:
    small, large = 20 * FEW, 10**7
    ranks = load_topology("machine", ranks=2).model_copy(update={"ddr_bytes": 600_000_000})
    model = candidate(make_registry, "plugins", Model(*[small] * 8, large))
    planned = model.plan(ranks.to_torchrec(), batch_size)
    (kind,) = {o.sharding_type for o in planned.options if o.name == "bag_8"}
    assert kind in ("row_wise", "table_row_wise")
    # The others follow it where that saves more collectives than partial sums cost.
    others = {o.sharding_type for o in planned.options if o.path == "bags" and o.name != "bag_8"}
    assert others == ({kind} if batch_size == 256 else {"table_wise"})


def enumerated(
    make_registry, rows: int, topology: Topology, device: str
) -> tuple[list[ShardingOption], SortedEnumerator]:
    model = candidate(make_registry, "plugins", Model(rows))
    constraints = table_constraints(
        model.prepared, model.tables, profile=model.profile, device_type=device
    )
    enumerator = SortedEnumerator(topology, constraints, model.prepared.registry.training)
    return enumerator.enumerate(model.prepared.model, model.sharders), enumerator


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", ["bag_0", "t_seq_0_0"])
def test_split_rows_receive_each_id_once(make_registry, device: str, name: str) -> None:
    name_of_topology = "machine" if device == "cpu" else "dgx-a100-80g"
    topology = load_topology(name_of_topology, ranks_per_node=2).to_torchrec()
    options, _ = enumerated(make_registry, 20 * FEW, topology, device)
    found = {(option.name, option.sharding_type): option for option in options}
    whole = found[name, "table_wise"].shards
    for kind in ("row_wise", "table_row_wise"):
        if split := found.get((name, kind)):
            received = sum(shard.perf.input_dist_comms for shard in split.shards)
            assert received == pytest.approx(whole[0].perf.input_dist_comms, rel=0.01)


def test_each_shard_takes_as_long_as_torchrec_says(make_registry) -> None:
    topology = load_topology("dgx-a100-80g", nodes=2).to_torchrec()
    found, enumerator = enumerated(make_registry, 20 * FEW + 1, topology, "cuda")
    assert any(len({tuple(shard.size) for shard in option.shards}) > 1 for option in found)
    before = [[shard.perf for shard in option.shards] for option in found]
    # TorchRec's own goes through all shards.
    estimator = PerfEstimator(topology, enumerator._constraints)
    super(PerfEstimator, estimator).estimate(found, enumerator._sharder_data_map)
    assert before == [[shard.perf for shard in option.shards] for option in found]


def test_each_sharding_type_of_a_module_costs(make_registry) -> None:
    topology = load_topology("machine", ranks=2).to_torchrec()
    model = candidate(make_registry, "plugins", Model(20 * FEW, 20 * FEW))
    enumerator = SortedEnumerator(topology, {}, model.prepared.registry.training)
    made = enumerator.options_of(model.prepared.model, model.sharders)
    bags = {
        each.sharding.name: each
        for each in made
        if each.sharding.path == "bags" and each.sharding.sharding_type == "table_wise"
    }
    placement = {option: np.zeros(1, np.int64) for option in bags.values()}
    first = next(iter(placement)).sharding
    rate = step_rating(topology)
    alone = rate(placement)
    first.sharding_type = "row_wise"
    mixed = rate(placement)
    first.sharding_type = "data_parallel"
    with_copies = rate(placement)
    # Gradients of copies are one collective, where others have four, and sums of split bags go
    # round between two ranks in three rounds more.
    assert mixed - alone == pytest.approx((4 + 3 / 6) * (with_copies - alone))
    assert with_copies > alone
    costs = StageCosts(
        all_reduce=AllReduceCost(bytes_reduced=3e-9), other=OtherCost(element_bytes=1e-10)
    )
    num_bytes = 4 * first.tensor.numel()
    learned = 1000 * (LEARNED * 1e-10 + 3e-9) * num_bytes  # of 2 ranks each sends all of it
    measured = step_rating(topology, costs=costs)
    assert measured(placement) - with_copies == pytest.approx(learned)
