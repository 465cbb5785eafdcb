"""The contract of train pipelines."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins.interfaces import Pipeline, TrainPipeline
from recd_plugins.planning.topologies import default_topology
from recd_plugins.plugin_modules import load_file, modules_of_files
from recd_plugins.registry import TrainingSpec
from recd_plugins.registry.training_spec import ScheduleSpec
from recd_plugins.sharding.sharders import stock_sharders
from recd_plugins.testing.contracts.plugin import PluginContract
from recd_plugins.testing.gloo import run_on_ranks
from recd_plugins.training.optimizer import LearningRates, build_optimizer
from recd_plugins.values.batch import ModelInput

#: Of iterators that follow one another: batches, and whether they are trained.
_Splits = Sequence[tuple[int, bool]]


class PipelineContract(PluginContract):
    """Tests of a train pipeline: override the fixture ``plugin``.

    A model is trained by it on two ranks, on CPU, and by a plain loop; learning rates fall step by
    step.
    """

    def test_trains_as_a_plain_loop(self, plugin: Pipeline) -> None:
        _assert_as_plain(plugin, [(6, True)])

    @pytest.mark.parametrize("batches", [0, 1, 2])
    def test_trains_every_batch_of_a_short_iterator(self, plugin: Pipeline, batches: int) -> None:
        _assert_as_plain(plugin, [(batches, True)])

    def test_takes_one_iterator_after_the_other(self, plugin: Pipeline) -> None:
        _assert_as_plain(plugin, [(3, True), (4, True)])

    def test_evaluates_without_training(self, plugin: Pipeline) -> None:
        _assert_as_plain(plugin, [(3, True), (3, False), (2, True)])


def _assert_as_plain(plugin: Pipeline, splits: _Splits) -> None:
    # Ranks import the plugin as this process did, where it is of a file of a folder of plugins too.
    files = modules_of_files([type(plugin)])
    found, expected = (
        run_on_ranks(_train, 2, files, pickle.dumps(by), splits) for by in (plugin, None)
    )
    for (outputs, weights), (plain, plain_weights) in zip(found, expected, strict=True):
        for number, (of_split, of_plain) in enumerate(zip(outputs, plain, strict=True)):
            where = f"iterator {number} of {[batches for batches, _ in splits]} batches"
            assert len(of_split) == len(of_plain), f"{where}: a step for each batch"
            for step, (output, other) in enumerate(zip(of_split, of_plain, strict=True)):
                same = all(torch.equal(a, b) for a, b in zip(output, other, strict=True))
                assert same, f"{where}, step {step}: the output is of another batch, or weights"
        for name, value in weights.items():
            assert torch.equal(value, plain_weights[name]), f"{name} is another than in a loop"


def _train(
    rank: int, _world_size: int, files: Mapping[str, Path], pickled: bytes, splits: _Splits
) -> tuple[list[list[tuple[Tensor, ...]]], dict[str, Tensor]]:
    """Outputs by iterator and batch, and this rank's weights."""
    for name, file in files.items():
        load_file(name, file)
    plugin: Pipeline | None = pickle.loads(pickled)
    device, training = torch.device("cpu"), TrainingSpec(learning_rate=0.5)
    torch.manual_seed(0)
    model, sharders = _Model(), stock_sharders(training)
    # Ids of one travel, and it learns in the backward pass; the other may be on every rank.
    travels = {"t_user": ParameterConstraints(sharding_types=["table_wise"])}
    planner = EmbeddingShardingPlanner(topology=default_topology(2), constraints=travels)
    dmp = DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=device,
        plan=planner.collective_plan(model, sharders, dist.group.WORLD),
        sharders=sharders,
    )
    optimizer = build_optimizer(dmp, training)
    pipeline: TrainPipeline = _Loop(dmp, optimizer)
    if plugin is not None:
        pipeline = plugin.build(dmp, optimizer, device)
    rates = LearningRates(optimizer, ScheduleSpec(decay="linear", steps=20))
    outputs: list[list[tuple[Tensor, ...]]] = []
    for number, (batches, trained) in enumerate(splits):
        dmp.train(trained)
        with torch.set_grad_enabled(trained):
            done = sum(map(len, outputs))
            of_split = _outputs(pipeline, _batches(rank, number, batches), rates, done)
            outputs.append(list(of_split))
    return outputs, {name: _local(value) for name, value in dmp.state_dict().items()}


def _outputs(
    pipeline: TrainPipeline, batches: Iterator[ModelInput], rates: LearningRates, done: int
) -> Iterator[tuple[Tensor, ...]]:
    for step in count(done):
        rates.set(step)
        try:
            output = pipeline.progress(batches)
        except StopIteration:
            return
        yield tuple(tensor.clone() for tensor in output)


class _Loop:
    """What a pipeline is to come to."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer

    def progress(self, batches: Iterator[ModelInput]) -> Any:
        batch = next(batches)
        self._optimizer.zero_grad()
        loss, output = self._model(batch)
        if self._model.training:
            loss.backward()
            self._optimizer.step()
        return output


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bags = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(
                    name=f"t_{name}", embedding_dim=4, num_embeddings=8, feature_names=[name]
                )
                for name in ("user", "item")
            ]
        )
        self.top = nn.Linear(8, 1)

    def forward(self, batch: ModelInput) -> tuple[Tensor, tuple[Tensor, ...]]:
        bags = self.bags(batch.sparse_features)
        logits = self.top(torch.cat([bags["user"], bags["item"]], dim=1)).squeeze(1)
        loss = F.binary_cross_entropy_with_logits(logits, batch.labels)
        return loss, (loss.detach(), logits.detach(), batch.labels)


def _batches(rank: int, number: int, batches: int) -> Iterator[ModelInput]:
    generator = torch.Generator().manual_seed(100 * number + rank)
    for _ in range(batches):
        lengths = torch.randint(1, 4, (8,), generator=generator)
        ids = torch.randint(8, (int(lengths.sum()),), generator=generator)
        yield ModelInput(
            torch.zeros(4, 0),
            KeyedJaggedTensor(["user", "item"], ids, lengths=lengths),
            torch.randint(2, (4,), generator=generator).float(),
        )


def _local(value: Any) -> Tensor:
    """This rank's part of a tensor that may be sharded."""
    if hasattr(value, "local_shards"):
        parts = [shard.tensor.flatten() for shard in value.local_shards()]
        return torch.cat(parts).clone() if parts else torch.empty(0)
    return torch.as_tensor(value).detach().clone()
