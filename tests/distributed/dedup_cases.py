"""What one feature costs on two ranks, with all rows and deduplicated: bytes, ids and memory."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from tests.distributed.bare_prepared import bare_prepared, bare_registry
from tests.distributed.guard_cases import CPU, TRAINING
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    construct_module_sharding_plan,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins.data.lower import lower
from recd_plugins.interfaces.batch import Batch, Placement
from recd_plugins.sharding.build import build_sharders
from recd_plugins.sharding.byte_counter import CollectiveBytes, lookup_ids
from recd_plugins.sparse import InverseKeyedJaggedTensor, PartialInverseKeyedJaggedTensor
from recd_plugins.training.measurement import StepProfile

BATCH_SIZE, SESSION, LENGTH = 480, 16, 40
ROWS = 1000
# A pooled feature's vectors of all rows are needed whatever is deduplicated: narrow ones leave the
# memory to what can be.
DIM = {"pooled": 4, "sequence": 32}

Form = Literal["plain", "unique", "partial"]


@dataclass(frozen=True)
class Cost:
    """Of one training step of one rank.

    Attributes:
        sent: bytes by phase and payload.
        ids: looked up here.
        memory: the most bytes above those at the step's start.
        batch_ids: ids of this rank's batch.
        stored_ids: ids that are left of them.
        stored_rows: rows that are left of ``BATCH_SIZE``.
    """

    sent: Counter[tuple[str, str]]
    ids: int
    memory: float
    batch_ids: int
    stored_ids: int
    stored_rows: int


def costs(
    rank: int, world_size: int, pooled: bool, sharding: str, form: Form, moving: bool, even: bool
) -> tuple[Cost, Cost]:
    """The same rows plain and as ``form``.

    With ``moving``, each new row of a session is the one before moved on by one id; else it is
    another. With ``even``, all rows have ``LENGTH`` ids, else half to one and a half times as many.
    """
    kjt = _rows(rank, moving=moving, even=even)
    # A sharded module takes for good what it took first: plain or variable batches.
    plain, deduplicated = (_shard(pooled, sharding, world_size) for _ in range(2))
    return _cost(plain, pooled, kjt, "plain"), _cost(deduplicated, pooled, kjt, form)


def _cost(dmp: nn.Module, pooled: bool, kjt: KeyedJaggedTensor, form: Form) -> Cost:
    dense, labels = torch.zeros(BATCH_SIZE, 0), torch.zeros(BATCH_SIZE)
    if form == "plain":
        batch = Batch(dense, labels, kjt)
    elif form == "unique":
        batch = Batch(dense, labels, ikjts=InverseKeyedJaggedTensor.from_kjt(kjt, [["f"]]))
    else:
        partial = PartialInverseKeyedJaggedTensor.from_kjt(kjt)
        batch = Batch(dense, labels, partials=(partial,))
    placement = Placement(pooled=("f",)) if pooled else Placement(sequence=("f",))
    model_input = lower(batch, placement)
    features = model_input.sparse_features if pooled else model_input.sequence_features
    assert features is not None
    # gloo's threads free some buffers late, which adds to some steps.
    memory = min(_peak(dmp, pooled, features) for _ in range(6))
    with CollectiveBytes() as counter, lookup_ids(dmp) as ids:
        _train(dmp, pooled, features)
    sent: Counter[tuple[str, str]] = Counter()
    for traffic, num_bytes in counter.sent.items():
        sent[traffic.phase, traffic.payload] += num_bytes
    return Cost(
        sent,
        ids.total,
        memory,
        batch_ids=kjt.values().numel(),
        stored_ids=features.values().numel(),
        stored_rows=features.lengths().numel(),
    )


def _peak(dmp: nn.Module, pooled: bool, features: KeyedJaggedTensor) -> float:
    profile = StepProfile(CPU, warmup=1)
    for _ in range(3):
        with profile.step():
            _train(dmp, pooled, features)
    return profile.memory().peak


def _train(dmp: nn.Module, pooled: bool, features: KeyedJaggedTensor) -> None:
    output = dmp(features)
    values: Tensor = output.values() if pooled else output["f"].values()
    torch.autograd.backward(values, torch.ones(1, 1).expand_as(values))


def _rows(rank: int, *, moving: bool, even: bool) -> KeyedJaggedTensor:
    random = torch.Generator().manual_seed(rank)
    lists: list[Tensor] = []
    for _ in range(BATCH_SIZE // SESSION):
        length = (
            LENGTH
            if even
            else int(torch.randint(LENGTH // 2, LENGTH * 3 // 2, (1,), generator=random))
        )
        ids = torch.randint(0, ROWS, (length + SESSION,), generator=random)
        start = 0
        for _ in range(SESSION):
            lists.append(ids[start : start + length])
            if float(torch.rand(1, generator=random)) < 0.2:
                start += 1
                if not moving:
                    ids = torch.randint(0, ROWS, (length + SESSION,), generator=random)
    return KeyedJaggedTensor(
        ["f"], torch.cat(lists), lengths=torch.tensor([len(ids) for ids in lists])
    )


def _shard(pooled: bool, sharding: str, world_size: int) -> DistributedModelParallel:
    dim = DIM["pooled" if pooled else "sequence"]
    sizes: dict[str, Any] = {"name": "t", "embedding_dim": dim, "num_embeddings": ROWS}
    module: nn.Module = (
        EmbeddingBagCollection(tables=[EmbeddingBagConfig(feature_names=["f"], **sizes)])
        if pooled
        else EmbeddingCollection(tables=[EmbeddingConfig(feature_names=["f"], **sizes)])
    )
    sharders = build_sharders(bare_prepared(bare_registry(TRAINING)))
    sharder = next(each for each in sharders if each.module_type is type(module))
    generator = {
        "table_wise": lambda: table_wise(rank=0, compute_kernel="fused"),
        "row_wise": lambda: row_wise(compute_kernel="fused"),
    }[sharding]()
    plan = construct_module_sharding_plan(
        module,
        {"t": generator},
        sharder,
        local_size=world_size,
        world_size=world_size,
        device_type="cpu",
    )
    return DistributedModelParallel(
        module=module,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=CPU,
        plan=ShardingPlan({"": plan}),
        sharders=sharders,
    )
