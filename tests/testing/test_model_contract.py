"""The contract of models notices what is wrong with one."""

from __future__ import annotations

from typing import Any

import pytest
from tests.model.plugins.tower import Tower

from recd_plugins.errors import RankError, RecdError
from recd_plugins.interfaces import Model, ModelFeatures
from recd_plugins.testing.contracts import ModelContract

FEATURES = ModelFeatures(num_dense=2, pooled=("user", "item"), sequence=("seen", "bought"))


def tower(fault: str = "") -> Model:
    return Tower(Tower.Options(fault=fault))


class TestTower(ModelContract):
    @pytest.fixture
    def plugin(self) -> Model:
        return tower()


@pytest.mark.parametrize(
    ("fault", "test"),
    [
        ("draws", "test_one_seed_makes_one_model"),
        ("reads_values", "test_stands_on_the_meta_device"),
        ("fills_rows", "test_tables_may_have_one_row"),
        ("pools_one_less", "test_looks_up_what_is_pooled_as_sequences"),
        ("is_idle", "test_every_parameter_is_trained"),
        ("one_value", "test_every_parameter_is_trained"),
        ("counts_stored_ids", "test_deduplicated_batches_have_the_same_loss"),
        ("mixes_copies", "test_replicated_tables_stand_apart"),
        ("stays_on_cpu", "test_mixes_no_devices"),
    ],
)
def test_a_fault_is_noticed(fault: str, test: str) -> None:
    from recd_plugins.testing.contracts.model import _model

    method, plugin = getattr(ModelContract(), test), tower(fault)
    given: dict[str, Any] = {"plugin": plugin, "features": FEATURES}
    given["model"] = _model(plugin, FEATURES)
    named = method.__code__.co_varnames[1 : method.__code__.co_argcount]
    with pytest.raises((AssertionError, RecdError, RankError)):
        method(**{name: given[name] for name in named})
