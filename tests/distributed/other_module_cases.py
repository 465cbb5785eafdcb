"""Modules that TorchRec's own sharders take, trained with these sharders and with TorchRec's."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from tests.planning.test_planner import prepared, profile, registry
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    construct_module_sharding_plan,
    row_wise,
)
from torchrec.distributed.types import ModuleSharder, ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.feature_processor_ import (
    PositionWeightedModule,
    PositionWeightedModuleCollection,
)
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from recd_plugins.planning.planner import build_planner
from recd_plugins.runtime.errors import ExactnessError
from recd_plugins.sharding.pipeline import build_train_pipeline
from recd_plugins.testing.device import DEVICE
from recd_plugins.training.rank_state import copy_weights

FEATURES = ["a", "b"]
ROWS = 128
DIM = 4
MAX_LENGTH = 4
NUM_STEPS = 3
NUM_RAW_IDS = 100


def build(kind: str) -> nn.Module:
    if kind == "bags":
        return EmbeddingBagCollection(tables=_bags())
    if kind == "sequences":
        return EmbeddingCollection(tables=_tables())
    if kind == "fused bags":
        return FusedEmbeddingBagCollection(
            tables=_bags(), optimizer_type=torch.optim.SGD, optimizer_kwargs={"lr": 0.02}
        )
    if kind == "processed":
        collection = PositionWeightedModuleCollection(dict.fromkeys(FEATURES, MAX_LENGTH))
        return FeatureProcessedEmbeddingBagCollection(
            EmbeddingBagCollection(tables=_bags(), is_weighted=True), collection
        )
    if kind == "processed by a dict":
        processors = {feature: PositionWeightedModule(MAX_LENGTH) for feature in FEATURES}
        return FeatureProcessedEmbeddingBagCollection(
            EmbeddingBagCollection(tables=_bags(), is_weighted=True), processors
        )
    if kind == "managed bags":
        bags = EmbeddingBagCollection(tables=_bags())
        return ManagedCollisionEmbeddingBagCollection(bags, _maps(bags.embedding_bag_configs()))
    sequences = EmbeddingCollection(tables=_tables())
    if kind == "prioritized sequences":
        from torchrec.modules.pec_embedding_modules import PECEmbeddingCollection

        return PECEmbeddingCollection(sequences)
    assert kind == "managed sequences"
    return ManagedCollisionEmbeddingCollection(sequences, _maps(sequences.embedding_configs()))


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.sparse = build(kind)
        self.top = nn.Linear(DIM * len(FEATURES), 1)

    def rows(self, features: KeyedJaggedTensor) -> Tensor:
        """Vectors of all rows, or of all ids of sequences; features next to each other."""
        found: Any = self.sparse(features)
        if isinstance(found, tuple):
            found = found[0]
        vectors = [found[feature] for feature in FEATURES]
        return torch.cat([v.values() if isinstance(v, JaggedTensor) else v for v in vectors], dim=1)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return self.top(self.rows(features)).square().mean()


def sharded_inside(rank: int, world_size: int, kind: str) -> tuple[int, str]:
    """Raw ids whose rows differ between ranks without a sharder of the module, and the refusal."""
    torch.manual_seed(0)
    reg, model = registry(), Model(kind)
    ready = prepared(reg, model)
    sharders = ready.sharders()[:2]
    before = {n: t.clone() for n, t in model.state_dict().items() if n.endswith("weight")}
    inside = nn.ModuleDict({"sparse": nn.ModuleDict({"_embedding_module": build("bags")})})
    planner = build_planner(ready, world_size=world_size, profile=profile(), device=DEVICE)
    dmp = _shard(model, planner.plan(inside, sharders), sharders)
    state = dmp.state_dict()
    copy_weights({name: state[name] for name in before}, before)
    for step in range(NUM_STEPS):
        dmp(batch(rank, step, deduplicated=False).to(DEVICE)).backward()
    dmp.eval()
    with torch.no_grad():
        rows = dmp.module.rows(raw_ids(deduplicated=False).to(DEVICE))
    other = [torch.empty_like(rows) for _ in range(world_size)]
    dist.all_gather(other, rows)
    differ = int((other[0] != other[1]).any(dim=1).sum())
    try:
        build_train_pipeline(dmp, torch.optim.SGD(model.top.parameters()), DEVICE)
    except ExactnessError as error:
        return differ, str(error)
    return differ, ""


def weights_after_processors(rank: int, world_size: int) -> tuple[bool, bool]:
    """Whether a batch that row-wise tables have looked up has weights, and what is sent of it."""
    model = Model("processed")
    sharders = prepared(registry(), model).sharders()
    (sharder,) = (each for each in sharders if each.module_type is type(model.sparse))
    plan = construct_module_sharding_plan(
        model.sparse,
        {f"t_{feature}": row_wise() for feature in FEATURES},
        sharder,
        local_size=world_size,
        world_size=world_size,
        device_type=DEVICE.type,
    )
    dmp = _shard(model, ShardingPlan({"sparse": plan}), sharders)
    features = batch(rank, 0, deduplicated=False).to(DEVICE)
    dmp(features)
    (sent,), _ = dmp.module.sparse.preprocess_input([features], {})  # as train pipelines do
    return features.weights_or_none() is not None, sent.weights_or_none() is not None


def batch(rank: int, step: int, deduplicated: bool) -> KeyedJaggedTensor:
    """Six rows of ids, of which two are unique; the same rows in both forms."""
    ids = torch.arange(4) + 10 * step + 3 * rank
    if deduplicated:
        return KeyedJaggedTensor(
            keys=FEATURES,
            values=torch.cat([ids, ids + 1]),
            lengths=torch.tensor([3, 1] * 2),
            stride_per_key_per_rank=[[2]] * 2,
            inverse_indices=(FEATURES, torch.tensor([[0, 1, 0, 0, 1, 0]] * 2)),
        )
    rows = [ids[:3], ids[3:], ids[:3], ids[:3], ids[3:], ids[:3]]
    return KeyedJaggedTensor(
        keys=FEATURES,
        values=torch.cat([*rows, *(row + 1 for row in rows)]),
        lengths=torch.tensor([3, 1, 3, 3, 1, 3] * 2),
    )


def raw_ids(deduplicated: bool) -> KeyedJaggedTensor:
    """One id a row."""
    ids = torch.arange(NUM_RAW_IDS)
    return KeyedJaggedTensor(
        keys=FEATURES,
        values=ids.repeat(2),
        lengths=torch.ones(2 * NUM_RAW_IDS, dtype=torch.long),
        stride_per_key_per_rank=[[NUM_RAW_IDS]] * 2 if deduplicated else None,
        inverse_indices=(FEATURES, ids.repeat(2, 1)) if deduplicated else None,
    )


def _shard(
    model: nn.Module, plan: ShardingPlan, sharders: list[ModuleSharder[nn.Module]]
) -> DistributedModelParallel:
    return DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=DEVICE,
        plan=plan,
        sharders=sharders,
    )


def _bags() -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(
            name=f"t_{feature}", embedding_dim=DIM, num_embeddings=ROWS, feature_names=[feature]
        )
        for feature in FEATURES
    ]


def _tables() -> list[EmbeddingConfig]:
    return [
        EmbeddingConfig(
            name=f"t_{feature}", embedding_dim=DIM, num_embeddings=ROWS, feature_names=[feature]
        )
        for feature in FEATURES
    ]


def _maps(configs: Any) -> ManagedCollisionCollection:
    return ManagedCollisionCollection(
        {
            config.name: MCHManagedCollisionModule(
                zch_size=ROWS,
                device=DEVICE,
                eviction_policy=DistanceLFU_EvictionPolicy(),
                eviction_interval=1,
                input_hash_size=4000,
            )
            for config in configs
        },
        configs,
    )
