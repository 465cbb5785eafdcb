"""The contract of the callback. Tests of built-in plugins have that of the sharding."""

from __future__ import annotations

from pathlib import Path

import pytest

from recd_plugin_dynamic.eviction_log import EvictionLog
from recd_plugins.testing.contracts import PluginContract


class TestEvictionLog(PluginContract):
    @pytest.fixture
    def plugin(self) -> EvictionLog:
        return EvictionLog(EvictionLog.Options(folder=Path("evicted")))
