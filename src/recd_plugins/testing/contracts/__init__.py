"""A contract test suite for each plugin kind. Third-party plugins can run it, too.

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
from recd_plugins.testing.contracts.ingestion import IngestionContract
from recd_plugins.testing.contracts.model import ModelContract
from recd_plugins.testing.contracts.plugin import PluginContract
from recd_plugins.testing.contracts.pooling import (
    PoolingContract,
    TargetPoolingContract,
)
from recd_plugins.testing.contracts.preprocessing import PreprocessingContract
from recd_plugins.testing.contracts.run import (
    CallbackContract,
    MetricContract,
    PipelineContract,
)
from recd_plugins.testing.contracts.tables import (
    CacheContract,
    OptimizerContract,
    ShardingContract,
)

__all__ = [
    "CacheContract",
    "CallbackContract",
    "ConverterContract",
    "DatasetContract",
    "IngestionContract",
    "MetricContract",
    "ModelContract",
    "OptimizerContract",
    "PipelineContract",
    "PluginContract",
    "PoolingContract",
    "PreprocessingContract",
    "ShardingContract",
    "TargetPoolingContract",
]
