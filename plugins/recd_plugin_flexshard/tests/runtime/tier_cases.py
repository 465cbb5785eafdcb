"""One parity case on one rank: train with tiers, and plain on the global batch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
import torch.distributed as dist
from tests.distributed.parity_cases import Optimizer, _fault, _whole, from_rank_0
from tests.distributed.parity_model import DIM, ReferenceOptimizer
from torch import Tensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    ParameterShardingGenerator,
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import (
    CommOp,
    QuantizedCommCodecs,
    ShardedModule,
    ShardingEnv,
    ShardingPlan,
)
from torchrec.optim.keyed import CombinedOptimizer

from recd_plugin_flexshard.runtime import (
    ShardedTieredEmbeddingCollection,
    TieredEmbeddingCollectionSharder,
)
from recd_plugin_flexshard.runtime.collection import CopyTier
from recd_plugin_flexshard.tests.runtime.tier_model import (
    FEATURES,
    NUM_STEPS,
    TIERS,
    Form,
    TierModel,
    Tiers,
    model_input,
)
from recd_plugins.config.schema import TrainingSpec
from recd_plugins.interfaces.batch import ModelInput
from recd_plugins.sharding.byte_counter import CollectiveBytes
from recd_plugins.sharding.gradient_dedup import all_gradients_sent
from recd_plugins.sharding.guards import check_every_parameter_is_trained
from recd_plugins.sharding.sharders import fused_params
from recd_plugins.sharding.wire import Int8, wire_codecs
from recd_plugins.testing.device import DEVICE
from recd_plugins.training.optimizer import build_optimizer
from recd_plugins.training.rank_state import copy_weights

# Gradients of all tiers are summed over ranks and not averaged, or those of one tier are those of
# this rank alone.
Fault = Literal["sum", "hot", "flex"]
LEARNING_RATE = {"sgd": 0.5, "rowwise_adagrad": 0.05}
# Of the size of the sums, so that both count in the first steps.
EPS = 1e-3
_SEQUENCES = CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL.name


@dataclass(frozen=True)
class Case:
    tiers: Tiers
    optimizer: Optimizer
    pipelined: bool
    form: Form
    # Of the tables without tiers.
    untiered: str = "row_wise"
    fault: Fault | None = None
    device_type: str = DEVICE.type
    # Tables whose ids are made unique before they are sent.
    coalesced: tuple[str, ...] = ()
    # Tiers of which the touched rows alone are summed.
    sparse: tuple[CopyTier, ...] = ()
    wire: Literal["fp32", "fp16", "bf16", "int8"] = "fp32"
    # Equal ones too, so that bytes are those of rows.
    sends_all: bool = False

    def device(self, rank: int) -> torch.device:
        if self.device_type == "cpu":
            return torch.device("cpu")
        return torch.device("cuda", rank % torch.cuda.device_count())


@dataclass(frozen=True)
class Difference:
    """Largest absolute differences of one rank from the reference, and what makes them count.

    ``apart`` is that between the copies of a row; ``sent`` are bytes by group of ranks.
    """

    loss: float
    output: float
    weight: float
    moved: float
    apart: float
    num_modules: int
    num_pipelined: int
    sent: dict[str, int]


def run_cases(rank: int, world_size: int, cases: list[Case]) -> list[Difference]:
    """Several in one launch, which takes longer than a case."""
    return [_run(rank, world_size, case) for case in cases]


def _run(rank: int, world_size: int, case: Case) -> Difference:
    initial = TierModel(None).state_dict()
    dmp, optimizer = shard(case, world_size, initial)
    if case.fault in ("hot", "flex"):
        _leave_alone(dmp, case.fault)
    with _fault(case.fault == "sum"), CollectiveBytes() as counter:
        outputs, num_pipelined = _train(dmp, optimizer, case, rank)
    in_columns = tuple(table for table in FEATURES if _sharding(case, table) == "column_wise")
    reference = _reference(case.optimizer, in_columns, world_size)
    weights = {name: _whole(tensor).cpu() for name, tensor in dmp.state_dict().items()}
    assert weights.keys() == initial.keys()
    expected = [of_ranks[rank] for of_ranks in reference.outputs]
    pairs = list(zip(outputs, expected, strict=True))
    trained = reference.weights
    return Difference(
        loss=max(abs(float(got[0].cpu() - want[0])) for got, want in pairs),
        output=max(float((got[1].cpu() - want[1]).abs().max()) for got, want in pairs),
        weight=max(float((weights[name] - trained[name]).abs().max()) for name in weights),
        apart=_apart(dmp),
        moved=min(float((trained[name] - initial[name]).abs().max()) for name in weights),
        num_modules=sum(isinstance(module, ShardedModule) for module in dmp.modules()),
        num_pipelined=num_pipelined,
        sent=_floats(counter, dmp),
    )


def _floats(counter: CollectiveBytes, dmp: DistributedModelParallel) -> dict[str, int]:
    """Bytes of rows and gradients by tier."""
    (module,) = (m for m in dmp.modules() if isinstance(m, ShardedTieredEmbeddingCollection))
    found = dict.fromkeys(module.groups.names.values(), 0)
    for traffic, num_bytes in counter.sent.items():
        if traffic.payload == "floats" and traffic.group in module.groups.names:
            found[module.groups.names[traffic.group]] += num_bytes
    return found


def _apart(dmp: DistributedModelParallel) -> float:
    (module,) = (m for m in dmp.modules() if isinstance(m, ShardedTieredEmbeddingCollection))
    found = 0.0
    for overlay, group in (
        (module.hot, module.groups.hot),
        (module.flex, module.groups.flex_gradients),
    ):
        copies = [torch.empty_like(overlay.weights) for _ in range(group.size())]
        dist.all_gather(copies, overlay.weights, group=group)
        differences = torch.stack(copies) - overlay.weights
        found = max(found, float(differences.abs().max()) if differences.numel() else 0.0)
    return found


def shard(
    case: Case, world_size: int, weights: dict[str, Tensor]
) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    training = TrainingSpec(
        optimizer=case.optimizer,
        learning_rate=LEARNING_RATE[case.optimizer],
        eps=EPS,
        wire=case.wire,
    )
    # Rows of tests are shorter than those that int8 is offered for.
    codecs = (
        {_SEQUENCES: QuantizedCommCodecs(Int8(DIM), Int8(DIM))}
        if case.wire == "int8"
        else wire_codecs(training, None, ())
    )
    sharder = TieredEmbeddingCollectionSharder(
        fused_params(training), codecs, coalesced=case.coalesced
    )
    model = TierModel(TIERS[case.tiers], case.sparse)
    plan = construct_module_sharding_plan(
        model.sequences,
        {table: _generator(case, table, world_size) for table in FEATURES},
        sharder,
        local_size=int(os.environ["LOCAL_WORLD_SIZE"]),
        world_size=world_size,
        device_type=case.device_type,
    )
    with all_gradients_sent() if case.sends_all else nullcontext():
        dmp = DistributedModelParallel(
            module=model,
            env=ShardingEnv.from_process_group(dist.group.WORLD),
            device=case.device(dist.get_rank()),
            plan=ShardingPlan({"sequences": plan}),
            sharders=[sharder],
        )
    copy_weights(dmp.state_dict(), weights)
    optimizer = build_optimizer(dmp, training)
    check_every_parameter_is_trained(dmp, optimizer)
    return dmp, optimizer


def _leave_alone(dmp: DistributedModelParallel, tier: Literal["hot", "flex"]) -> None:
    (module,) = (m for m in dmp.modules() if isinstance(m, ShardedTieredEmbeddingCollection))
    overlay = module.hot if tier == "hot" else module.flex
    assert module.groups.flex.size() == 1
    overlay._group = module.groups.flex


def _generator(case: Case, table: str, world_size: int) -> ParameterShardingGenerator:
    sharding = "row_wise" if table in TIERS[case.tiers] else case.untiered
    if sharding == "row_wise":
        return row_wise(compute_kernel="fused")
    if sharding == "table_wise":
        return table_wise(rank=world_size - 1, compute_kernel="fused")
    if sharding == "column_wise":
        return column_wise(ranks=[0, world_size - 1], compute_kernel="fused")
    return data_parallel()


def _train(
    dmp: DistributedModelParallel, optimizer: CombinedOptimizer, case: Case, rank: int
) -> tuple[list[tuple[Tensor, Tensor]], int]:
    device = case.device(rank)
    batches = [model_input(rank, step, case.form) for step in range(NUM_STEPS)]
    if case.pipelined:
        pipeline = TrainPipelineSparseDist(dmp, optimizer, device, execute_all_batches=True)
        iterator: Iterator[ModelInput] = iter(batches)
        outputs = [pipeline.progress(iterator) for _ in batches]
        return outputs, len(pipeline._pipelined_modules)
    outputs = []
    for batch in batches:
        optimizer.zero_grad()
        loss, output = dmp(batch.to(device))
        loss.backward()
        optimizer.step()
        outputs.append(output)
    return outputs, 0


@dataclass(frozen=True)
class Reference:
    """Training without tiers and without sharding.

    Attributes:
        outputs: by step, by rank: loss and output.
        weights: after the last step.
    """

    outputs: list[list[tuple[Tensor, Tensor]]]
    weights: dict[str, Tensor]


@cache
def _reference(optimizer: Optimizer, in_columns: tuple[str, ...], world_size: int) -> Reference:
    """The same for many cases, of which it would take a large share of the time."""
    return from_rank_0(lambda: _train_reference(optimizer, in_columns, world_size))


def _train_reference(
    optimizer_name: Optimizer, in_columns: tuple[str, ...], world_size: int
) -> Reference:
    model = TierModel(None)
    optimizer = ReferenceOptimizer(
        model,
        set(FEATURES),
        optimizer_name,
        LEARNING_RATE[optimizer_name],
        EPS,
        dict.fromkeys(in_columns, 2),
    )
    outputs = []
    for step in range(NUM_STEPS):
        results = [model(model_input(each, step, "kjt")) for each in range(world_size)]
        torch.stack([loss for loss, _ in results]).mean().backward()
        optimizer.step()
        outputs.append([(loss.detach(), output.detach()) for _, (loss, output) in results])
    return Reference(outputs, model.state_dict())


def _sharding(case: Case, table: str) -> str:
    return "row_wise" if table in TIERS[case.tiers] else case.untiered
