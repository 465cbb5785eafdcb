"""Tables that are made on the meta device start as whole ones do, however they are sharded."""

from __future__ import annotations

import pytest
from tests.training.deferred_cases import (
    differing,
    first_weights_of_sharded,
    trained_from_meta,
)

from recd_plugins.testing.gloo import run_on_ranks

SHARDINGS = ["table_wise", "row_wise", "column_wise", "data_parallel"]
OF_NODES = ["table_row_wise", "table_column_wise"]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_sharding_starts_as_whole_tables_do(world_size: int) -> None:
    shardings = SHARDINGS + (OF_NODES if world_size == 4 else [])
    local = 2 if world_size == 4 else None
    for found in run_on_ranks(differing, world_size, shardings, local_world_size=local):
        assert found == {sharding: [] for sharding in shardings}


def test_a_trainers_model_on_meta_is_drawn_by_torchrec() -> None:
    drawn = run_on_ranks(trained_from_meta, 2)
    assert all(0 < largest < 1 for largest, _ in drawn)
    assert any(moved > 0 for _, moved in drawn)


def test_a_sharded_model_has_no_first_weights() -> None:
    (said,) = run_on_ranks(first_weights_of_sharded, 1)
    assert "is sharded already: call first_weights(model) before" in said
