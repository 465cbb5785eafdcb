"""A trainer of a sequence model: histories in an EmbeddingCollection, attention, its own batches.

In the shape of HSTU and of TorchEasyRec's models: what a user did goes through attention without
softmax, the profile of the user and the candidate are pooled features.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Adam
from torch.utils.data import IterableDataset
from torchrec.distributed import DistributedModelParallel, TrainPipelineSparseDist
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from torchrec.streamable import Pipelineable

from recd_plugin_recd.benchmarks.drop_in_parts.trainers.session_data import (
    Feature,
    Size,
    Trainer,
    draw,
)

HISTORIES = ["items", "actions"]
PROFILE = [f"profile_{index}" for index in range(20)]
CANDIDATE = [f"candidate_{index}" for index in range(4)]
#: Share of the rows of a session in which a history or a profile changes.
CHANGES = 0.05


@dataclass
class SequenceBatch(Pipelineable):
    """A batch of B rows.

    Attributes:
        histories: of users, for the EmbeddingCollection.
        profile: of users, lists of ids.
        candidate: of what is shown, one id each.
        labels: ``[B]``.
    """

    histories: KeyedJaggedTensor
    profile: KeyedJaggedTensor
    candidate: KeyedJaggedTensor
    labels: Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> SequenceBatch:
        """A copy there."""
        return SequenceBatch(
            self.histories.to(device, non_blocking),
            self.profile.to(device, non_blocking),
            self.candidate.to(device, non_blocking),
            self.labels.to(device, non_blocking=non_blocking),
        )

    def record_stream(self, stream: torch.Stream) -> None:
        """Its memory is in use on this stream."""
        for part in (self.histories, self.profile, self.candidate, self.labels):
            part.record_stream(stream)


class RandomHistories(IterableDataset[SequenceBatch]):
    """Batches that are made once and go round."""

    def __init__(self, size: Size, rows_per_session: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        # Both histories have the same lengths: an item and what was done with it.
        history = [Feature("items", (1, size.max_length), CHANGES)]
        profile = [Feature(name, (1, 8), CHANGES) for name in PROFILE]
        candidate = [Feature(name) for name in CANDIDATE]
        self.batches = []
        for _ in range(size.num_batches):
            items, user, shown = (
                draw(features, size.batch_size, rows_per_session, size.num_embeddings, generator)
                for features in (history, profile, candidate)
            )
            labels = torch.randint(2, (size.batch_size,), generator=generator).float()
            both = KeyedJaggedTensor(
                HISTORIES,
                torch.cat([items.values(), items.values() % 10]),
                lengths=items.lengths().repeat(2),
            )
            self.batches.append(SequenceBatch(both, user, shown, labels))

    def __iter__(self) -> Iterator[SequenceBatch]:
        return cycle(self.batches)


class Encoder(nn.Module):
    """Two layers of attention over a history, whose weights are SiLU of products, and its mean."""

    def __init__(self, dim: int, max_length: int) -> None:
        super().__init__()
        self.max_length = max_length
        self.position = nn.Parameter(torch.randn(max_length, dim) / 10)
        self.project = nn.ModuleList([nn.Linear(dim, 4 * dim) for _ in range(2)])
        self.back = nn.ModuleList([nn.Linear(dim, dim) for _ in range(2)])
        self.norm = nn.ModuleList([nn.LayerNorm(dim) for _ in range(2)])

    def forward(self, items: JaggedTensor, actions: JaggedTensor) -> Tensor:
        """Of histories of R rows, ``[R, dim]``."""
        lengths = items.lengths().long()
        rows = [
            torch.ops.fbgemm.jagged_to_padded_dense(
                each.values(), [each.offsets()], [self.max_length], 0.0
            )
            for each in (items, actions)
        ]
        there = (torch.arange(self.max_length)[None, :] < lengths[:, None]).float()
        hidden = (rows[0] + rows[1] + self.position) * there[:, :, None]
        for project, back, norm in zip(self.project, self.back, self.norm, strict=True):
            gate, query, key, value = functional.silu(project(norm(hidden))).chunk(4, dim=-1)
            weights = functional.silu(query @ key.transpose(1, 2)) * there[:, None, :]
            found = weights @ value / self.max_length
            hidden = (hidden + back(found * gate)) * there[:, :, None]
        return hidden.sum(dim=1) / lengths.clamp(min=1)[:, None]


class SequenceModel(nn.Module):
    """Logits of a candidate for a user, and the loss."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        meta, dim = torch.device("meta"), size.embedding_dim
        self.histories = EmbeddingCollection(
            [
                EmbeddingConfig(
                    name=f"t_{name}",
                    embedding_dim=dim,
                    num_embeddings=size.num_embeddings,
                    feature_names=[name],
                )
                for name in HISTORIES
            ],
            device=meta,
        )
        self.profile, self.candidate = (
            EmbeddingBagCollection(
                [
                    EmbeddingBagConfig(
                        name=f"t_{name}",
                        embedding_dim=dim,
                        num_embeddings=size.num_embeddings,
                        feature_names=[name],
                    )
                    for name in names
                ],
                device=meta,
            )
            for names in (PROFILE, CANDIDATE)
        )
        self.encoder = Encoder(dim, size.max_length)
        inputs = dim * (1 + len(PROFILE) + len(CANDIDATE))
        self.top = nn.Sequential(nn.Linear(inputs, 128), nn.ReLU(), nn.Linear(128, 1))

    def forward(self, batch: SequenceBatch) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The loss and the logits."""
        histories = self.histories(batch.histories)
        profile, candidate = self.profile(batch.profile), self.candidate(batch.candidate)
        user = self.encoder(histories["items"], histories["actions"])
        # By name: in which order a KeyedTensor has its features is for the plan to say.
        (pooled,) = KeyedTensor.regroup([profile, candidate], [[*PROFILE, *CANDIDATE]])
        logits = self.top(torch.cat([user, pooled], dim=1)).squeeze(1)
        loss = functional.binary_cross_entropy_with_logits(logits, batch.labels)
        return loss, (loss.detach(), logits.detach())


def build(size: Size, rows_per_session: int) -> Trainer:
    """Of this rank."""
    device = torch.device("cpu")
    model = SequenceModel(size)
    for module in (model.histories, model.profile, model.candidate):
        apply_optimizer_in_backward(RowWiseAdagrad, module.parameters(), {"lr": 0.05, "eps": 1e-3})
    sharders = get_default_sharders()
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=dist.get_world_size(), compute_device=device.type),
        batch_size=size.batch_size,
    )
    plan = planner.collective_plan(model, sharders, dist.GroupMember.WORLD)
    dmp = DistributedModelParallel(model, device=device, plan=plan, sharders=sharders)
    optimizer = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(dmp.named_parameters())),
        lambda parameters: Adam(parameters, lr=1e-3),
    )
    pipeline = TrainPipelineSparseDist(dmp, optimizer, device)
    dataset = RandomHistories(size, rows_per_session, dist.get_rank())
    return Trainer(dmp, pipeline, iter(dataset))
