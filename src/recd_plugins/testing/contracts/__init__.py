"""Test suites that check whether a plugin follows the rules of its kind (its contract).

Third-party plugins can run them, too.

Example:
    from recd_plugins.testing.contracts import PreprocessingContract

    class TestMyHash(PreprocessingContract):
        @pytest.fixture
        def plugin(self):
            return MyHash(MyHash.Options(buckets=100))
"""

# ruff: noqa: E402

from pkgutil import iter_modules

import pytest

pytest.register_assert_rewrite(*(f"{__name__}.{module.name}" for module in iter_modules(__path__)))

from recd_plugins.testing.contracts.converter import ConverterContract
from recd_plugins.testing.contracts.dataset import DatasetContract
from recd_plugins.testing.contracts.plugin import PluginContract
from recd_plugins.testing.contracts.pooling import (
    PoolingContract,
    TargetPoolingContract,
)
from recd_plugins.testing.contracts.preprocessing import PreprocessingContract
from recd_plugins.testing.contracts.tables import (
    CacheContract,
    ShardingContract,
)

__all__ = [
    "CacheContract",
    "ConverterContract",
    "DatasetContract",
    "PluginContract",
    "PoolingContract",
    "PreprocessingContract",
    "ShardingContract",
    "TargetPoolingContract",
]
