"""Runs the contract test suite of cache plugins."""

import pytest
from recd_plugin_tinylfu.cache import TinyLfuCache

from recd_plugins.testing.contracts import CacheContract


class TestTinyLfu(CacheContract):
    @pytest.fixture
    def plugin(self) -> TinyLfuCache:
        return TinyLfuCache(TinyLfuCache.Options(share=0.2))
