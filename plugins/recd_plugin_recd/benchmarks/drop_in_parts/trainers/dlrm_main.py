"""A trainer in the shape of the DLRM repository's dlrm_main: multi-hot rows, a schedule.

Adagrad in the backward pass and for the MLPs, warm-up and decay of both learning rates, a
DataLoader of whole batches, and communication in 16 bits where ``qcomms`` asks for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import torch
import torch.distributed as dist
from torch.optim import Adagrad
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, IterableDataset
from torchrec.datasets.criteo import DEFAULT_CAT_NAMES, DEFAULT_INT_NAMES
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel, TrainPipelineSparseDist
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fbgemm_qcomm_codec import (
    CommType,
    QCommsConfig,
    get_qcomm_codecs_registry,
)
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugin_recd.benchmarks.drop_in_parts.trainers.session_data import (
    Feature,
    Size,
    Trainer,
    draw,
)

#: Ids of a row by feature, those of MLPerf's multi-hot Criteo.
MULTI_HOT = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
#: Every sixth is of what is shown, the others of the user.
FEATURES = [
    Feature(name, (hot, hot), changes=0.05 if index % 6 else 1.0)
    for index, (name, hot) in enumerate(zip(DEFAULT_CAT_NAMES, MULTI_HOT, strict=True))
]
LEARNING_RATE = 0.01
EPS = 1e-3
WARMUP, DECAY_START, DECAY_STEPS = 10, 20, 100


class InMemoryRows(IterableDataset[Batch]):
    """Batches of rows that are in memory column by column, again and again."""

    def __init__(self, size: Size, rows_per_session: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.batch_size, self.num_batches = size.batch_size, size.num_batches
        rows = size.batch_size * size.num_batches
        drawn = draw(FEATURES, rows, rows_per_session, size.num_embeddings, generator)
        self.columns = [
            drawn[feature.name].values().view(rows, hot)
            for feature, hot in zip(FEATURES, MULTI_HOT, strict=True)
        ]
        self.dense = torch.rand(rows, len(DEFAULT_INT_NAMES), generator=generator)
        self.labels = torch.randint(2, (rows,), generator=generator)
        self.lengths = torch.tensor(MULTI_HOT, dtype=torch.int32).repeat_interleave(self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        for index in count():
            start = index % self.num_batches * self.batch_size
            rows = slice(start, start + self.batch_size)
            yield Batch(
                dense_features=self.dense[rows],
                sparse_features=KeyedJaggedTensor(
                    keys=DEFAULT_CAT_NAMES,
                    values=torch.cat([column[rows].flatten() for column in self.columns]),
                    lengths=self.lengths,
                    stride=self.batch_size,
                ),
                labels=self.labels[rows],
            )


def rate(step: int) -> float:
    """What the learning rate is multiplied by: it rises, stays, and falls."""
    if step < WARMUP:
        return (step + 1) / WARMUP
    left = 1 - max(0, step - DECAY_START) / DECAY_STEPS
    return max(left, 0.0) ** 2


def build(size: Size, rows_per_session: int, qcomms: bool = False) -> Trainer:
    """Of this rank."""
    device = torch.device("cpu")
    tables = [
        EmbeddingBagConfig(
            name=f"t_{feature}",
            embedding_dim=size.embedding_dim,
            num_embeddings=size.num_embeddings,
            feature_names=[feature],
        )
        for feature in DEFAULT_CAT_NAMES
    ]
    dlrm = DLRM(
        embedding_bag_collection=EmbeddingBagCollection(tables=tables, device=torch.device("meta")),
        dense_in_features=len(DEFAULT_INT_NAMES),
        dense_arch_layer_sizes=[512, 256, size.embedding_dim],
        over_arch_layer_sizes=[512, 512, 256, 1],
        dense_device=device,
    )
    train_model = DLRMTrain(dlrm)
    apply_optimizer_in_backward(
        Adagrad,
        train_model.model.sparse_arch.parameters(),
        {"lr": LEARNING_RATE, "eps": EPS},
    )
    config = QCommsConfig(forward_precision=CommType.FP16, backward_precision=CommType.BF16)
    codecs = get_qcomm_codecs_registry(config) if qcomms else None
    sharders = [EmbeddingBagCollectionSharder(qcomm_codecs_registry=codecs)]
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=dist.get_world_size(), compute_device=device.type),
        batch_size=size.batch_size,
    )
    plan = planner.collective_plan(train_model, sharders, dist.GroupMember.WORLD)
    dmp = DistributedModelParallel(train_model, device=device, plan=plan, sharders=sharders)
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(dmp.named_parameters())),
        lambda parameters: Adagrad(parameters, lr=LEARNING_RATE, eps=EPS),
    )
    optimizer = CombinedOptimizer([dmp.fused_optimizer, dense])
    pipeline = TrainPipelineSparseDist(dmp, optimizer, device)
    rows = InMemoryRows(size, rows_per_session, seed=dist.get_rank())
    loader = DataLoader(rows, batch_size=None)
    return Trainer(dmp, pipeline, iter(loader), LambdaLR(optimizer, rate))
