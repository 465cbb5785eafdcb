"""A trainer in the shape of TorchRec's golden_training: random batches of 26 features of one id."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle

import torch
import torch.distributed as dist
from torch.optim import Adagrad
from torch.utils.data import IterableDataset
from torchrec.datasets.criteo import DEFAULT_CAT_NAMES, DEFAULT_INT_NAMES
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel, TrainPipelineSparseDist
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from recd_plugin_recd.benchmarks.drop_in_parts.trainers.session_data import (
    Feature,
    Size,
    Trainer,
    draw,
)

#: Of the user, and of what is shown.
FEATURES = [Feature(name, changes=0.05) for name in DEFAULT_CAT_NAMES[:22]] + [
    Feature(name) for name in DEFAULT_CAT_NAMES[22:]
]
LEARNING_RATE = 0.1
#: With the optimizers' own 1e-8 any change of rounding grows to 1e-4 within 50 steps.
EPS = 1e-3


class RandomBatches(IterableDataset[Batch]):
    """Batches that are made once and go round."""

    def __init__(self, size: Size, rows_per_session: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        rows = size.batch_size
        self.batches = [
            Batch(
                dense_features=torch.rand(rows, len(DEFAULT_INT_NAMES), generator=generator),
                sparse_features=draw(
                    FEATURES, rows, rows_per_session, size.num_embeddings, generator
                ),
                labels=torch.randint(2, (rows,), generator=generator),
            )
            for _ in range(size.num_batches)
        ]

    def __iter__(self) -> Iterator[Batch]:
        return cycle(self.batches)


def build(size: Size, rows_per_session: int) -> Trainer:
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
        dense_arch_layer_sizes=[64, size.embedding_dim],
        over_arch_layer_sizes=[64, 1],
        dense_device=device,
    )
    train_model = DLRMTrain(dlrm)
    apply_optimizer_in_backward(
        RowWiseAdagrad,
        train_model.model.sparse_arch.parameters(),
        {"lr": LEARNING_RATE, "eps": EPS},
    )
    sharders = [EmbeddingBagCollectionSharder()]
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=dist.get_world_size(), compute_device=device.type),
        batch_size=size.batch_size,
    )
    plan = planner.collective_plan(train_model, sharders, dist.GroupMember.WORLD)
    dmp = DistributedModelParallel(train_model, device=device, plan=plan, sharders=sharders)
    optimizer = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(dmp.named_parameters())),
        lambda parameters: Adagrad(parameters, lr=LEARNING_RATE, eps=EPS),
    )
    pipeline = TrainPipelineSparseDist(dmp, optimizer, device)
    dataset = RandomBatches(size, rows_per_session, seed=dist.get_rank())
    return Trainer(dmp, pipeline, iter(dataset))
