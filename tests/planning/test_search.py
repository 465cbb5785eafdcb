from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from operator import attrgetter
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.planning.test_planner import Model, prepared, profile, registry
from tests.sharded import configs
from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner
from torchrec.distributed.planner.perf_models import NoopPerfModel
from torchrec.distributed.planner.proposers import GreedyProposer, UniformProposer
from torchrec.distributed.planner.types import Proposer, ShardingOption, Topology
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from recd_plugins import wrap
from recd_plugins.interfaces.model_tables import tables_of
from recd_plugins.planning import search
from recd_plugins.planning.constraints import table_constraints
from recd_plugins.planning.estimates import step_rating
from recd_plugins.planning.planner import SortedEnumerator
from recd_plugins.planning.search import FreeRanks, Option, place
from recd_plugins.planning.study import GRANULE, largest_batch
from recd_plugins.planning.topologies import load_topology
from recd_plugins.runtime.errors import NoPlanError
from recd_plugins.sharding.sharders import stock_sharders

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
Rated = Generator[Sequence[Option], float | None, None]


def numbered(num_tables: int, rows: int, dim: int) -> EmbeddingBagCollection:
    tables = configs(EmbeddingBagConfig, map(str, range(num_tables)), rows, dim)
    for index, table in enumerate(tables):
        table.num_embeddings += index
    return EmbeddingBagCollection(tables, device=torch.device("meta"))


def free(topology: Topology) -> FreeRanks:
    storage = [list(vars(device.storage).values()) for device in topology.devices]
    return FreeRanks(topology, np.array(storage).T.copy())


@pytest.fixture
def topology() -> Topology:
    return load_topology("dgx-a100-80g", nodes=2).to_torchrec()


@pytest.fixture
def proposal(topology: Topology) -> list[Option]:
    module, training = numbered(len(KINDS), 10_001, 256), registry().training
    enumerator = SortedEnumerator(topology, {}, training)
    options: dict[str, Option] = {}
    for option in enumerator.options_of(module, stock_sharders(training)):
        if option.sharding.sharding_type == KINDS[int(option.sharding.name[2:])]:
            options.setdefault(option.sharding.name, option)
    return list(options.values())


@pytest.mark.parametrize("full", [(), (0,), (3, 5), range(1, 8), range(8, 15)])
def test_ranks_of_shards(proposal: list[Option], topology: Topology, full: Iterable[int]) -> None:
    for rank in full:  # no room for more than what is on all ranks
        uniform = (o.sharding for o in proposal if o.sharding.partition_by == "uniform")
        needed = sum(option.shards[rank].storage.hbm for option in uniform)
        topology.devices[rank].storage.hbm = needed + 1000
    placed = place(proposal, free(topology))
    assert placed is not None
    mine = [option.on(ranks.tolist()) for option, ranks in placed.items()]
    theirs = [option.on(option.sharding.get_shards_assignment()) for option in proposal]
    expected = GreedyPerfPartitioner().partition(theirs, topology)
    assert [each.shards for each in mine] == [each.shards for each in expected]
    # 0.05 ms for each collective: four of five sharding types and one of copies.
    busiest = NoopPerfModel(topology).rate(expected)
    assert step_rating(topology)(placed) == pytest.approx(busiest + (5 * 4 + 1) * 0.05)


def test_what_does_not_fit_has_no_placement(proposal: list[Option], topology: Topology) -> None:
    for device in topology.devices[1:]:
        device.storage.hbm = 1000
    assert place(proposal, free(topology)) is None


@pytest.fixture(scope="module", params=[1, 3])
def options(request: pytest.FixtureRequest) -> list[Option]:
    model = Model()
    ready = prepared(registry(), model)
    constraints = table_constraints(
        ready, tables_of(model), profile=profile(), device_type="cuda", replicate=False
    )
    there = load_topology("dgx-a100-80g", nodes=request.param).to_torchrec()
    enumerator = SortedEnumerator(there, constraints, ready.registry.training)
    return enumerator.options_of(model, ready.sharders())


def by_table(options: Iterable[Option]) -> list[list[Option]]:
    found: dict[str, list[Option]] = {}
    for option in options:
        found.setdefault(option.sharding.fqn, []).append(option)
    return list(found.values())


def rating_of(turn: int, ratings: Sequence[float]) -> float | None:
    return None if turn % 3 == 2 else ratings[turn % len(ratings)]


def mine(proposer: Rated, ratings: Sequence[float]) -> list[list[ShardingOption]]:
    found = []
    try:
        proposal = next(proposer)
        while True:
            found.append([option.sharding for option in proposal])
            proposal = proposer.send(rating_of(len(found) - 1, ratings))
    except StopIteration:
        return found


def torchrecs(
    proposer: Proposer, options: list[Option], ratings: Sequence[float]
) -> list[list[ShardingOption]]:
    proposer.load([option.sharding for option in options])
    found: list[list[ShardingOption]] = []
    while proposal := proposer.propose():
        rating = rating_of(len(found), ratings)
        found.append(proposal)
        proposer.feedback(rating is not None, proposal, rating)
    return found


@pytest.mark.parametrize("ratings", [[5.0], [9.0, 8.0, 7.0], [1.0, 3.0, 0.5, 4.0, 5.0, 6.0]])
@pytest.mark.parametrize("patience", [None, 2])
@pytest.mark.parametrize("depth", [True, False])
def test_greedy_proposals_are_torchrecs(
    options: list[Option], ratings: list[float], patience: int | None, depth: bool
) -> None:
    theirs = torchrecs(GreedyProposer(use_depth=depth, threshold=patience), options, ratings)
    key = attrgetter("slowest" if depth else "every_shard")
    limit = float("inf") if patience is None else patience
    assert mine(search._greedy(by_table(options), key, limit), ratings) == theirs
    assert len(theirs) > 3


def test_uniform_proposals_are_torchrecs(options: list[Option]) -> None:
    theirs = torchrecs(UniformProposer(), options, [5.0])
    assert mine(search._uniform(by_table(options)), [5.0]) == theirs
    assert len(theirs) > 1


SLOW = {"a": "fused_uvm", "b": "fused", "s": "fused_uvm"}
QUICK = dict.fromkeys("abs", "fused")


def kernels(proposal: Sequence[Option]) -> dict[str, str]:
    return {option.sharding.name: option.sharding.compute_kernel for option in proposal}


@pytest.mark.parametrize("fits", [True, False])
def test_the_best_plan_is_tried_with_quicker_kernels(options: list[Option], fits: bool) -> None:
    row_wise = {
        (o.sharding.name, o.sharding.compute_kernel): o
        for o in options
        if o.sharding.sharding_type == "row_wise"
    }

    def once() -> Rated:
        yield [row_wise[pair] for pair in SLOW.items()]

    proposer = search._with_quickest_kernels(once(), by_table(row_wise.values()))
    assert kernels(next(proposer)) == SLOW
    assert kernels(proposer.send(5.0)) == QUICK
    if fits:
        with pytest.raises(StopIteration):
            proposer.send(1.0)
    else:  # table by table
        assert kernels(proposer.send(None)) == {**SLOW, "s": "fused"}
        assert kernels(proposer.send(4.0)) == QUICK


def num_placed(num_tables: int) -> int:
    model = torch.nn.ModuleDict({"bags": numbered(num_tables, 100, 8)})
    ready = wrap(model)
    with mock.patch.object(search, "place", side_effect=place) as tried:
        ready.planner(world_size=2).plan(model, ready.sharders())
    return sum(len(call.args[0]) for call in tried.call_args_list)


def test_plans_are_tried_for_twice_the_tables_in_about_twice_the_time() -> None:
    with mock.patch.object(search, "_MANY_TABLES", 32):
        assert num_placed(80) < 3 * num_placed(40)


@given(
    most=st.integers(7 * GRANULE, 10**6), start=st.integers(1, 10**6), together=st.integers(1, 7)
)
def test_it_fits_and_a_step_more_does_not(most: int, start: int, together: int) -> None:
    asked: dict[int, bool] = {}

    def fits(batch_size: int) -> bool:
        asked[batch_size] = batch_size <= most
        return asked[batch_size]

    found, step = largest_batch(fits, start=start, together=together)
    assert not any(batch_size % together for batch_size in asked)
    assert asked[found]
    assert not asked[found + step]
    assert step <= max(GRANULE * together, found / 64)
    assert len(asked) <= 40


def test_no_batch_or_every_batch_fits() -> None:
    with pytest.raises(NoPlanError, match="even with batches of 64 rows"):
        largest_batch(lambda _: False, start=512)
    found, step = largest_batch(lambda _: True, start=512)
    assert found < 2**31 == found + step, "FBGEMM counts rows in 32 bits"
