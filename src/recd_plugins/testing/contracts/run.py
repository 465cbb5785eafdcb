"""The contracts of callbacks, metrics and train pipelines."""

from __future__ import annotations

import contextlib
import json
import math
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.nn import functional as F
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from recd_plugins.config import TrainingSpec
from recd_plugins.config.schema import ScheduleSpec
from recd_plugins.data.lower import lower
from recd_plugins.interfaces import (
    Callback,
    Metric,
    Pipeline,
    RunBatch,
    RunEnd,
    RunEvaluation,
    RunInterruption,
    RunStart,
    RunStep,
    ScoredBatch,
    Table,
    TrainPipeline,
)
from recd_plugins.interfaces.batch import Batch, ModelInput, Placement
from recd_plugins.interfaces.callback import Quality
from recd_plugins.planning.topologies import default_topology
from recd_plugins.runtime.errors import RecdError
from recd_plugins.runtime.plugin_modules import load_file, modules_of_files
from recd_plugins.sharding.sharders import stock_sharders
from recd_plugins.sparse import InverseKeyedJaggedTensor
from recd_plugins.testing.contracts.plugin import PluginContract, assert_equal, pairs_of_rows
from recd_plugins.testing.device import backend_of_tests
from recd_plugins.testing.gloo import run_on_ranks
from recd_plugins.training.optimizer import LearningRates, build_optimizer

_STEPS = 4
_in_a_group = pytest.mark.usefixtures("process_group")


class CallbackContract(PluginContract):
    """Tests of a callback: override the fixture ``plugin``."""

    @pytest.fixture
    def tables(self) -> Sequence[Table]:
        """Return tables of the model, both pooled and sequence tables."""
        return (
            Table("t_user", ("user",), 1000, 16, pooled=True),
            Table("t_history", ("history",), 500, 16, pooled=False),
        )

    @pytest.fixture
    def claimed(self) -> Sequence[str]:
        """Return the features or tables of the plugin's entry, if its kind has any."""
        return ()

    @pytest.fixture
    def start(self, tables: Sequence[Table], claimed: Sequence[str]) -> RunStart:
        """Return the start of a run on one rank."""
        return RunStart(0, 1, 0, _STEPS, tuple(tables), tuple(claimed))

    @pytest.fixture
    def batches(self, tables: Sequence[Table]) -> Sequence[ModelInput]:
        """Return one batch per step; every second one is deduplicated."""
        return [_batch(tables, step) for step in range(_STEPS)]

    @pytest.fixture
    def process_group(self) -> Iterator[None]:
        """A process group of one rank, for collective calls."""
        dist.init_process_group(backend_of_tests(1), store=HashStore(), rank=0, world_size=1)
        yield
        dist.destroy_process_group()

    @_in_a_group
    def test_looks_on_and_changes_nothing(
        self, plugin: Callback, start: RunStart, batches: Sequence[ModelInput]
    ) -> None:
        before = deepcopy(batches)
        plugin.on_start(start)
        losses = _train(plugin, batches)
        assert [loss.item() for loss in losses] == [1 / (step + 1) for step in range(_STEPS)]
        for batch, as_before in zip(batches, before, strict=True):
            assert_equal(batch, as_before, "the callback changed a batch")
        plugin.on_evaluate(RunEvaluation(0, _STEPS, "test", Quality(0.9, 0.6, 32)))
        plugin.on_end(RunEnd(0, _STEPS, tuple(loss.item() for loss in losses)))

    @_in_a_group
    def test_a_run_without_a_step_ends(self, plugin: Callback, start: RunStart) -> None:
        plugin.on_start(start)
        plugin.on_end(RunEnd(0, 0, ()))

    @_in_a_group
    def test_a_run_may_be_ended(
        self, plugin: Callback, start: RunStart, batches: Sequence[ModelInput]
    ) -> None:
        plugin.on_start(start)
        _train(plugin, batches[:1])
        plugin.state_dict()
        plugin.on_interrupt(RunInterruption(0, 1, "SIGTERM"))

    @_in_a_group
    def test_its_state_is_json(
        self, plugin: Callback, start: RunStart, batches: Sequence[ModelInput]
    ) -> None:
        plugin.on_start(start)
        for seen in (batches[:0], batches):
            _train(plugin, seen)
            state = plugin.state_dict()
            assert json.loads(json.dumps(state, allow_nan=False)) == state

    @_in_a_group
    def test_a_run_that_goes_on_has_the_same_state(
        self, plugin: Callback, start: RunStart, batches: Sequence[ModelInput]
    ) -> None:
        first, again = copy(plugin), copy(plugin)  # created again from its options
        plugin.on_start(start)
        _train(plugin, batches)

        first.on_start(start)
        _train(first, batches[:2])
        state = first.state_dict()
        (again,) = _resumed(again, start, [state])
        assert again.state_dict() == state
        _train(again, batches[2:], done=2)
        assert again.state_dict() == plugin.state_dict()

    def test_states_of_other_ranks_are_kept_or_refused(
        self, plugin: Callback, start: RunStart, batches: Sequence[ModelInput]
    ) -> None:
        """Resumes a run of two ranks on one, and a run of one rank on two, in this process."""
        for world_size in (1, 2):
            with contextlib.suppress(RecdError), _skipped_if_collective():
                ranks = [copy(plugin) for _ in range(world_size)]
                for rank, each in enumerate(ranks):
                    each.on_start(replace(start, rank=rank, world_size=world_size))
                    _train(each, batches[rank : rank + 2], rank=rank)
                if world_size == 2:
                    ranks = _resumed(plugin, start, _states(ranks))
                states = _states(ranks)
                there = _resumed(plugin, start, states, world_size=2)
                back = _states(_resumed(plugin, start, _states(there)))
                assert back == states, "the state is another after it was at two ranks and back"


@contextlib.contextmanager
def _skipped_if_collective() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        if "process group" in str(error):
            pytest.skip("it makes collective calls, and both ranks are in one process")
        raise


def _resumed(
    plugin: Callback,
    start: RunStart,
    states: Sequence[Mapping[str, Any]],
    world_size: int = 1,
) -> list[Callback]:
    """Return the callback of each rank, resumed from a checkpoint of two steps."""
    ranks = [copy(plugin) for _ in range(world_size)]
    for rank, each in enumerate(ranks):
        each.on_start(replace(start, rank=rank, world_size=world_size, step=2))
        if any(states):  # a checkpoint keeps no others
            each.load_state_dict(json.loads(json.dumps(states)))
    return ranks


def _states(ranks: Sequence[Callback]) -> list[Mapping[str, Any]]:
    return [each.state_dict() for each in ranks]


def _train(
    plugin: Callback, batches: Sequence[ModelInput], done: int = 0, rank: int = 0
) -> list[Tensor]:
    losses = []
    for step, batch in enumerate(batches, done + 1):
        losses.append(torch.tensor(1 / step, dtype=torch.float64))
        plugin.on_batch(RunBatch(rank, step, batch))
        plugin.on_step(RunStep(rank, step, losses[-1]))
    return losses


def _batch(tables: Sequence[Table], step: int) -> ModelInput:
    """Return pairs of equal rows; one row of the first batch is empty."""
    generator = torch.Generator().manual_seed(step)
    rows: dict[str, JaggedTensor] = {}
    for table in tables:
        for name in table.features:
            lengths = torch.randint(3, (4,), generator=generator)
            lengths[0] = step
            rows[name] = pairs_of_rows(lengths, table.num_embeddings, generator)
    kjt = KeyedJaggedTensor.from_jt_dict(rows)
    unique = InverseKeyedJaggedTensor.from_kjt(kjt, [[name] for name in rows]) if step % 2 else ()
    return lower(
        Batch(
            dense_features=torch.rand(8, 2, generator=generator),
            labels=torch.randint(2, (8,), generator=generator).float(),
            kjt=None if unique else kjt,
            ikjts=tuple(unique),
        ),
        Placement(
            pooled=tuple(name for table in tables if table.pooled for name in table.features),
            sequence=tuple(name for t in tables if not t.pooled for name in t.features),
        ),
    )


class MetricContract(PluginContract):
    """Tests of a metric: override the fixture ``plugin``."""

    @pytest.fixture
    def batches(self) -> Sequence[ScoredBatch]:
        """Return batches of several sizes with rows of five sessions."""
        generator = torch.Generator().manual_seed(0)
        return [
            ScoredBatch(
                torch.randn(size, generator=generator),
                torch.randint(2, (size,), generator=generator).float(),
                torch.arange(size) % 5,
            )
            for size in (16, 5, 16, 9, 1)
        ]

    def test_results_are_finite_numbers_by_name(
        self, plugin: Metric, batches: Sequence[ScoredBatch]
    ) -> None:
        results = plugin.results([_seen(plugin, batches)])
        assert isinstance(results, Mapping)
        assert results, "no figure"
        for name, value in results.items():
            assert isinstance(name, str)
            assert name.isidentifier(), "names are words"
            assert isinstance(value, float | int), f"{name} is {value!r}"
            assert math.isfinite(value), f"{name} is {value}"

    def test_it_does_not_matter_which_rank_saw_a_sample(
        self, plugin: Metric, batches: Sequence[ScoredBatch]
    ) -> None:
        """Batch sizes and ranks without samples must not matter either."""
        one = plugin.results([_seen(plugin, batches)])
        sessions = [batch.sessions for batch in batches if batch.sessions is not None]
        whole = ScoredBatch(
            torch.cat([batch.logits for batch in batches]),
            torch.cat([batch.labels for batch in batches]),
            torch.cat(sessions) if sessions else None,
        )
        for shares in (
            [batches[:2], batches[2:]],
            [batches[2:], batches[:2]],
            [batches[1:], [], batches[:1]],
            [[whole]],
        ):
            ranks = [_seen(copy(plugin), share) for share in shares]
            assert plugin.results(ranks) == pytest.approx(one, rel=1e-9, abs=1e-12)

    def test_leaves_batches_as_they_are(
        self, plugin: Metric, batches: Sequence[ScoredBatch]
    ) -> None:
        before = deepcopy(batches)
        _seen(plugin, batches)
        for batch, as_before in zip(batches, before, strict=True):
            for name, value in vars(as_before).items():
                assert value is None or torch.equal(getattr(batch, name), value), f"{name} changed"

    def test_its_state_travels(self, plugin: Metric, batches: Sequence[ScoredBatch]) -> None:
        state = _seen(plugin, batches)
        # Created again from its options, as on rank 0, because the state must be complete.
        there = copy(plugin).results([pickle.loads(pickle.dumps(state))])
        assert there == plugin.results([state])

    def test_labels_of_one_kind_do_no_harm(
        self, plugin: Metric, batches: Sequence[ScoredBatch]
    ) -> None:
        """The result may be NaN if all labels are equal."""
        for label in (0.0, 1.0):
            same = [replace(b, labels=torch.full_like(b.labels, label)) for b in batches]
            assert all(
                isinstance(value, float | int)
                for value in plugin.results([_seen(plugin, same)]).values()
            )


def _seen(plugin: Metric, batches: Iterable[ScoredBatch]) -> Any:
    state = plugin.start()
    for batch in batches:
        state = plugin.update(state, batch)
    return state


#: Number of batches per iterator, and whether to train on them.
_Splits = Sequence[tuple[int, bool]]


class PipelineContract(PluginContract):
    """Tests of a train pipeline: override the fixture ``plugin``.

    The pipeline trains a model on two CPU ranks, and a plain loop trains another one; learning
    rates fall with each step.
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
    # Ranks import the plugin like this process did, even from a folder of plugins.
    files = modules_of_files([type(plugin)])
    found, expected = (
        run_on_ranks(_run, 2, files, pickle.dumps(by), splits) for by in (plugin, None)
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


def _run(
    rank: int, _world_size: int, files: Mapping[str, Path], pickled: bytes, splits: _Splits
) -> tuple[list[list[tuple[Tensor, ...]]], dict[str, Tensor]]:
    """Return the outputs per iterator and batch, and this rank's weights."""
    for name, file in files.items():
        load_file(name, file)
    plugin: Pipeline | None = pickle.loads(pickled)
    device, training = torch.device("cpu"), TrainingSpec(learning_rate=0.5)
    torch.manual_seed(0)
    model, sharders = _Model(), stock_sharders(training)
    # One table is sharded; the planner may replicate the other.
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
    """The plain training loop."""

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
    """Return the local part of a tensor that may be sharded."""
    if hasattr(value, "local_shards"):
        parts = [shard.tensor.flatten() for shard in value.local_shards()]
        return torch.cat(parts).clone() if parts else torch.empty(0)
    return torch.as_tensor(value).detach().clone()
