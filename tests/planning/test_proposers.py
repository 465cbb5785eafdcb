"""Plans that are tried after those of TorchRec's proposers."""

from __future__ import annotations

from tests.planning.test_planner import Model, prepared, profile, registry
from torchrec.distributed.planner.types import Enumerator, Proposer, ShardingOption, Topology

from recd_plugins.model_tables import tables_of
from recd_plugins.planning.constraints import table_constraints
from recd_plugins.planning.planner import SortedEnumerator
from recd_plugins.planning.proposers import QuickestKernels
from recd_plugins.planning.topologies import load_topology

SLOW = {"a": "fused_uvm", "b": "fused", "s": "fused_uvm"}
QUICK = dict.fromkeys("abs", "fused")


class Once(Proposer):
    """One proposal."""

    def __init__(self, proposal: list[ShardingOption]) -> None:
        self.left = [proposal]
        self.told: list[float | None] = []

    def load(
        self, search_space: list[ShardingOption], enumerator: Enumerator | None = None
    ) -> None:
        """Nothing."""

    def propose(self) -> list[ShardingOption] | None:
        return self.left.pop() if self.left else None

    def feedback(
        self,
        partitionable: bool,
        plan: list[ShardingOption] | None = None,
        perf_rating: float | None = None,
        storage_constraint: Topology | None = None,
    ) -> None:
        self.told.append(perf_rating)


def row_wise() -> dict[tuple[str, str], ShardingOption]:
    """What GPUs may do with tables a, b and s, by table and kernel."""
    model = Model()
    ready = prepared(registry(), model)
    constraints = table_constraints(
        ready, tables_of(model), profile=profile(), device_type="cuda", replicate=False
    )
    topology = load_topology("dgx-a100-80g").to_torchrec()
    enumerator = SortedEnumerator(topology, constraints, ready.registry.training)
    found = enumerator.enumerate(model, ready.sharders())
    assert {option.sharding_type for option in found} > {"row_wise"}
    return {(o.name, o.compute_kernel): o for o in found if o.sharding_type == "row_wise"}


def kernels(proposal: list[ShardingOption] | None) -> dict[str, str]:
    assert proposal is not None
    assert {option.sharding_type for option in proposal} == {"row_wise"}
    return {option.name: option.compute_kernel for option in proposal}


def proposer(options: dict[tuple[str, str], ShardingOption]) -> tuple[QuickestKernels, Once]:
    once = Once([options[pair] for pair in SLOW.items()])
    found = QuickestKernels(once)
    found.load(list(options.values()))
    proposal = found.propose()
    assert kernels(proposal) == SLOW
    found.feedback(True, proposal, 5.0)
    assert once.told == [5.0]
    return found, once


def test_the_best_plan_is_tried_with_the_quickest_kernels() -> None:
    found, once = proposer(row_wise())
    proposal = found.propose()
    assert kernels(proposal) == QUICK
    found.feedback(True, proposal, 1.0)
    assert found.propose() is None
    assert once.told == [5.0]


def test_what_does_not_fit_at_once_is_tried_table_by_table() -> None:
    found, _ = proposer(row_wise())
    proposal = found.propose()
    assert kernels(proposal) == QUICK
    found.feedback(False, proposal)
    proposal = found.propose()
    assert kernels(proposal) == {**SLOW, "s": "fused"}
    found.feedback(True, proposal, 4.0)
    proposal = found.propose()
    assert kernels(proposal) == QUICK
    found.feedback(False, proposal)
    assert found.propose() is None


def test_where_nothing_fits_or_all_is_quickest_no_more_is_tried() -> None:
    options = row_wise()
    for told in (False, True):
        once = Once([options[pair] for pair in QUICK.items()])
        found = QuickestKernels(once)
        found.load(list(options.values()))
        found.feedback(told, found.propose(), 3.0 if told else None)
        assert found.propose() is None
