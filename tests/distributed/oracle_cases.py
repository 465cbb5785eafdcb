"""TorchRec's own check of a sharder, run in ranks that are there already."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch.distributed as dist
from tests.sharded import CPU, configs
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.modules.embedding_configs import EmbeddingConfig, PoolingType

from recd_plugins.sharding.sharders import (
    ExactEmbeddingBagCollectionSharder,
    ExactEmbeddingCollectionSharder,
)
from recd_plugins.testing.gloo import run_on_ranks

# The wheel has torchrec.distributed.test_utils, but not the module of TorchRec's tests from which
# it imports one sharder, for tests of 2D parallelism.
if find_spec("torchrec.distributed.tests") is None:
    _missing = ModuleType("torchrec.distributed.tests.test_sequence_model")
    _missing.TestEmbeddingCollectionSharder = EmbeddingCollectionSharder
    sys.modules["torchrec.distributed.tests"] = ModuleType("torchrec.distributed.tests")
    sys.modules[_missing.__name__] = _missing

from torchrec.distributed.test_utils.test_model import TestMixedEmbeddingSparseArch, TestSparseNN
from torchrec.distributed.test_utils.test_model_parallel import ModelParallelTestShared
from torchrec.distributed.test_utils.test_sharding import sharding_single_rank_test_single_process

FUSED = {"learning_rate": 0.1}
SHARDERS: dict[bool, tuple[Any, Any]] = {
    False: (ExactEmbeddingBagCollectionSharder, EmbeddingBagCollectionSharder),
    True: (ExactEmbeddingCollectionSharder, EmbeddingCollectionSharder),
}


def _only(kind: str, compute_device_type: str) -> list[str]:
    return [kind]


@dataclass(frozen=True)
class OracleCase:
    sequences: bool
    sharding: str
    variable_batch_per_feature: bool = False
    variable_batch_size: bool = False
    pooling: PoolingType = PoolingType.SUM

    @property
    def has_weighted_tables(self) -> bool:
        # TorchRec's generator of variable batches makes no weights, nor does that of sequences.
        weightless = self.sequences or self.variable_batch_per_feature
        return not weightless and self.pooling == PoolingType.SUM


def check(case: OracleCase, *, stock: bool) -> None:
    """Raises where one step of the sharded model differs from the unsharded one."""
    exact_or_stock = SHARDERS[case.sequences]
    sharder: Any = exact_or_stock[stock](fused_params=dict(FUSED))
    # As TorchRec's test sharders, it leaves the planner one sharding type.
    sharder.sharding_types = partial(_only, case.sharding)
    function = check_sequences if case.sequences else sharding_single_rank_test_single_process
    _Oracle(function)._test_sharding(
        sharders=[sharder],
        backend="gloo",
        world_size=2,
        local_size=2,
        model_class=TestMixedEmbeddingSparseArch if case.sequences else TestSparseNN,
        has_weighted_tables=case.has_weighted_tables,
        variable_batch_size=case.variable_batch_size,
        variable_batch_per_feature=case.variable_batch_per_feature,
        pooling=case.pooling,
    )


class _Oracle(ModelParallelTestShared):
    """TorchRec's test case; its processes are ours, which are quicker to start.

    What they run is ours, too: TorchRec (1.6 and 1.7) has no argument for it.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        super().__init__("setUp")
        self.setUp("gloo")
        self._function = function

    def _run_multi_process_test(self, *, callable: Any, world_size: int, **arguments: Any) -> None:
        run_on_ranks(_on_rank, world_size, self._function, arguments)


def _on_rank(
    rank: int, world_size: int, function: Callable[..., None], arguments: dict[str, Any]
) -> None:
    del arguments["backend"]
    here = {"rank": rank, "world_size": world_size, "device": CPU}
    function(pg=dist.group.WORLD, **here, **arguments)


def check_sequences(**arguments: Any) -> None:
    arguments["tables"] = [
        configs(EmbeddingConfig, [f"feature_{index}"], 10 * (index + 1), 16)[0]
        for index in range(3)
    ]
    sharding_single_rank_test_single_process(**{**arguments, "embedding_groups": None})
