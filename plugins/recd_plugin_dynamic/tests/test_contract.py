"""The contracts of the package's plugins."""

from pathlib import Path

import pytest

from recd_plugin_dynamic.eviction_log import EvictionLog
from recd_plugin_dynamic.sharding import DynamicSharding
from recd_plugins.testing.contracts import PluginContract, ShardingContract


class TestDynamicSharding(ShardingContract):
    @pytest.fixture
    def plugin(self) -> DynamicSharding:
        return DynamicSharding(DynamicSharding.Options(buckets=4))


class TestEvictionLog(PluginContract):
    @pytest.fixture
    def plugin(self) -> EvictionLog:
        return EvictionLog(EvictionLog.Options(folder=Path("evicted")))
