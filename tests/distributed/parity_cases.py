"""One parity case on one rank: train sharded and deduplicated, and plain on the global batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import torch
import torch.distributed as dist
from tests.distributed.parity_model import (
    NUM_STEPS,
    Form,
    ParityModel,
    Parts,
    ReferenceOptimizer,
    make_batch,
)
from tests.sharded import bare_registry, exact_sharders, shard, whole
from torch import Tensor
from torchrec.distributed import comm_ops
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardedModule
from torchrec.optim.keyed import CombinedOptimizer

from recd_plugins import load_registry
from recd_plugins.config.schema import TrainingSpec
from recd_plugins.data.row_pipeline import lower
from recd_plugins.interfaces import Pooling
from recd_plugins.interfaces.batch import ModelInput
from recd_plugins.interfaces.model_tables import embedding_modules, tables_of
from recd_plugins.model.sequence_pooling import PoolRows
from recd_plugins.planning.prepared import apply_optimizers
from recd_plugins.sharding.guards import check_every_parameter_is_trained
from recd_plugins.sharding.pipeline import OverlappedTrainPipeline, SparseDistTrainPipeline
from recd_plugins.testing.device import DEVICE
from recd_plugins.training.optimizer import build_optimizer

T = TypeVar("T")

TOLERANCE = 1e-6
# Adagrad's first steps are as long as the rate whatever the gradient, rounding errors included.
LEARNING_RATE: dict[Optimizer, float] = {"sgd": 0.2, "rowwise_adagrad": 0.02}
EPS = 1e-8
COLUMN_SHARDS = 2

Optimizer = Literal["sgd", "rowwise_adagrad"]


@dataclass(frozen=True)
class Case:
    sharding: str
    modules: str
    optimizer: Optimizer
    pipelined: bool
    # With "partial" some features' rows move on, for the reference too.
    form: Form = "unique"
    fault: Literal["", "gradient", "gather"] = ""
    # A plugin that pools sequences, in place of the model's own; the reference pools all rows.
    pooling: Pooling | None = None
    pool_rows: PoolRows = "unique"
    # Tables whose ids are made unique before they are sent.
    coalesced: tuple[str, ...] = ()
    # By the pipeline that looks rows up ahead.
    overlapped: bool = False
    # By the pipeline that exchanges sizes once, as on a GPU.
    sizes_once: bool = False
    # A registry file with optimizer entries of tables.
    registry: Path | None = None

    @property
    def parts(self) -> Parts:
        bags, sequences = self.modules in ("ebc", "both"), self.modules in ("ec", "both")
        return Parts(
            pooled=bags and self.sharding != "data_parallel",
            replicated=bags and self.sharding in ("data_parallel", "mixed"),
            sequence=sequences,
            pooling=self.pooling,
            pool_rows=self.pool_rows,
        )

    def sharding_of(self, table: str) -> str:
        if self.sharding == "among":  # data-parallel tables share a module with others
            return ["data_parallel", "row_wise", "data_parallel", "table_wise"][int(table[1])]
        if self.sharding != "mixed":
            return self.sharding
        kinds = ["table_wise", "row_wise", "column_wise", "data_parallel"]
        return "data_parallel" if table == "r0" else kinds[int(table[1])]


@dataclass(frozen=True)
class Difference:
    loss: float
    output: float
    weight: float
    moved: dict[str, float]
    num_modules: int
    num_pipelined: int

    def check(self, case: Case) -> None:
        assert max(self.loss, self.output, self.weight) <= TOLERANCE, case
        # Every table and layer learns, or equal weights would say nothing.
        assert min(self.moved.values()) > 20 * TOLERANCE, (case, self.moved)
        assert self.num_modules > 0
        assert self.num_pipelined == (self.num_modules if case.pipelined else 0), case


def run_cases(rank: int, world_size: int, cases: list[Case]) -> list[Difference]:
    return [_run(rank, world_size, case) for case in cases]


def _run(rank: int, world_size: int, case: Case) -> Difference:
    torch.manual_seed(1)  # other than the model's: weights come from the reference
    reference = ParityModel(case.parts)
    initial = {name: tensor.clone() for name, tensor in reference.state_dict().items()}
    dmp, optimizer = sharded_model(case)
    with _fault(case.fault == "gradient"):
        outputs, num_pipelined = train(dmp, optimizer, case, rank)
    of_ranks, trained = from_rank_0(lambda: _train_reference(reference, case, world_size))
    expected = [of_step[rank] for of_step in of_ranks]
    weights = whole(dmp.state_dict())
    assert weights.keys() == initial.keys()
    pairs = list(zip(outputs, expected, strict=True))
    return Difference(
        loss=max(abs(float(got[0].cpu() - want[0])) for got, want in pairs),
        output=max(float((got[1].cpu() - want[1]).abs().max()) for got, want in pairs),
        weight=max(float((weights[name] - trained[name]).abs().max()) for name in weights),
        moved={name: float((trained[name] - initial[name]).abs().max()) for name in weights},
        num_modules=sum(isinstance(module, ShardedModule) for module in dmp.modules()),
        num_pipelined=num_pipelined,
    )


def sharded_model(case: Case) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    training = TrainingSpec(
        optimizer=case.optimizer, learning_rate=LEARNING_RATE[case.optimizer], eps=EPS
    )
    model = ParityModel(case.parts)
    registry = bare_registry(training)
    if case.registry is not None:
        registry = load_registry(case.registry)
        modules = list(embedding_modules(model))
        apply_optimizers(registry, modules, tables_of(model), DEVICE.type, {})
    places = {table.name: case.sharding_of(table.name) for table in tables_of(model)}
    dmp = shard(model, exact_sharders(registry, case.coalesced), places)
    optimizer = build_optimizer(dmp, registry.training)
    check_every_parameter_is_trained(dmp, optimizer)
    return dmp, optimizer


def train(
    dmp: DistributedModelParallel, optimizer: CombinedOptimizer, case: Case, rank: int
) -> tuple[list[tuple[Tensor, Tensor]], int]:
    batches = [input_of(case, rank, step, case.form) for step in range(NUM_STEPS)]
    if case.fault == "gather":
        batches = list(map(_every_row_from_the_first_id, batches))
    if case.pipelined:
        pipeline: TrainPipelineSparseDist[ModelInput, tuple[Tensor, Tensor]]
        if case.overlapped:
            pipeline = OverlappedTrainPipeline(dmp, optimizer, DEVICE)
        elif case.sizes_once:
            pipeline = SparseDistTrainPipeline(dmp, optimizer, DEVICE, execute_all_batches=True)
        else:
            pipeline = TrainPipelineSparseDist(dmp, optimizer, DEVICE, execute_all_batches=True)
        iterator: Iterator[ModelInput] = iter(batches)
        outputs = [pipeline.progress(iterator) for _ in batches]
        return outputs, len(pipeline._pipelined_modules)
    outputs = []
    for batch in batches:
        optimizer.zero_grad()
        loss, output = dmp(batch.to(DEVICE))
        loss.backward()
        optimizer.step()
        outputs.append(output)
    return outputs, 0


def from_rank_0(make: Callable[[], T]) -> T:
    made = [make() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(made)
    return cast(T, made[0])


def _train_reference(
    model: ParityModel, case: Case, world_size: int
) -> tuple[list[list[tuple[Tensor, Tensor]]], dict[str, Tensor]]:
    tables = {table.name for table in tables_of(model)}
    optimizer = ReferenceOptimizer(
        model,
        tables,
        case.optimizer,
        LEARNING_RATE[case.optimizer],
        EPS,
        {t: COLUMN_SHARDS for t in tables if case.sharding_of(t) == "column_wise"},
        {} if case.registry is None else optimizer_entries(case.registry),
    )
    outputs = []
    for step in range(NUM_STEPS):
        results = [model(input_of(case, each, step, "plain")) for each in range(world_size)]
        torch.stack([loss for loss, _ in results]).mean().backward()
        optimizer.step()
        outputs.append([(loss.detach(), output.detach()) for _, (loss, output) in results])
    return outputs, model.state_dict()


def optimizer_entries(path: Path) -> dict[str, tuple[str, float, float]]:
    found = {}
    for entry in load_registry(path).entries("optimizer"):
        options: Any = entry.plugin.options
        rule = entry.plugin.name, options.learning_rate, getattr(options, "eps", 0.0)
        found |= dict.fromkeys(entry.patterns, rule)
    return found


def input_of(case: Case, rank: int, step: int, form: Form) -> ModelInput:
    batch = make_batch(rank, step, form=form, moving=case.form == "partial")
    return lower(batch, case.parts.placement)


def _every_row_from_the_first_id(batch: ModelInput) -> ModelInput:
    segments = {
        name: replace(each, offsets=torch.zeros_like(each.offsets))
        for name, each in batch.segments.items()
    }
    return replace(batch, segments=segments)


@contextmanager
def _fault(wanted: bool) -> Iterator[None]:
    comm_ops.set_gradient_division(not wanted)
    try:
        yield
    finally:
        comm_ops.set_gradient_division(True)
