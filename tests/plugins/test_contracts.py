"""Every built-in plugin keeps the contract of its kind. Datasets need data: see their own tests."""

import pytest

from recd_plugins.interfaces import Plugin
from recd_plugins.manager import PluginManager
from recd_plugins.testing.contracts import (
    CacheContract,
    ConverterContract,
    PoolingContract,
    PreprocessingContract,
    ShardingContract,
)

#: Options by name of the plugins that need some.
OPTIONS = {
    "recd.sigrid_hash": {"buckets": 1000},
    "recd.first_x": {"x": 3},
    "recd.bucketize": {"borders": [-1, 0.5, 2, 2**62]},
    "recd.map_id": {"mapping": [[2**63 - 1, 7], [0, 5]]},
    "recd.clamp": {"lower": 1, "upper": 2**62 + 1},
    "recd.box_cox": {"lambda1": 0.5, "lambda2": 4.0},
    "recd.onehot": {"classes": 3},
}

BUILT_IN = PluginManager().plugins


def make(kind: str, name: str) -> Plugin:
    cls = BUILT_IN[kind][name].cls
    return cls(cls.Options.model_validate(OPTIONS.get(name, {})))


@pytest.mark.parametrize("kind", BUILT_IN)
def test_every_kind_has_a_plugin(kind):
    """Without any, the tests below would be skipped."""
    assert BUILT_IN[kind]


class TestConverters(ConverterContract):
    @pytest.fixture(params=BUILT_IN["converter"])
    def plugin(self, request):
        return make("converter", request.param)


class TestPartialIkjts(ConverterContract):
    deduplicated = ("history", "tags")

    @pytest.fixture
    def plugin(self):
        cls = BUILT_IN["converter"]["recd.partial_ikjt"].cls
        return cls(cls.Options.model_validate({"features": self.deduplicated}))


class TestPreprocessing(PreprocessingContract):
    @pytest.fixture(params=BUILT_IN["preprocessing"])
    def plugin(self, request):
        return make("preprocessing", request.param)


class TestPoolings(PoolingContract):
    @pytest.fixture(params=BUILT_IN["pooling"])
    def plugin(self, request):
        return make("pooling", request.param)


class TestShardings(ShardingContract):
    @pytest.fixture(params=BUILT_IN["sharding"])
    def plugin(self, request):
        return make("sharding", request.param)


class TestCaches(CacheContract):
    @pytest.fixture(params=BUILT_IN["cache"])
    def plugin(self, request):
        return make("cache", request.param)
