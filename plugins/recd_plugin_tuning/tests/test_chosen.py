"""What a step with the choices of ``auto`` is said to be spent on."""

from __future__ import annotations

import pytest

from recd_plugin_tuning.chosen import Chosen
from recd_plugins.values.stage_costs import AllToAllCost, StageCosts
from recd_plugins.values.stages import StageTimes
from recd_plugins.values.step_cost import StepCost

COSTS = StageCosts(all_to_all=AllToAllCost(bytes_across_nodes=1e-9, collectives=0.1))


@pytest.mark.parametrize(
    ("all_to_all", "links", "waiting"),
    [
        (1.6, 1500.0, None),  # half a second of bytes is carried while ranks compute
        (2.1, 2000.0, None),
        (2.5, 2000.0, 400.0),
    ],
)
def test_it_comes_to_the_step(all_to_all: float, links: float, waiting: float | None) -> None:
    seconds = StageTimes(lookup=0.1, gemm=0.0, all_to_all=all_to_all, all_reduce=0.2, other=0.3)
    work = StepCost(bytes_across_nodes=2e9, collectives=1)
    found = Chosen((), (), (), seconds, work, None, COSTS, 1).limits()
    assert found["links between nodes"] == pytest.approx(links)
    waited = found.get("waiting for the rank with the most to do", 0.0)
    assert waited == pytest.approx(waiting or 0.0, abs=1e-6)
    assert sum(found.values()) == pytest.approx(1e3 * seconds.total)
