"""Proposals next to those of TorchRec's own proposers."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tests.planning.test_planner import Model, prepared, profile, registry
from torchrec.distributed.planner.proposers import GreedyProposer, UniformProposer
from torchrec.distributed.planner.types import Proposer, ShardingOption

from recd_plugins.model_tables import tables_of
from recd_plugins.planning.constraints import table_constraints
from recd_plugins.planning.planner import SortedEnumerator
from recd_plugins.planning.quick_option import QuickOption
from recd_plugins.planning.quick_proposers import Greedy, Uniform, every_shard, slowest_shard
from recd_plugins.planning.topologies import load_topology


@pytest.fixture(scope="module", params=[1, 3])
def search_space(request: pytest.FixtureRequest) -> list[ShardingOption]:
    """What GPUs of some nodes may do with three tables."""
    model = Model()
    ready = prepared(registry(), model)
    constraints = table_constraints(
        ready, tables_of(model), profile=profile(), device_type="cuda", replicate=False
    )
    topology = load_topology("dgx-a100-80g", nodes=request.param).to_torchrec()
    return SortedEnumerator(topology, constraints, ready.registry.training).enumerate(
        model, ready.sharders()
    )


def proposals(
    proposer: Proposer, search_space: list[ShardingOption], ratings: Sequence[float]
) -> list[list[ShardingOption]]:
    """All of them, rated in turns; every third fits nowhere."""
    proposer.load(list(search_space))
    found: list[list[ShardingOption]] = []
    while proposal := proposer.propose():
        rating = None if len(found) % 3 == 2 else ratings[len(found) % len(ratings)]
        found.append(proposal)
        proposer.feedback(rating is not None, proposal, rating)
    return found


RATINGS = [[5.0], [9.0, 8.0, 7.0, 6.0], [1.0, 3.0, 0.5, 4.0, 5.0, 6.0, 7.0, 8.0]]


@pytest.mark.parametrize("ratings", RATINGS)
@pytest.mark.parametrize("patience", [None, 2, 8])
@pytest.mark.parametrize("depth", [True, False])
def test_greedy_proposals_are_torchrecs(
    search_space: list[ShardingOption],
    ratings: list[float],
    patience: int | None,
    depth: bool,
) -> None:
    mine = Greedy(slowest_shard if depth else every_shard, patience=patience)
    theirs = GreedyProposer(use_depth=depth, threshold=patience)
    expected = proposals(theirs, search_space, ratings)
    assert len(expected) > 3
    assert proposals(mine, search_space, ratings) == expected
    assert proposals(mine, search_space, ratings[:1]) == proposals(
        GreedyProposer(use_depth=depth, threshold=patience), search_space, ratings[:1]
    ), "what it found before does not count once it is loaded anew"


def test_uniform_proposals_are_torchrecs(search_space: list[ShardingOption]) -> None:
    of_one_table = [o for o in search_space if o.sharding_type != "row_wise" or o.name != "s"]
    for options in (search_space, of_one_table):
        expected = proposals(UniformProposer(), options, [5.0])
        assert len(expected) > 1
        assert proposals(Uniform(), options, [5.0]) == expected


def test_of_equal_options_the_first_goes_first(search_space: list[ShardingOption]) -> None:
    option = next(each for each in search_space if isinstance(each, QuickOption))
    again = option.copied(option.get_shards_assignment())
    for proposer in (Greedy(slowest_shard), Uniform()):
        ((found,), *_) = proposals(proposer, [again, option], [5.0])
        assert found is again
