"""Every built-in plugin keeps the contract of its kind. Datasets need data: see their own tests."""

import pytest

from recd_plugins.config.manager import PluginManager
from recd_plugins.interfaces import Chooser, Plugin, Table, TargetPooling
from recd_plugins.testing.contracts import (
    CacheContract,
    ConverterContract,
    PoolingContract,
    PreprocessingContract,
    ShardingContract,
    TargetPoolingContract,
)

#: Options by name of the plugins that need some.
OPTIONS = {
    "dynamic.table": {"buckets": 4},
    "recd.sigrid_hash": {"buckets": 1000},
    "recd.first_x": {"x": 3},
    "recd.bucketize": {"borders": [-1, 0.5, 2, 2**62]},
    "recd.map_id": {"mapping": [[2**63 - 1, 7], [0, 5]]},
    "recd.clamp": {"lower": 1, "upper": 2**62 + 1},
    "recd.box_cox": {"lambda1": 0.5, "lambda2": 4.0},
    "recd.onehot": {"classes": 3},
    "recd.din": {"target": "item", "heads": 2},
    "recd.target_attention": {"target": "item", "positions": 3, "encoder_layers": 1},
    "recd.transformer": {"layers": 2},
    "tables.quantiles": {"buckets": 4},
    "tables.vocabulary": {"rows": 20},
}

BUILT_IN = PluginManager().plugins


def make(kind: str, name: str) -> Plugin:
    cls = BUILT_IN[kind][name].cls
    return cls(cls.Options.model_validate(OPTIONS.get(name, {})))


@pytest.mark.parametrize("kind", [kind for kind in BUILT_IN if kind not in ("callback", "model")])
def test_every_kind_has_a_plugin(kind):
    """Without any, the tests below would be skipped."""
    assert BUILT_IN[kind]


def suite(contract, kind, names=None):
    class Suite(contract):  # type: ignore[valid-type, misc]
        @pytest.fixture(params=sorted(names or BUILT_IN[kind]))
        def plugin(self, request):
            return make(kind, request.param)

    return Suite


TARGET_POOLINGS = {
    name for name, found in BUILT_IN["pooling"].items() if issubclass(found.cls, TargetPooling)
}
CHOOSERS = {n for n, found in BUILT_IN["sharding"].items() if issubclass(found.cls, Chooser)}
TIERED = {name for name in BUILT_IN["sharding"] if name.startswith("flexshard.")}
# Choosers are replaced by others.
OTHER_SHARDINGS = BUILT_IN["sharding"].keys() - TIERED - CHOOSERS

TestConverters = suite(ConverterContract, "converter")
TestPreprocessing = suite(PreprocessingContract, "preprocessing")
TestPoolings = suite(PoolingContract, "pooling", BUILT_IN["pooling"].keys() - TARGET_POOLINGS)
TestTargetPoolings = suite(TargetPoolingContract, "pooling", TARGET_POOLINGS)
TestShardings = suite(ShardingContract, "sharding", OTHER_SHARDINGS)
TestCaches = suite(CacheContract, "cache")


class TestPartialIkjts(ConverterContract):
    deduplicated = ("history", "tags")

    @pytest.fixture
    def plugin(self):
        cls = BUILT_IN["converter"]["recd.partial_ikjt"].cls
        return cls(cls.Options.model_validate({"features": self.deduplicated}))


class TestSigmoidTargetPooling(TargetPoolingContract):
    @pytest.fixture
    def plugin(self):
        cls = BUILT_IN["pooling"]["recd.din"].cls
        return cls(cls.Options.model_validate({"target": "item", "weights": "sigmoid"}))


class TestTieredShardings(ShardingContract):
    """These shardings take sequence tables only."""

    @pytest.fixture(params=sorted(TIERED))
    def plugin(self, request):
        return make("sharding", request.param)

    @pytest.fixture
    def tables(self):
        return (
            Table("t_clicks", ("clicks",), 1000, 16, pooled=False),
            Table("t_seen", ("seen", "bought"), 64, 16, pooled=False),
            Table("t_other", ("other",), 200, 16, pooled=False),
        )
