from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from recd_plugin_flexshard.planning import TableDemand
from recd_plugin_flexshard.planning.costs import rows_sent
from recd_plugin_flexshard.tests.planning.test_cuts import FLAT, STEEP
from recd_plugins.interfaces.access import TableAccess

B = 4096


@pytest.mark.parametrize(("demand", "unique"), [(FLAT, 121442.4), (STEEP, 4225.3)])
def test_rows_sent(demand: TableDemand, unique: float) -> None:
    sent = rows_sent(demand.probabilities, B, coalesce=True)
    assert sent.sum() == pytest.approx(unique, abs=0.1)
    assert rows_sent(demand.probabilities, B, 4.0).sum() == pytest.approx(B * demand.length / 4)
    certain = rows_sent(np.array([3.0, 1.0, 0.5, 0.0]), 2, coalesce=True)
    assert certain.tolist() == [1.0, 1.0, 0.75, 0.0]


def test_rows_by_rank_and_the_tail_by_number() -> None:
    tail: dict[str, Any] = {"tail_rows": 4, "tail_probability": 0.1}
    demand = TableDemand("t", 6, 4, np.array([0.9, 0.5]), rows=np.array([4, 1]), **tail)
    assert demand.length == pytest.approx(1.8)
    assert demand.accesses(3) == pytest.approx(1.5)
    for segment, rows in (((0, 2), [4, 1]), ((1, 4), [1, 0, 2]), ((3, 6), [2, 3, 5]), ((2, 2), [])):
        assert demand.ids(*segment).tolist() == rows
    assert TableDemand("t", 6, 4, np.ones(6)).ids(1, 3).tolist() == [1, 2]
    binned = TableDemand("t", 10, 4, np.array([1.0, 0.5]), repeats=np.array([3, 5]), tail_rows=2)
    assert [binned.accesses(rows) for rows in (0, 2, 3, 5, 8, 10)] == [0, 2, 3, 4, 5.5, 5.5]


def test_a_profile_becomes_a_demand() -> None:
    rows, counts = np.array([5, 0, 3]), np.array([9.0, 4.0, 1.0])
    access = TableAccess("t", ("a", "b"), 6, 10, rows, counts, 20.0, error=2.0)
    demand = TableDemand.from_access(access, embedding_dim=16, dedupe_factor=2.0)
    assert (demand.embedding_dim, demand.dedupe_factor, demand.features) == (16, 2.0, 2)
    # The row of one access is below the mean of the rows that are not known, 2.
    assert demand.probabilities.tolist() == [0.9, 0.4]
    assert (demand.tail_rows, demand.tail_probability) == (4, pytest.approx(0.175))
    assert demand.length == pytest.approx(access.length)
    assert demand.ids(0, 6).tolist() == [5, 0, 1, 2, 3, 4]


def test_tiers_are_planned_without_torch() -> None:
    code = (
        "import sys; from recd_plugin_flexshard.planning import *; "
        "from benchmarks._flexshard_paper import CLUSTER, MODELS; "
        "plan = plan_tiers([MODELS['RM-3'].fitted()], CLUSTER, 'joint'); traffic(plan); "
        "print(sorted({'torch', 'torchrec', 'pandas'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
