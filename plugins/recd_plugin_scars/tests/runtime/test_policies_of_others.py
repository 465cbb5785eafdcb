"""Policies of other packages in a kernel: what they return wrongly, or raise, names them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from recd_plugin_scars.runtime.row_policy import RowPolicy, ShardRows, Slots
from recd_plugin_scars.runtime.spec import TableCache
from recd_plugin_scars.tests.runtime.kernels import batch_of, config_of, learn, pair
from recd_plugins.api import PluginError

ROWS = 7


@pytest.fixture(autouse=True, scope="module")
def one_rank() -> Iterator[None]:
    """The kernels' optimizer asks for its process group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Wrong(RowPolicy):
    """Gives the slots ``given(used)`` back, whatever batches need."""

    name = "wrong"

    def __init__(self, rows: ShardRows, given: Callable[[Slots], Slots]) -> None:
        super().__init__(rows)
        self._given = given

    def release(self, used: Slots, unpinned: Slots) -> Slots:
        self.counts["released"] += len(unpinned)
        return self._given(used)


@pytest.mark.parametrize(
    ("given", "wrong"),
    [
        (lambda used: used[:1], "of which a batch needs some"),
        (lambda used: used[1:].repeat(2), "some of them twice"),
        (lambda used: used[:0], None),
    ],
)
def test_a_policy_of_others_gives_free_slots_back(
    given: Callable[[Slots], Slots], wrong: str | None
) -> None:
    policy: Any = partial(Wrong, given=given)
    cache = TableCache(policy, 2 / ROWS)
    _, kernel = pair(config_of([ROWS]), {"t0": cache})
    held = kernel(batch_of([[0], []]))  # row 0 stays, as this batch is on its way
    with pytest.raises(PluginError, match=wrong) if wrong else nullcontext():
        learn(kernel(batch_of([[0, 1], []])))
    if wrong is None:
        learn(held)
        assert [traffic.by_policy for _, traffic in kernel.traffic()] == [{"released": 2}]
        kernel.reset_traffic()
        assert [traffic.by_policy for _, traffic in kernel.traffic()] == [{}]


def fail(_: Slots) -> Slots:
    raise KeyError("boom")


@pytest.mark.parametrize(
    ("given", "wrong"),
    [
        (lambda _: None, r"returned None; expected a NumPy array of slots"),
        (lambda used: used.tolist(), r"returned \[\d+, \d+\]; expected a NumPy array"),
        (lambda used: used / 2, r"returned 2 slots, which are float64 and no integers"),
        (lambda used: used - 100, r"returned 2 slots, of which some are none"),
        (lambda used: used + 100, r"returned 2 slots, of which some are none"),
        (fail, r"failed at .*test_policies_of_others.py:\d+: KeyError: 'boom'"),
    ],
)
def test_what_is_no_array_of_slots_is_refused(given: Callable[[Slots], Any], wrong: str) -> None:
    policy: Any = partial(Wrong, given=given)
    _, kernel = pair(config_of([ROWS]), {"t0": TableCache(policy, 2 / ROWS)})
    with pytest.raises(PluginError, match=r"others\.Wrong\.release of table t0 " + wrong):
        learn(kernel(batch_of([[0, 1], []])))


def test_integers_of_any_kind_and_no_slots_at_all_are_taken() -> None:
    for given in (lambda used: used.astype(np.int64), lambda _: np.array([])):
        policy: Any = partial(Wrong, given=given)
        _, kernel = pair(config_of([ROWS]), {"t0": TableCache(policy, 2 / ROWS)})
        learn(kernel(batch_of([[0, 1], []])))


def test_rows_that_never_leave_are_refused_where_they_are_too_many() -> None:
    policy: Any = partial(Wrong, given=lambda used: used[:0])
    _, kernel = pair(config_of([ROWS]), {"t0": TableCache(policy, 2 / ROWS)})
    held = kernel(batch_of([[0], []]))  # row 0 does not count while a batch needs it
    learn(kernel(batch_of([[1, 2], []])))
    with pytest.raises(
        PluginError,
        match=r"Wrong of table t0 lets 3 rows stay that no batch needs, and the capacity is 2: ",
    ):
        learn(held)


def test_a_policy_that_cannot_be_made_is_named() -> None:
    class Bare(RowPolicy):
        def __init__(self, rows: ShardRows) -> None:
            self.mine = rows.capacity

        def release(self, used: Slots, unpinned: Slots) -> Slots:
            return unpinned

    assert Bare.name == "Bare"
    with pytest.raises(PluginError, match=r"Bare\.__init__ of table t0 .* super\(\).__init__"):
        pair(config_of([ROWS]), {"t0": TableCache(Bare, 2 / ROWS)})
