"""The contract of train pipelines notices what is wrong with one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from recd_plugins.config.manager import PluginManager
from recd_plugins.interfaces import Pipeline
from recd_plugins.runtime.errors import ExactnessError
from recd_plugins.runtime.launch import RankError
from recd_plugins.testing.contracts import PipelineContract

FOLDER = Path(__file__).parents[1] / "training" / "plugins"


def loop(fault: str = "") -> Pipeline:
    cls: Any = PluginManager(FOLDER).plugins["pipeline"]["test.loop"].cls
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
def test_a_fault_is_noticed(fault: str, test: str) -> None:
    batches = (2,) if "short" in test else ()
    with pytest.raises((AssertionError, RankError, ExactnessError)):
        getattr(PipelineContract(), test)(loop(fault), *batches)
