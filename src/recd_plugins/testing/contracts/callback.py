"""The contract of callbacks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from copy import copy, deepcopy

import pytest
import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins.interfaces import (
    Callback,
    RunBatch,
    RunEnd,
    RunEvaluation,
    RunInterruption,
    RunStart,
    RunStep,
    Table,
)
from recd_plugins.interfaces.callback import Quality
from recd_plugins.testing.contracts.plugin import PluginContract
from recd_plugins.values.model_input import ModelInput

_STEPS = 4


class CallbackContract(PluginContract):
    """Tests of a callback: override the fixture ``plugin``."""

    @pytest.fixture
    def tables(self) -> Sequence[Table]:
        """Tables of the model: one of pooled features, one of a sequence."""
        return (
            Table("t_user", ("user",), 1000, 16, pooled=True),
            Table("t_history", ("history",), 500, 16, pooled=False),
        )

    @pytest.fixture
    def claimed(self) -> Sequence[str]:
        """What the plugin's entry is for, of a kind that claims features or tables."""
        return ()

    @pytest.fixture
    def start(self, tables: Sequence[Table], claimed: Sequence[str]) -> RunStart:
        """The start of a run of one rank."""
        return RunStart(0, 1, 0, _STEPS, tuple(tables), tuple(claimed))

    @pytest.fixture
    def batches(self, tables: Sequence[Table]) -> Sequence[ModelInput]:
        """One a step; the first has an empty row."""
        return [_batch(tables, step) for step in range(_STEPS)]

    def test_looks_on_and_changes_nothing(
        self, plugin: Callback, start: RunStart, batches: Sequence[ModelInput]
    ) -> None:
        before = deepcopy(batches)
        plugin.on_start(start)
        losses = _train(plugin, batches)
        assert [loss.item() for loss in losses] == [1 / (step + 1) for step in range(_STEPS)]
        for batch, as_before in zip(batches, before, strict=True):
            _assert_equal(batch, as_before)
        plugin.on_evaluate(RunEvaluation(0, _STEPS, "test", Quality(0.9, 0.6, 32)))
        plugin.on_end(RunEnd(0, _STEPS, tuple(loss.item() for loss in losses)))

    def test_a_run_without_a_step_ends(self, plugin: Callback, start: RunStart) -> None:
        plugin.on_start(start)
        plugin.on_end(RunEnd(0, 0, ()))

    def test_a_run_may_be_ended(
        self, plugin: Callback, start: RunStart, batches: Sequence[ModelInput]
    ) -> None:
        plugin.on_start(start)
        _train(plugin, batches[:1])
        plugin.state_dict()
        plugin.on_interrupt(RunInterruption(0, 1, "SIGTERM"))

    def test_its_state_is_json(
        self, plugin: Callback, start: RunStart, batches: Sequence[ModelInput]
    ) -> None:
        plugin.on_start(start)
        for seen in (batches[:0], batches):
            _train(plugin, seen)
            state = plugin.state_dict()
            assert json.loads(json.dumps(state, allow_nan=False)) == state

    def test_a_run_that_goes_on_has_the_same_state(
        self, plugin: Callback, start: RunStart, batches: Sequence[ModelInput]
    ) -> None:
        first, again = copy(plugin), copy(plugin)  # made anew from its options
        plugin.on_start(start)
        _train(plugin, batches)

        first.on_start(start)
        _train(first, batches[:2])
        if state := first.state_dict():
            again.on_start(RunStart(0, 1, 2, _STEPS, start.tables, start.claimed))
            again.load_state_dict([json.loads(json.dumps(state))])
            assert again.state_dict() == state
            _train(again, batches[2:], done=2)
            assert again.state_dict() == plugin.state_dict()


def _train(plugin: Callback, batches: Sequence[ModelInput], done: int = 0) -> list[Tensor]:
    losses = []
    for step, batch in enumerate(batches, done + 1):
        losses.append(torch.tensor(1 / step, dtype=torch.float64))
        plugin.on_batch(RunBatch(0, step, batch))
        plugin.on_step(RunStep(0, step, losses[-1]))
    return losses


def _batch(tables: Sequence[Table], seed: int) -> ModelInput:
    def features(pooled: bool) -> KeyedJaggedTensor | None:
        of_tables = {f: t for t in tables if t.pooled == pooled for f in t.features}
        if not of_tables:
            return None
        lengths = torch.randint(3, (8 * len(of_tables),), generator=generator)
        lengths[0] = seed
        ids = [
            torch.randint(table.num_embeddings, (int(each.sum()),), generator=generator)
            for table, each in zip(of_tables.values(), torch.split(lengths, 8), strict=True)
        ]
        return KeyedJaggedTensor([*of_tables], torch.cat(ids), lengths=lengths)

    generator = torch.Generator().manual_seed(seed)
    return ModelInput(
        dense_features=torch.rand(8, 2, generator=generator),
        sparse_features=features(pooled=True),
        labels=torch.randint(2, (8,), generator=generator).float(),
        sequence_features=features(pooled=False),
    )


def _assert_equal(batch: ModelInput, before: ModelInput) -> None:
    assert torch.equal(batch.dense_features, before.dense_features), "dense_features changed"
    assert torch.equal(batch.labels, before.labels), "labels changed"
    for name in ("sparse_features", "sequence_features"):
        now, then = getattr(batch, name), getattr(before, name)
        assert (now is None) == (then is None)
        if now is not None:
            assert torch.equal(now.values(), then.values()), f"ids of {name} changed"
            assert torch.equal(now.lengths(), then.lengths()), f"lengths of {name} changed"
