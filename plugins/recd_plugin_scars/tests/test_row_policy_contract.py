"""The contract of row policies: the built-in ones pass it, and a wrong one does not."""

from __future__ import annotations

from typing import Any

import pytest

from recd_plugin_scars.runtime.policies import BUILT_IN, PolicyMaker, RowPolicy, Slots
from recd_plugin_scars.testing import RowPolicyContract


class TestBuiltIn(RowPolicyContract):
    @pytest.fixture(params=["lru", "lfu", "static"])
    def policy(self, request: Any) -> PolicyMaker:
        return BUILT_IN[request.param]


class Keeps(RowPolicy):
    def release(self, used: Slots, unpinned: Slots) -> Slots:
        return unpinned[:0]


class LetsAllLeave(RowPolicy):
    def release(self, used: Slots, unpinned: Slots) -> Slots:
        return used


@pytest.mark.parametrize(("policy", "wrong"), [(Keeps, "rows stay"), (LetsAllLeave, "batch needs")])
def test_wrong_policies_fail(policy: PolicyMaker, wrong: str) -> None:
    with pytest.raises(AssertionError, match=wrong):
        RowPolicyContract().test_rows_leave_in_time(policy, 20, 5, 2)
