"""What a table's demand accepts, and which rows its ranks are."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from recd_plugin_flexshard.planning import TableDemand
from recd_plugins.access.table_access import TableAccess
from recd_plugins.errors import DataError


def test_rows_by_rank_and_the_tail_by_number():
    demand = TableDemand(
        "t", 6, 4, np.array([0.9, 0.5]), rows=np.array([4, 1]), tail_rows=4, tail_probability=0.1
    )
    assert demand.length == pytest.approx(1.8)
    assert demand.accesses(3) == pytest.approx(1.5)
    assert demand.ids(0, 1).tolist() == [4]
    assert demand.ids(0, 2).tolist() == [4, 1]
    assert demand.ids(1, 4).tolist() == [1, 0, 2]
    assert demand.ids(3, 6).tolist() == [2, 3, 5]
    assert demand.ids(2, 2).tolist() == []
    assert TableDemand("t", 6, 4, np.ones(6)).ids(1, 3).tolist() == [1, 2]


def test_accesses_within_a_bin():
    demand = TableDemand("t", 10, 4, np.array([1.0, 0.5]), repeats=np.array([3, 5]), tail_rows=2)
    assert [demand.accesses(rows) for rows in (0, 2, 3, 5, 8, 10)] == [0, 2, 3, 4, 5.5, 5.5]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_embeddings": 4}, "3 known rows and 0 others are not its 4"),
        ({"probabilities": np.array([0.1, 0.2, 0.1])}, "do not increase"),
        ({"probabilities": np.array([0.1, np.nan, 0.1])}, "do not increase"),
        ({"probabilities": np.array([0.1, 0.1, -0.1])}, "do not increase"),
        ({"num_embeddings": 4, "tail_rows": 1, "tail_probability": 0.5}, "tail's is not above"),
        ({"rows": np.array([1, 2])}, "one row for each"),
        ({"dedupe_factor": 0.5}, "at least 1"),
        ({"repeats": np.array([4, -2, 1])}, "repeats"),
    ],
)
def test_what_does_not_fit_together(changed, message):
    fields = {
        "name": "t_items",
        "num_embeddings": 3,
        "embedding_dim": 4,
        "probabilities": np.array([0.3, 0.2, 0.1]),
    }
    with pytest.raises(DataError, match=message) as error:
        TableDemand(**(fields | changed))
    assert "table t_items" in str(error.value)


def test_a_profile_becomes_a_demand():
    access = TableAccess(
        "t", ("a", "b"), 6, 10, np.array([5, 0, 3]), np.array([9.0, 4.0, 1.0]), 20.0, error=2.0
    )
    demand = TableDemand.from_access(access, embedding_dim=16, dedupe_factor=2.0)
    assert (demand.name, demand.embedding_dim, demand.dedupe_factor) == ("t", 16, 2.0)
    assert demand.features == 2
    # The row of one access is below the mean of the rows that are not known, 2.
    assert demand.probabilities.tolist() == [0.9, 0.4]
    assert demand.rows is not None
    assert demand.rows.tolist() == [5, 0]
    assert (demand.tail_rows, demand.tail_probability) == (4, pytest.approx(0.175))
    assert demand.length == pytest.approx(access.length)
    assert demand.ids(0, 6).tolist() == [5, 0, 1, 2, 3, 4]


def test_a_profile_of_equal_rows_becomes_a_demand():
    access = TableAccess("t", ("a",), 7, 3, np.arange(3), np.full(3, 0.1), 0.7)
    demand = TableDemand.from_access(access, embedding_dim=16)
    assert demand.length == pytest.approx(0.7 / 3)


def test_tiers_are_planned_without_torch():
    code = (
        "import sys; from recd_plugin_flexshard.planning import *; "
        "from recd_plugin_flexshard.planning.paper import CLUSTER, MODELS; "
        "plan = plan_tiers([MODELS['RM-3'].fitted()], CLUSTER, 'joint'); traffic(plan); "
        "print(sorted({'torch', 'torchrec', 'pandas'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
