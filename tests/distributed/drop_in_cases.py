"""A trainer with an optimizer, parameters and codecs of its own, on either kind of sharders."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from tests.planning.test_planner import prepared, profile, registry
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fbgemm_qcomm_codec import (
    CommType,
    QCommsConfig,
    get_qcomm_codecs,
    get_qcomm_codecs_registry,
)
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.sharding_plan import (
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import CommOp, ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins.planning.planner import build_planner
from recd_plugins.sharding.build import build_sharders
from recd_plugins.sharding.byte_counter import CollectiveBytes
from recd_plugins.testing.device import DEVICE
from recd_plugins.training.rank_state import copy_weights

FEATURES = [f"f{i}" for i in range(6)]
ROWS, DIM, NUM_STEPS, BATCH = 40, 16, 5, 32


@dataclass(frozen=True)
class Trainer:
    """What it says beside the model.

    Attributes:
        in_backward: whether its tables bring RowWiseAdagrad.
        fused_params: of its sharder.
        codecs: whether collectives are quantised.
        in_base: whether these are passed in a sharder of TorchRec's.
        wire: of the registry, in place of codecs.
    """

    in_backward: bool = False
    fused_params: dict[str, Any] = field(default_factory=dict)
    codecs: bool = False
    in_base: bool = False
    wire: str = "fp32"


def local_ranks() -> int:
    return int(os.environ["LOCAL_WORLD_SIZE"])


@dataclass(frozen=True)
class Trained:
    losses: list[float]
    sent: int
    kinds: set[str]


def both_sides(rank: int, world_size: int, trainer: Trainer) -> tuple[Trained, Trained]:
    """With these sharders and this planner, and with TorchRec's sharders on the same plan."""
    codecs: Any = None
    if trainer.codecs:
        config = QCommsConfig(forward_precision=CommType.FP16, backward_precision=CommType.FP16)
        codecs = get_qcomm_codecs_registry(config, device=DEVICE)
    stock = EmbeddingBagCollectionSharder(dict(trainer.fused_params), codecs)
    # A rule that must not be theirs.
    ready = prepared(registry(optimizer="sgd", wire=trainer.wire), _model(trainer))
    if trainer.wire != "fp32":
        ours: Any = build_sharders(ready)
    elif trainer.in_base:
        ours = build_sharders(ready, [stock])
    else:
        ours = build_sharders(
            ready, fused_params=trainer.fused_params, qcomm_codecs_registry=codecs
        )
    planner = build_planner(
        ready,
        world_size=world_size,
        profile=profile(),
        device=DEVICE,
        replicate=True,
        constraints={"t_f0": ParameterConstraints(sharding_types=["row_wise"])},
    )
    plan = planner.plan(_model(trainer), ours)
    kinds = {table.sharding_type for module in plan.plan.values() for table in module.values()}
    found = []
    for sharders in (ours, [stock]):
        model = _model(trainer)
        weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        dmp = DistributedModelParallel(
            model,
            env=ShardingEnv.from_process_group(dist.group.WORLD),
            device=DEVICE,
            plan=plan,
            sharders=sharders,
        )
        copy_weights(dmp.state_dict(), weights)
        with CollectiveBytes() as counter:
            losses = [_step(dmp, rank, step) for step in range(NUM_STEPS)]
        found.append(Trained(losses, counter.total, kinds))
    return found[0], found[1]


def warnings_of_a_replicating_plan(rank: int, world_size: int) -> list[str]:
    """What the sharders say of tables that bring an optimizer."""
    model = _model(Trainer(in_backward=True))
    sharder: Any = build_sharders(prepared(registry(), model))[0]
    generators = {f"t_{feature}": data_parallel() for feature in FEATURES}
    plan = construct_module_sharding_plan(
        model["bags"], generators, sharder, local_ranks(), world_size, DEVICE.type
    )
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("recd_plugins")
    logger.addHandler(handler)
    try:
        sharder.shard(model["bags"], plan, ShardingEnv.from_process_group(dist.group.WORLD), DEVICE)
    finally:
        logger.removeHandler(handler)
    return said


def _model(trainer: Trainer) -> nn.ModuleDict:
    torch.manual_seed(0)
    bags = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=f"t_{feature}", embedding_dim=DIM, num_embeddings=ROWS, feature_names=[feature]
            )
            for feature in FEATURES
        ]
    )
    if trainer.in_backward:
        apply_optimizer_in_backward(RowWiseAdagrad, bags.parameters(), {"lr": 0.1, "eps": 1e-4})
    return nn.ModuleDict({"bags": bags})


def _step(dmp: DistributedModelParallel, rank: int, step: int, batch: int = BATCH) -> float:
    generator = torch.Generator().manual_seed(100 * rank + step)
    ids = torch.randint(0, ROWS, (len(FEATURES) * batch,), generator=generator)
    features = KeyedJaggedTensor(
        keys=FEATURES, values=ids, lengths=torch.ones(len(ids), dtype=torch.long)
    )
    bags = dmp.module["bags"](features.to(DEVICE))
    vectors = torch.stack([bags[feature] for feature in FEATURES])
    loss = (vectors.sum(dim=(0, 2)) - 1).square().mean()
    loss.backward()
    return loss.item()


ADAGRAD = {
    "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    "learning_rate": 0.1,
    "eps": 1e-4,
}


def tables_that_learn(rank: int, world_size: int, in_base: bool, even: bool) -> list[str]:
    """Tables of which a shard moved in a step, with a trainer's own codecs of bf16.

    Batches of different sizes on the ranks have row-wise sums go by synchronous collectives.
    """
    config = QCommsConfig(forward_precision=CommType.BF16, backward_precision=CommType.BF16)
    # Not get_qcomm_codecs_registry, which takes fp16 for bf16 on CPU.
    codecs = {each.name: get_qcomm_codecs(config) for each in CommOp}
    stock = EmbeddingBagCollectionSharder(dict(ADAGRAD), codecs)
    model = _model(Trainer())
    ready = prepared(registry(), model)
    ours: Any = (
        build_sharders(ready, [stock])
        if in_base
        else build_sharders(ready, fused_params=ADAGRAD, qcomm_codecs_registry=codecs)
    )
    first, *others = (f"t_{feature}" for feature in FEATURES)
    placed = {name: table_wise(rank=0, compute_kernel="fused") for name in others}
    generators = {first: row_wise(compute_kernel="fused"), **placed}
    plan = construct_module_sharding_plan(
        model["bags"], generators, ours[0], local_ranks(), world_size, DEVICE.type
    )
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    dmp = DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=DEVICE,
        plan=ShardingPlan({"bags": plan}),
        sharders=ours,
    )
    copy_weights(dmp.state_dict(), weights)
    _step(dmp, rank, 0, BATCH if even else BATCH + rank)
    moved = []
    for name, state in dmp.state_dict().items():
        for shard in state.local_shards():
            before = weights[name].narrow(0, shard.metadata.shard_offsets[0], len(shard.tensor))
            if not torch.equal(shard.tensor.cpu(), before):
                moved.append(name.split(".")[-2])
    return moved
