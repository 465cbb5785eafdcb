"""A trainer on one rank: with recd_plugins, with TorchRec alone, or unsharded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
import torch.distributed as dist
from tests.drop_in.matrix.axes import LR, OPTIMIZERS, PIPELINES, REST, TableOptimizer, table_of
from tests.drop_in.matrix.batches import (
    BATCHES,
    NUM_STEPS,
    Batch,
    batch_of,
    loader,
    plain,
    plain_loader,
    rows,
)
from tests.drop_in.matrix.modules import DIM, MODULES, vectors
from tests.sharded import local_ranks, plan_of
from torch import Tensor, nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fbgemm_qcomm_codec import (
    CommType,
    QCommsConfig,
    get_qcomm_codecs_registry,
)
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.distributed.mc_embedding import ManagedCollisionEmbeddingCollectionSharder
from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import (
    DefaultDataParallelWrapper,
    DistributedModelParallel,
    DMPCollection,
)
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.sharding_plan import (
    get_default_sharders,
    row_wise,
    table_wise,
)
from torchrec.distributed.train_pipeline import (
    GradientAccumulationConfig,
    GradientAccumulationWrapper,
)
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

import recd_plugins
from recd_plugins.drop_in.dedup import Dedup
from recd_plugins.testing.device import DEVICE
from recd_plugins.training.rank_state import copy_weights


@dataclass(frozen=True, order=True)
class Cell:
    module: str
    batch: str = "plain"
    optimizer: str = "RowWiseAdagrad in backward"
    pipeline: str = "a plain loop"
    rest: str = "nothing"

    def __str__(self) -> str:
        return " / ".join((self.module, self.batch, self.optimizer, self.pipeline, self.rest))


class Model(nn.Module):
    def __init__(self, module: str, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.sparse = MODULES[module].build()
        self.top = nn.Linear(MODULES[module].width, 1)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return loss_of(self.top, self.sparse(batch.sparse), batch)


@torch.fx.wrap
def loss_of(top: nn.Module, found: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    predictions = top(vectors(found, batch.lengths, batch.stored)).squeeze(1)
    return (predictions - batch.labels).square().sum(), predictions.detach()


class Variant:
    """The model, optimizer and batches of one side: ``ours``, ``stock`` or ``whole``.

    The first side puts the plan of all sides into ``made``.
    """

    def __init__(
        self,
        cell: Cell,
        side: str,
        rank: int,
        group: dist.ProcessGroup,
        made: list[ShardingPlan | None],
        seed: int = 0,
    ) -> None:
        self.cell, self.side, self.rank, self.made = cell, side, rank, made
        self.rest, self.loop = REST[cell.rest], PIPELINES[cell.pipeline]
        self.optimizer_of_tables = OPTIMIZERS[cell.optimizer]
        self.device = torch.device("cpu") if side == "whole" else DEVICE
        self.module = MODULES[cell.module]
        self.model = Model(cell.module, seed)
        if side != "whole":
            self.optimizer_of_tables.bring(self.model)
        self.before = {name: t.clone() for name, t in self.model.state_dict().items()}
        self.dedup: Dedup | None = None
        self.dmp: nn.Module = self.model
        if side != "whole":
            self.dmp = self._sharded(group)
        self.optimizer = self._optimizer()
        self.schedule: Any = None
        if self.optimizer_of_tables.around == "a torch lr_scheduler" and side != "whole":
            self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)
        if self.rest.compiled == "dense":
            self.model.top.compile(backend="eager")

    def _sharded(self, group: dist.ProcessGroup) -> nn.Module:
        base = self._base()
        world_size = 1 if self.rest.two_d else dist.get_world_size()
        constraints = self._constraints()
        sharders = base
        topology = Topology(world_size=world_size, compute_device=DEVICE.type)
        planner: Any = EmbeddingShardingPlanner(topology=topology, constraints=constraints or None)
        if self.side == "ours":
            ready = recd_plugins.wrap(self.model, batch_size=8)
            self.dedup, sharders = ready.dedup, ready.sharders(base)
            if not self.rest.planner:
                planner = ready.planner(
                    world_size=world_size, device=DEVICE, constraints=constraints or None
                )
        if self.rest.own_plan:
            self.made[0] = _own_plan(self.model, sharders)
        plan = self.made[0] = self.made[0] or planner.plan(self.model, sharders)
        if self.rest.two_d:
            return DMPCollection(
                module=self.model,
                device=DEVICE,
                plan=plan,
                world_size=dist.get_world_size(),
                sharding_group_size=1,
                global_pg=group,
                sharders=sharders,
            )
        dmp = DistributedModelParallel(
            self.model,
            env=ShardingEnv.from_process_group(group),
            device=DEVICE,
            plan=plan,
            sharders=sharders,
            data_parallel_wrapper=DefaultDataParallelWrapper(
                find_unused_parameters=self.rest.find_unused
            ),
        )
        tables = {name: value for name, value in dmp.state_dict().items() if table_of(name)}
        copy_weights(tables, self.before)
        return dmp

    def _constraints(self) -> dict[str, ParameterConstraints]:
        tables = sorted({table_of(name) for name in self.before} - {""})
        constraints = {}
        for table, kind in zip(tables, cycle(self.rest.constrained or [""]), strict=False):
            if self.optimizer_of_tables.is_dense(table):
                kind = kind or "data_parallel"
            if kind or self.rest.kernel:
                constraints[table] = ParameterConstraints(
                    sharding_types=[kind] if kind else None,
                    compute_kernels=[self.rest.kernel] if self.rest.kernel else None,
                    min_partition=DIM // 2,
                )
        return constraints

    def _base(self) -> list[Any]:
        params = dict(self.optimizer_of_tables.fused_params) or None
        codecs: Any = None
        if self.rest.codecs:
            precision = CommType[self.rest.codecs]
            config = QCommsConfig(
                forward_precision=precision,
                backward_precision=precision,
                backward_loss_scale=self.rest.loss_scale,
            )
            codecs = get_qcomm_codecs_registry(config, device=DEVICE)
        bags = EmbeddingBagCollectionSharder(params, codecs)
        chosen: list[Any] = [
            bags,
            EmbeddingCollectionSharder(params, codecs),
            FeatureProcessedEmbeddingBagCollectionSharder(bags, codecs),
            ManagedCollisionEmbeddingBagCollectionSharder(bags, qcomm_codecs_registry=codecs),
            ManagedCollisionEmbeddingCollectionSharder(
                EmbeddingCollectionSharder(params, codecs), qcomm_codecs_registry=codecs
            ),
            *(sharder() for sharder in self.module.sharders),
        ]
        types = {sharder.module_type for sharder in chosen}
        return [*chosen, *(s for s in get_default_sharders() if s.module_type not in types)]

    def _optimizer(self) -> Any:
        dense_class: Any = self.optimizer_of_tables.dense
        if self.side == "whole":
            tables = [(n, p) for n, p in self.model.named_parameters() if table_of(n)]
            dense = [p for n, p in self.model.named_parameters() if not table_of(n)]
            of_tables = self.optimizer_of_tables.of_whole(tables)
            return [each for each in (of_tables, torch.optim.SGD(dense, lr=LR)) if each]
        left = dict(in_backward_optimizer_filter(self.dmp.named_parameters()))
        tables_left = {name: p for name, p in left.items() if table_of(name)}
        others = {name: p for name, p in left.items() if name not in tables_left}
        parts: list[Any] = [getattr(self.dmp, "fused_optimizer", None)]
        if dense_class is not None:
            parts.append(
                KeyedOptimizerWrapper(
                    tables_left, lambda p: dense_class(p, **self.optimizer_of_tables.arguments)
                )
            )
        elif tables_left:
            others |= tables_left  # as a trainer does that follows TorchRec's examples
        parts.append(KeyedOptimizerWrapper(others, lambda p: torch.optim.SGD(p, lr=LR)))
        optimizer: Any = CombinedOptimizer([part for part in parts if part is not None])
        return _wrapped(optimizer, self.optimizer_of_tables)

    def batches(self, rank: int | None = None) -> Iterator[Batch]:
        form, rank = BATCHES[self.cell.batch], self.rank if rank is None else rank
        if self.side == "whole" or (self.side == "stock" and form.plain_for_stock):
            return plain_loader(form, rank, self.module)
        return loader(form, rank, self.module, self.dedup if self.side == "ours" else None)

    def train(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the loss of each step, if the loop tells it, and the predictions."""
        if self.side == "whole":
            yield from self._train_whole()
        elif self.loop.build is None and self.rest.accumulate == 1:
            yield from self._train_plainly()
        else:
            yield from self._train_by_pipeline()

    def _train_plainly(self) -> Iterator[tuple[Tensor, Tensor]]:
        model = self._compiled()
        for batch in self.batches():
            self.optimizer.zero_grad()
            with self._casts():
                loss, predictions = model(batch.to(self.device))
            loss.backward()
            self.optimizer.step()
            if self.schedule is not None:
                self.schedule.step()
            yield loss.detach(), predictions

    def _train_by_pipeline(self) -> Iterator[tuple[Tensor, Tensor]]:
        name = "TrainPipelineBase" if self.loop.build is None else self.cell.pipeline
        build: Any = PIPELINES[name].build
        model = self._compiled()
        model.train(self.loop.trains)
        pipeline = build(model, self.optimizer)
        if self.rest.accumulate > 1:
            config = GradientAccumulationConfig(num_steps=self.rest.accumulate)
            pipeline = GradientAccumulationWrapper(pipeline, self.optimizer, model, config)
        steps = iter(self.batches())
        for _ in range(NUM_STEPS):
            try:
                with self._casts():
                    output = pipeline.progress(steps)
            except StopIteration:  # it leaves out the last batches
                break
            if self.schedule is not None:
                self.schedule.step()
            output = output[0] if isinstance(output, tuple) else output
            yield torch.zeros(()), output
        if hasattr(pipeline, "detach"):
            pipeline.detach()
        model.train()

    def _compiled(self) -> Any:
        compiled = self.rest.compiled == "all"
        return torch.compile(self.dmp, backend="eager") if compiled else self.dmp

    def _train_whole(self) -> Iterator[tuple[Tensor, Tensor]]:
        loaders = [self.batches(rank) for rank in range(dist.get_world_size())]
        for batches in zip(*loaders, strict=True):
            for optimizer in self.optimizer:
                optimizer.zero_grad()
            # Not every module takes a batch without rows, which changes nothing.
            outputs = [
                self.model(batch) if len(batch.labels) else (torch.zeros(()), torch.zeros(0))
                for batch in batches
            ]
            if self.loop.trains:
                losses = torch.stack([loss for loss, _ in outputs])
                losses.mean().backward()
                for optimizer in self.optimizer:
                    optimizer.step()
            told = self.loop.build is None
            loss, predictions = outputs[self.rank]
            yield loss.detach() if told else torch.zeros(()), predictions

    def _casts(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.rest.autocast)

    def evaluate(self) -> Tensor:
        found = rows(self.rank, 99)
        form = BATCHES[self.cell.batch]
        batch = batch_of(found, plain(found, weighted=self.module.weighted))
        if self.side == "ours" or (self.side == "stock" and not form.plain_for_stock):
            batch = form.batch(found, self.rank, 0, self.module)
        self.dmp.eval()
        with getattr(torch, self.rest.mode)():
            predictions: Tensor = self.dmp(batch.to(self.device))[1]
        self.dmp.train()
        return predictions


def _own_plan(model: Model, sharders: Sequence[Any]) -> ShardingPlan:
    names = sorted({table_of(name) for name in model.state_dict()} - {""})
    how = {name: row_wise() if place else table_wise(rank=1) for place, name in enumerate(names)}
    (sharder,) = (each for each in sharders if each.module_type is type(model.sparse))
    plan = plan_of(model.sparse, how, sharder, dist.get_world_size(), local_ranks())
    return ShardingPlan({"sparse": plan})


def _wrapped(optimizer: Any, of_tables: TableOptimizer) -> Any:
    if of_tables.around == "warm-up":
        stages = [WarmupStage(WarmupPolicy.LINEAR, max_iters=4, value=0.1)]
        return WarmupOptimizer(optimizer, stages, lr=LR)
    if of_tables.around.startswith("clipping"):
        how = GradientClipping.NORM if "norm" in of_tables.around else GradientClipping.VALUE
        return GradientClippingOptimizer(optimizer, how, max_gradient=0.01)
    return optimizer
