"""Runs the contract test suite of sharding plugins."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from recd_plugin_hotrows.sharding import HotRows

from recd_plugins.api import Table
from recd_plugins.testing.contracts import ShardingContract


class TestHotRows(ShardingContract):
    @pytest.fixture
    def plugin(self) -> HotRows:
        return HotRows(HotRows.Options(rows=20))

    @pytest.fixture
    def tables(self) -> Sequence[Table]:
        tables = (Table(name, (name[2:],), 500, 16, pooled=False) for name in ("t_a", "t_history"))
        return (*(replace(table) for table in tables), Table("t_other", ("other",), 200, 16, True))
