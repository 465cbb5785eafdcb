"""Odd input of coalesced tables: what is refused, and what is as without coalescing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import SparseType
from torch import Tensor, nn
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ModuleSharder, ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.feature_processor_ import PositionWeightedModule
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from recd_plugins.config.schema import TrainingSpec
from recd_plugins.runtime.errors import RecdError
from recd_plugins.sharding import batch_form
from recd_plugins.sharding.sharders import (
    ExactEmbeddingBagCollectionSharder,
    ExactEmbeddingCollectionSharder,
    fused_params,
)

KEYS = ["a", "b"]
IDS = torch.tensor([3, 1, 3, 3, 0, 1, 1])
LENGTHS = torch.tensor([2, 0, 2, 1, 2, 0])
WEIGHTS = torch.tensor([0.5, 2.0, 1.0, -1.0, 3.0, 0.25, 1.5])


def bags(*, weighted: bool = False, times: int = 1) -> EmbeddingBagCollection:
    torch.manual_seed(0)
    tables = [
        EmbeddingBagConfig(
            name=f"t_{key}", embedding_dim=4, num_embeddings=5, feature_names=[key] * times
        )
        for key in KEYS
    ]
    return EmbeddingBagCollection(tables=tables, is_weighted=weighted)


def sequences() -> EmbeddingCollection:
    torch.manual_seed(0)
    return EmbeddingCollection(
        tables=[
            EmbeddingConfig(name=f"t_{key}", embedding_dim=4, num_embeddings=5, feature_names=[key])
            for key in KEYS
        ]
    )


def shard(module: nn.Module, coalesced: bool, **params: Any) -> DistributedModelParallel:
    """With the weights that ``module`` has."""
    tables = [f"t_{key}" for key in KEYS] if coalesced else []
    params = fused_params(TrainingSpec(optimizer="sgd", learning_rate=0.1)) | params
    sharder: ModuleSharder[Any]
    if isinstance(module, EmbeddingCollection):
        sharder = ExactEmbeddingCollectionSharder(params, coalesced=tables)
    else:
        sharder = ExactEmbeddingBagCollectionSharder(params, coalesced=tables)
    if isinstance(module, FeatureProcessedEmbeddingBagCollection):
        sharder = FeatureProcessedEmbeddingBagCollectionSharder(sharder)
    plan = construct_module_sharding_plan(
        module,
        {f"t_{key}": table_wise(rank=0, compute_kernel="fused") for key in KEYS},
        sharder,
        local_size=1,
        world_size=1,
        device_type="cpu",
    )
    weights = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    dmp = DistributedModelParallel(
        module=module,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=torch.device("cpu"),
        plan=ShardingPlan({"": plan}),
        sharders=[sharder],
    )
    for name, tensor in dmp.state_dict().items():
        if not name.startswith("_feature_processors"):
            tensor.local_shards()[0].tensor.copy_(weights[name])
    return dmp


def batch(weights: Tensor | None = None) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(keys=KEYS, values=IDS, lengths=LENGTHS, weights=weights)


def outputs(rank: int, world_size: int) -> list[tuple[str, Tensor, Tensor]]:
    """Of a batch, coalesced and not."""
    cases: list[tuple[str, Callable[[bool], Tensor]]] = [
        (f"weights {dtype}", partial(_weighted, dtype))
        for dtype in (torch.float16, torch.bfloat16, torch.float64)
    ]
    half = {"output_dtype": SparseType.FP16}
    cases += [
        ("ids as weights", lambda on: _output(shard(bags(), on), batch(IDS))),
        ("half bags", lambda on: _output(shard(bags(), on, **half), batch())),
        ("half sequences", lambda on: _output(shard(sequences(), on, **half), batch())),
        ("bags in halves", lambda on: _in_halves(shard(bags(), on))),
        ("sequences in halves", lambda on: _in_halves(shard(sequences(), on))),
    ]
    return [(name, output(True), output(False)) for name, output in cases]


def refusals(rank: int, world_size: int) -> list[str]:
    """What is refused, in words."""
    processed = FeatureProcessedEmbeddingBagCollection(
        bags(weighted=True), {key: PositionWeightedModule(3) for key in KEYS}
    )
    attempts: list[Callable[[], object]] = [
        lambda: _output(shard(bags(), True), _variable([[0, 1, 3], [0, 1, 2]])),
        lambda: _output(shard(bags(), True), _variable([[0, 1, 2], [0, -1, 2]])),
        lambda: _output(shard(bags(), True), _variable(None)),
        lambda: shard(processed, True)(batch()).wait(),
        lambda: shard(bags(times=2), True),
    ]
    found = []
    for attempt in attempts:
        try:
            attempt()
            found.append("")
        except RecdError as error:
            found.append(str(error))
    return found


def warnings_of_weights(rank: int, world_size: int) -> list[int]:
    """How many there are where batches have the weights of the module, and where they do not."""
    with patch.object(batch_form.logger, "warning") as warning:
        found = []
        for weighted in (True, False):
            dmp = shard(bags(weighted=weighted), True)
            for _ in range(2):
                _output(dmp, batch(WEIGHTS))
            found.append(warning.call_count)
            warning.reset_mock()
    return found


def _weighted(dtype: torch.dtype, coalesced: bool) -> Tensor:
    return _output(shard(bags(weighted=True), coalesced), batch(WEIGHTS.to(dtype)))


def _variable(inverse: list[list[int]] | None) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        keys=KEYS,
        values=IDS,
        lengths=LENGTHS,
        stride_per_key_per_rank=[[3], [3]],
        inverse_indices=None if inverse is None else (KEYS, torch.tensor(inverse)),
    )


def _output(dmp: nn.Module, features: KeyedJaggedTensor) -> Tensor:
    return _values(dmp(features).wait())


def _in_halves(dmp: DistributedModelParallel) -> Tensor:
    """By ``compute`` and ``output_dist``, as some train pipelines and modules call them."""
    module: Any = dmp.module
    context = module.create_context()
    features = module.input_dist(context, batch()).wait().wait()
    return _values(module.output_dist(context, module.compute(context, features)).wait())


def _values(output: Any) -> Tensor:
    if isinstance(output, KeyedTensor):
        return output.values().detach()
    return torch.cat([output[key].values().detach() for key in KEYS])
