"""A trainer with a loader of its own, on ranks: deduplicated batches, and plain ones of stock."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from tests.drop_in.forced_dedup import forced_dedup
from tests.planning.test_planner import prepared, profile, registry
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._pytree import tree_map_only
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

import recd_plugins
from recd_plugins.drop_in.dedup import Dedup
from recd_plugins.planning.planner import build_planner
from recd_plugins.runtime.errors import SetupError
from recd_plugins.sharding.build import build_sharders
from recd_plugins.sharding.sharders import fused_params
from recd_plugins.training.rank_state import copy_weights

CPU = torch.device("cpu")
FEATURES = ["f0", "f1", "f2"]
ROWS, DIM, BATCH, NUM_STEPS = 30, 8, 12, 3


@dataclass
class Sample(Pipelineable):
    """A batch as a trainer may have it."""

    sparse: KeyedJaggedTensor
    more: dict[str, KeyedJaggedTensor]
    labels: Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Sample:
        return self  # it is there

    def record_stream(self, stream: torch.Stream) -> None: ...

    def pin_memory(self) -> Sample:
        return self


class Model(nn.Module):
    """Bags of three features; with ``sequence`` f2 is looked up by an EmbeddingCollection, too."""

    def __init__(self, sequence: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.bags = EmbeddingBagCollection(
            [
                EmbeddingBagConfig(
                    name=f"t_{name}",
                    embedding_dim=DIM,
                    num_embeddings=ROWS,
                    feature_names=[name],
                    pooling=PoolingType.MEAN if name == "f1" else PoolingType.SUM,
                )
                for name in FEATURES
            ]
        )
        self.sequences = None
        if sequence:
            self.sequences = EmbeddingCollection(
                [
                    EmbeddingConfig(
                        name="s_f2", embedding_dim=DIM, num_embeddings=ROWS, feature_names=["f2"]
                    )
                ]
            )

    def forward(self, batch: Sample) -> Tensor:
        bags = self.bags(batch.sparse)
        found = torch.cat([bags[name] for name in FEATURES], dim=1).sum(dim=1)
        if self.sequences is not None:
            rows = self.sequences(batch.sparse)["f2"]
            row_of = torch.arange(len(found)).repeat_interleave(rows.lengths().long())
            found = found.index_add(0, row_of, rows.values().sum(dim=1))
        return (found - batch.labels).square().mean()


def loader(rank: int, sessions: bool, num_batches: int = NUM_STEPS) -> Iterator[Sample]:
    """Batches of rows of which four are equal each, or none; rank 1's last one has no row."""
    generator = torch.Generator().manual_seed(rank)
    for step in range(num_batches):
        rows = 0 if rank and step and step == num_batches - 1 else BATCH
        distinct = rows // 4 if sessions else rows
        lengths = torch.randint(1, 4, (3, distinct), generator=generator)
        ids = [torch.randint(ROWS, (int(n.sum()),), generator=generator) for n in lengths]
        kept = KeyedJaggedTensor(FEATURES, torch.cat(ids), lengths=lengths.flatten())
        take = torch.arange(rows) % max(distinct, 1)
        values, counts = [], []
        for name in FEATURES:
            pieces = kept[name].to_dense()
            values += [pieces[row] for row in take.tolist()]
            counts.append(kept[name].lengths()[take])
        sparse = KeyedJaggedTensor(
            FEATURES,
            torch.cat(values) if values else torch.zeros(0, dtype=torch.long),
            lengths=torch.cat(counts),
            stride=rows,
        )
        alone = KeyedJaggedTensor(["x"], torch.arange(rows), lengths=torch.ones(rows).int())
        yield Sample(sparse, {"x": alone}, torch.rand(rows, generator=generator))


@forced_dedup()
def losses(
    rank: int, world_size: int, sessions: bool, sequence: bool
) -> tuple[list[float], list[float], str]:
    """Those of deduplicated batches, of stock with plain ones, and what was said."""
    reg = registry()
    ready = prepared(reg, Model(sequence))
    ours: Any = build_sharders(ready)
    plan = build_planner(ready, world_size=world_size, profile=profile()).plan(ready.model, ours)
    params = fused_params(reg.training)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("recd_plugins.drop_in").addHandler(handler)
    found = []
    for side in ("ours", "stock"):
        model = Model(sequence)
        dedup = Dedup(model)
        weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        stock = [EmbeddingBagCollectionSharder(dict(params)), ours[1]]
        dmp = DistributedModelParallel(
            model,
            env=ShardingEnv.from_process_group(dist.group.WORLD),
            device=CPU,
            plan=plan,
            sharders=ours if side == "ours" else stock,
        )
        copy_weights(dmp.state_dict(), weights)
        batches = loader(rank, sessions)
        of_side = []
        for batch in dedup(batches) if side == "ours" else batches:
            loss = dmp(batch)
            loss.backward()
            of_side.append(loss.item())
        for batch in loader(rank, sessions, 1):  # an evaluation of plain batches
            with torch.no_grad():
                of_side.append(dmp(batch).item())
        found.append(of_side)
    logging.getLogger("recd_plugins.drop_in").removeHandler(handler)
    return found[0], found[1], "\n".join(said)


@forced_dedup()
def with_unsharded_sequences(rank: int, world_size: int) -> tuple[list[float], list[float], str]:
    """Losses of ours and of stock, which shard bags alone, and what was said."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("recd_plugins.drop_in").addHandler(handler)
    found: list[list[float]] = []
    for side in ("ours", "stock"):
        model = Model(sequence=True)
        weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        batches: Any = list(loader(rank, sessions=True))[:-1]  # the last one has no rows
        sharders: Any = [EmbeddingBagCollectionSharder({"learning_rate": 0.1})]
        if side == "ours":
            ready = recd_plugins.wrap(model)
            sharders, batches = ready.sharders(sharders), ready.dedup(batches)
        dmp = DistributedModelParallel(model, device=CPU, sharders=sharders)
        copy_weights(dmp.state_dict(), weights)
        found.append([])
        for batch in batches:
            loss = dmp(batch)
            loss.backward()
            found[-1].append(loss.item())
    logging.getLogger("recd_plugins.drop_in").removeHandler(handler)
    return found[0], found[1], "\n".join(said)


def different_makes(rank: int, world_size: int) -> str:
    batch = next(loader(rank, sessions=True))
    try:
        Dedup(Model()).batch(batch if rank else {"clicks": batch.sparse})
    except SetupError as error:
        return str(error)
    return ""


@forced_dedup()
def left_alone_once_sharded(rank: int, world_size: int, stock: bool) -> tuple[bool, str]:
    """Whether the batch of a model without our sharders stays plain, and the reason."""
    model = Model()
    dedup = Dedup(model)
    sharders: Any = [EmbeddingBagCollectionSharder() if stock else EmbeddingCollectionSharder()]
    if not stock:
        model.other = EmbeddingCollection(
            [EmbeddingConfig(name="o", embedding_dim=4, num_embeddings=9, feature_names=["o"])]
        )
    DistributedModelParallel(model, device=CPU, sharders=sharders)
    batch = next(loader(rank, sessions=True))
    plain = dedup.batch(batch) is batch
    assert dedup.decision is not None
    return plain, dedup.decision.left["batch.sparse"]


@forced_dedup()
def on_a_part_of_the_ranks(rank: int, world_size: int) -> list[float]:
    """Losses of the first two of three ranks, the last of which trains nothing."""
    group: Any = dist.new_group([0, 1])
    if rank == 2:
        init_device_mesh("cpu", (2,))  # as ShardingEnv has it done by all ranks
        return []
    env = ShardingEnv.from_process_group(group)
    ready = prepared(registry(), Model(False))
    model = Model(False)
    dedup = Dedup(model)
    sharders: Any = build_sharders(ready)
    plan = build_planner(ready, world_size=2, profile=profile()).plan(ready.model, sharders)
    dmp = DistributedModelParallel(model, env=env, device=CPU, plan=plan, sharders=sharders)
    losses = []
    for batch in dedup(loader(rank, sessions=True)):
        loss = dmp(batch)
        loss.backward()
        losses.append(loss.item())
    assert dedup.decision is not None
    assert dedup.decision.features
    return losses


@forced_dedup()
def detached_and_attached(rank: int, world_size: int) -> tuple[list[float], list[float]]:
    """Losses of a train pipeline that goes on, and of one that is taken off its model between."""
    ready = prepared(registry(), Model())
    sharders: Any = build_sharders(ready)
    plan = build_planner(ready, world_size=world_size, profile=profile()).plan(
        ready.model, sharders
    )
    found: list[list[float]] = []
    for detach in (False, True):
        model = Model()
        dedup = Dedup(model)
        weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        env = ShardingEnv.from_process_group(dist.group.WORLD)
        dmp: Any = DistributedModelParallel(
            model, env=env, device=CPU, plan=plan, sharders=sharders
        )
        copy_weights(dmp.state_dict(), weights)
        losses: list[float] = []

        def forward(batch: Any, dmp: Any = dmp, losses: list[float] = losses) -> tuple[Any, None]:
            loss = dmp(batch)
            losses.append(loss.item())
            return loss, None

        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
        pipeline: Any = TrainPipelineSparseDist(dmp, optimizer, CPU, custom_model_fwd=forward)
        batches = iter(dedup(loader(0, sessions=True)))
        with suppress(StopIteration):
            while True:
                pipeline.progress(batches)
                if detach and len(losses) == 2:
                    pipeline.attach(pipeline.detach())
        assert dedup.decision is not None
        assert dedup.decision.features
        found.append(losses)
    return found[0], found[1]


@forced_dedup()
def made_anew(rank: int, world_size: int, deduplicated: bool) -> list[float]:
    """Losses of a model that is fed KeyedJaggedTensors made anew of those of a batch."""
    ready = prepared(registry(), Model())
    model = Model()
    dedup = Dedup(model)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    dmp: Any = DistributedModelParallel(model, device=CPU, sharders=build_sharders(ready))
    copy_weights(dmp.state_dict(), weights)
    losses = []
    batches = loader(rank, True, 1)
    for batch in dedup(batches) if deduplicated else batches:
        for make in MADE_ANEW.values():
            loss = dmp(Sample(make(batch.sparse), batch.more, batch.labels))
            loss.backward()
            losses.append(loss.item())
    assert not deduplicated or dedup.decision.features  # type: ignore[union-attr]
    return losses


def _in_place(kjt: KeyedJaggedTensor) -> KeyedJaggedTensor:
    kjt.values().remainder_(kjt.values().max() or 1)  # another one each time
    return kjt


def _assigned(kjt: KeyedJaggedTensor) -> KeyedJaggedTensor:
    kjt._values = kjt._values % 5
    return kjt


#: What trainers do to a KeyedJaggedTensor between their loader and their tables.
MADE_ANEW: dict[str, Callable[[KeyedJaggedTensor], KeyedJaggedTensor]] = {
    "as it comes": lambda kjt: kjt,
    "to": lambda kjt: kjt.to(CPU),
    "permute": lambda kjt: kjt.permute([2, 0, 1]),
    "split and concat": lambda kjt: KeyedJaggedTensor.concat(kjt.split([1, 2])),
    "hashed": lambda kjt: KeyedJaggedTensor(kjt.keys(), kjt.values() % 9, lengths=kjt.lengths()),
    "from_jt_dict": lambda kjt: KeyedJaggedTensor.from_jt_dict(kjt.to_dict()),
    "by key": lambda kjt: KeyedJaggedTensor.from_jt_dict({n: kjt[n] for n in kjt.keys()}),  # noqa: SIM118
    "of dense lists": lambda kjt: KeyedJaggedTensor.from_lengths_sync(
        kjt.keys(), torch.cat([row for n in FEATURES for row in kjt[n].to_dense()]), kjt.lengths()
    ),
    "copied": lambda kjt: copy.deepcopy(kjt),
    "pickled": lambda kjt: pickle.loads(pickle.dumps(kjt)),
    "pickled and assigned": lambda kjt: _assigned(pickle.loads(pickle.dumps(kjt))),
    "by tree_map": lambda kjt: tree_map_only(Tensor, torch.clone, kjt),
    "hashed by tree_map_only": lambda kjt: tree_map_only(
        Tensor, lambda each: each % 7 if each is kjt.values() else each, kjt
    ),
    "pickled and hashed": lambda kjt: _in_place(pickle.loads(pickle.dumps(kjt))),
    "hashed in place": _in_place,
    "hashed in place and pickled": lambda kjt: pickle.loads(pickle.dumps(_in_place(kjt))),
    "hashed in place by a copy": lambda kjt: _in_place(copy.copy(kjt)) and kjt,
    "hashed in place by key": lambda kjt: kjt["f1"].values().remainder_(5) is None or kjt,
    "assigned": _assigned,
}


@forced_dedup()
def no_batch_on_one_rank(rank: int, world_size: int) -> tuple[int, bool]:
    """Batches of a rank, and whether it decided what the others did."""
    dedup = Dedup(Model())
    batches = list(dedup(loader(rank, True, rank)))
    assert dedup.decision is not None
    return len(batches), "batch.sparse" in dedup.decision.features
