"""The contract of each kind as a test suite that any plugin, a third party's too, can run.

Example:
    from recd_plugins.testing.contracts import PreprocessingContract

    class TestMyHash(PreprocessingContract):
        @pytest.fixture
        def plugin(self):
            return MyHash(MyHash.Options(buckets=100))
"""

from pkgutil import iter_modules

import pytest

pytest.register_assert_rewrite(*(f"{__name__}.{module.name}" for module in iter_modules(__path__)))

from recd_plugins.testing.contracts.cache import CacheContract  # noqa: E402
from recd_plugins.testing.contracts.callback import CallbackContract  # noqa: E402
from recd_plugins.testing.contracts.converter import ConverterContract  # noqa: E402
from recd_plugins.testing.contracts.dataset import DatasetContract  # noqa: E402
from recd_plugins.testing.contracts.ingestion import IngestionContract  # noqa: E402
from recd_plugins.testing.contracts.metric import MetricContract  # noqa: E402
from recd_plugins.testing.contracts.model import ModelContract  # noqa: E402
from recd_plugins.testing.contracts.optimizer import OptimizerContract  # noqa: E402
from recd_plugins.testing.contracts.pipeline import PipelineContract  # noqa: E402
from recd_plugins.testing.contracts.plugin import PluginContract  # noqa: E402
from recd_plugins.testing.contracts.pooling import (  # noqa: E402
    PoolingContract,
    TargetPoolingContract,
)
from recd_plugins.testing.contracts.preprocessing import PreprocessingContract  # noqa: E402
from recd_plugins.testing.contracts.sharding import ShardingContract  # noqa: E402

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
