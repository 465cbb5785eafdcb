"""The largest batch of a rank, where what fits has to be chosen for each."""

from __future__ import annotations

from pathlib import Path

import pytest

from recd_plugins.planning.step_cost import Compute, Operations
from recd_plugins.planning.study import study, with_plugins
from recd_plugins.planning.topologies import load_topology
from recd_plugins.runtime.errors import NoPlanError


def test_a_batch_that_no_choice_fits_is_too_large(make_registry, table: Path) -> None:
    one = {"use": "recd.session_parquet", "options": {"path": str(table), "sparse": ["item_0"]}}
    registry = make_registry(sharding=[{"use": "auto"}], dataset=one, pooling=[])
    spec = load_topology("machine", ranks=2).model_copy(update={"ddr_bytes": 300_000})
    nothing = Compute(Operations(), Operations(), 0)
    largest = study(registry, "machine", spec, None, lambda _: None, nothing).plugins
    assert largest.largest_batch_size == largest.batch_size < 256
    more = {"batch_size": largest.batch_size + (largest.batch_step or 0)}
    with pytest.raises(NoPlanError, match="auto finds no candidate that fits"):
        with_plugins(registry.with_training(more), spec)
