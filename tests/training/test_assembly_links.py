"""Equal gradients are sent once where links take longer for them than ranks do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from recd_plugins.planning.topologies import load_topology
from recd_plugins.registry.training_spec import TrainingSpec
from recd_plugins.training.assembly import _equal_gradients_pay
from recd_plugins.values.stage_costs import StageCosts

REGISTRY: Any = SimpleNamespace(training=TrainingSpec())


@pytest.mark.parametrize(("bits_per_second", "pays"), [(200e6, True), (1e9, False), (1e10, False)])
def test_by_the_links_that_were_measured(bits_per_second: float, pays: bool) -> None:
    machine = load_topology("machine", nodes=2, ranks_per_node=1, device="cpu")
    costs = StageCosts.model_validate(
        {"all_to_all": {"bytes_across_nodes": 8 / bits_per_second, "collectives": 0.001}}
    )
    measured = machine.model_copy(update={"costs": costs})
    assert _equal_gradients_pay(REGISTRY, torch.device("cpu"), measured) is pays


def test_where_links_are_not_known() -> None:
    assert _equal_gradients_pay(REGISTRY, torch.device("cpu"), None)
