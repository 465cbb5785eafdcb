"""The two programs: the demo model in the train pipeline, and the same model in a plain loop."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugin_dlrm.benchmarks.dlrm_operators.configuration import (
    FEATURES,
    NUM_DENSE,
    TRAINING,
    Architecture,
    Configuration,
    RandomBatch,
)
from recd_plugin_dlrm.benchmarks.dlrm_operators.parts import mark
from recd_plugin_dlrm.benchmarks.dlrm_operators.plain import PlainModel
from recd_plugins.api import ExactEmbeddingBagCollectionSharder
from recd_plugins.api.batches import ModelInput, Placement
from recd_plugins.api.distributed import fused_params
from recd_plugins.api.model import DLRM, build_optimizer, copy_weights, table_name
from recd_plugins.api.training import build_train_pipeline


class Side(Protocol):
    """One program."""

    def step(self) -> Tensor:
        """Train on the next batch; the loss, which may still be computed."""


class Ours:
    """DistributedModelParallel over the demo model, its tables on this rank, train pipeline.

    Args:
        model: drawn; this changes all of it but its tables.
        batches: that go round.
        device: of this rank, the only one.
    """

    def __init__(self, model: DLRM, batches: Sequence[RandomBatch], device: torch.device) -> None:
        weights = {name: weight.detach().clone() for name, weight in model.top.state_dict().items()}
        tables = {
            name: weight.detach() for name, weight in model.state_dict().items() if "t_" in name
        }
        for module in (model.top.dense_arch, model.top.over_arch):
            assert module is not None, "the configuration has dense features"
            mark(module, "MLPs")
        mark(model.top.interaction, "interaction")
        sharder = ExactEmbeddingBagCollectionSharder(fused_params(TRAINING))
        assert model.bags is not None, "the configuration has pooled features"
        kernel = "fused"
        plan = construct_module_sharding_plan(
            model.bags,
            {table_name(f): table_wise(rank=0, compute_kernel=kernel) for f in FEATURES},
            sharder,
            local_size=1,
            world_size=1,
            device_type=device.type,
        )
        dmp = DistributedModelParallel(
            model,
            env=ShardingEnv.from_process_group(dist.group.WORLD),
            device=device,
            plan=ShardingPlan({"bags": plan}),
            sharders=[sharder],
        )
        state = dmp.state_dict()
        copy_weights(state, tables | {f"top.{name}": weight for name, weight in weights.items()})
        dmp.load_state_dict(state)
        dmp.train()
        self._pipeline = build_train_pipeline(dmp, build_optimizer(dmp, TRAINING), device)
        self._around = cycle(
            [
                ModelInput(
                    dense_features=batch.dense.to(device),
                    labels=batch.labels.to(device),
                    sparse_features=KeyedJaggedTensor(
                        list(FEATURES), batch.ids, lengths=batch.lengths
                    ).to(device),
                )
                for batch in batches
            ]
        )

    def step(self) -> Tensor:
        """Train on the next batch."""
        loss: Tensor = self._pipeline.progress(self._around)[0]
        return loss


class Plain:
    """torch.nn.EmbeddingBag with sparse gradients, SGD.

    Args:
        model: with the initial weights.
        batches: that go round.
        device: where it trains.
    """

    def __init__(self, model: PlainModel, batches: Sequence[RandomBatch], device: torch.device):
        self._model = model.to(device)
        for module in (model.bottom, model.top, model.last):
            mark(module, "MLPs")
        mark(model.interaction, "interaction")
        self._optimizer = torch.optim.SGD(model.parameters(), lr=TRAINING.learning_rate)
        self._around = cycle([_by_table(batch, device) for batch in batches])

    def step(self) -> Tensor:
        """Train on the next batch."""
        dense, labels, ids, offsets = next(self._around)
        self._optimizer.zero_grad(set_to_none=True)
        loss = F.binary_cross_entropy_with_logits(self._model(dense, ids, offsets), labels)
        torch.autograd.backward(loss)
        self._optimizer.step()
        return loss.detach()


def both(
    configuration: Configuration,
    architecture: Architecture,
    batches: Sequence[RandomBatch],
    device: torch.device,
) -> dict[str, Side]:
    """The two programs with the same weights. A collective call of one rank."""
    torch.manual_seed(TRAINING.seed)
    spec = configuration.spec(architecture)
    model = DLRM(spec, NUM_DENSE, Placement(FEATURES))
    plain = PlainModel(spec, model)
    # The sharded model takes a copy of the tables; the plain one trains the drawn ones.
    ours = Ours(model, batches, device)
    return {"ours": ours, "plain": Plain(plain, batches, device)}


def _by_table(
    batch: RandomBatch, device: torch.device
) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
    """Dense features, labels, and ids and offsets of each table."""
    lengths = batch.lengths.view(len(FEATURES), -1)
    ids = torch.split(batch.ids, lengths.sum(1).tolist())
    offsets = F.pad(lengths.cumsum(1), (1, 0))
    return (
        batch.dense.to(device),
        batch.labels.to(device),
        [each.contiguous().to(device) for each in ids],
        list(offsets.to(device)),
    )
