"""The contracts of models and of train pipelines notice faults."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.model.plugins.tower import Tower

from recd_plugins.config.manager import PluginManager
from recd_plugins.interfaces import Model, ModelFeatures, Pipeline
from recd_plugins.runtime.errors import ExactnessError, RankError, RecdError
from recd_plugins.testing.contracts import ModelContract, PipelineContract


def _counts(_: str, num_embeddings: int) -> NDArray[np.int64]:
    return np.arange(num_embeddings)


FEATURES = ModelFeatures(
    num_dense=2,
    pooled=("user", "item"),
    sequence=("seen", "bought"),
    positive_counts=_counts,
)


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
        ("one_value", "test_gives_loss_and_logits"),
        ("other_labels", "test_gives_loss_and_logits"),
        ("other_loss", "test_gives_loss_and_logits"),
        ("with_its_graph", "test_gives_loss_and_logits"),
        ("draws_unseen", "test_one_seed_makes_one_model"),
        ("draws_unseen", "test_a_state_dict_restores_it"),
        ("forgets_counts", "test_a_state_dict_restores_it"),
        ("sums_losses", "test_the_loss_is_the_mean_of_rows"),
        ("counts_stored_ids", "test_deduplicated_batches_have_the_same_loss"),
        ("learns_unique_rows_never", "test_deduplicated_batches_have_the_same_loss"),
        ("mixes_copies", "test_replicated_tables_stand_apart"),
        ("drops_copies", "test_replicated_tables_stand_apart"),
        ("has_one_table_of_its_own", "test_replicated_tables_stand_apart"),
        ("names_copies_otherwise", "test_replicated_tables_stand_apart"),
        ("stays_on_cpu", "test_mixes_no_devices"),
        ("lacks_a_kernel_everywhere", "test_mixes_no_devices"),
    ],
)
def test_a_fault_of_a_model_is_noticed(fault: str, test: str) -> None:
    from recd_plugins.testing.contracts.model import _model

    method, plugin = getattr(ModelContract(), test), tower(fault)
    given: dict[str, Any] = {"plugin": plugin, "features": FEATURES, "loss_of_each_row": True}
    given["model"] = _model(plugin, FEATURES)
    named = method.__code__.co_varnames[1 : method.__code__.co_argcount]
    try:
        method(**{name: given[name] for name in named})
    except (AssertionError, RecdError, RankError, TypeError):
        return
    except RuntimeError as error:  # torch's own, with the note of where the plugin raised it
        if "test.tower: build failed at" not in "".join(error.__notes__):
            raise
        return
    except pytest.skip.Exception:
        pytest.fail("the fault is skipped")
    pytest.fail("the fault is not noticed")


def test_counts_that_do_not_travel_are_told() -> None:
    features = replace(FEATURES, positive_counts=lambda _, rows: np.arange(rows))
    with pytest.raises(pytest.fail.Exception, match="make positive_counts a function of the mod"):
        ModelContract().test_mixes_no_devices(tower(), features)


def loop(fault: str = "") -> Pipeline:
    folder = Path(__file__).parents[1] / "training" / "plugins"
    cls: Any = PluginManager(folder).plugins["pipeline"]["test.loop"].cls
    return cls(cls.Options(fault=fault))


class TestLoop(PipelineContract):
    @pytest.fixture
    def plugin(self) -> Pipeline:
        return loop()


@pytest.mark.parametrize(
    ("fault", "test"),
    [
        ("adds_up_gradients", "test_trains_as_a_plain_loop"),
        ("zeroes_late", "test_trains_as_a_plain_loop"),
        ("is_one_behind", "test_trains_as_a_plain_loop"),
        ("is_stale", "test_trains_as_a_plain_loop"),
        ("skips", "test_trains_every_batch_of_a_short_iterator"),
        ("ends_once", "test_takes_one_iterator_after_the_other"),
        ("always_trains", "test_evaluates_without_training"),
    ],
)
def test_a_fault_of_a_pipeline_is_noticed(fault: str, test: str) -> None:
    batches = (2,) if "short" in test else ()
    with pytest.raises((AssertionError, RankError, ExactnessError)):
        getattr(PipelineContract(), test)(loop(fault), *batches)
