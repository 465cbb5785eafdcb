"""The contract of callbacks."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from recd_plugins.data.lower import lower
from recd_plugins.errors import RecdError
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
from recd_plugins.sparse import InverseKeyedJaggedTensor
from recd_plugins.testing.contracts.plugin import PluginContract
from recd_plugins.testing.device import backend_of_tests
from recd_plugins.values.batch import Batch, ModelInput, Placement

_STEPS = 4
_in_a_group = pytest.mark.usefixtures("process_group")


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
        """One a step, every second of them deduplicated; the first has an empty row."""
        return [_batch(tables, step) for step in range(_STEPS)]

    @pytest.fixture
    def process_group(self) -> Iterator[None]:
        """A process group of one rank: callbacks may make collective calls."""
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
            _assert_equal(batch, as_before)
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
        first, again = copy(plugin), copy(plugin)  # made anew from its options
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
        """Those of two ranks at one, and those of one at two, where these are in one process."""
        try:
            self._go_on_at_other_ranks(plugin, start, batches)
        except ValueError as error:
            if "process group" in str(error):
                pytest.skip("it makes collective calls, and both ranks are in one process")
            raise

    def _go_on_at_other_ranks(
        self, plugin: Callback, start: RunStart, batches: Sequence[ModelInput]
    ) -> None:
        for world_size in (1, 2):
            with contextlib.suppress(RecdError):  # refused by name
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


def _resumed(
    plugin: Callback,
    start: RunStart,
    states: Sequence[Mapping[str, Any]],
    world_size: int = 1,
) -> list[Callback]:
    """What goes on at each rank from a checkpoint of two steps."""
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
    """Rows of which every second is the one before."""
    generator = torch.Generator().manual_seed(step)
    rows: dict[str, JaggedTensor] = {}
    for table in tables:
        for name in table.features:
            lengths = torch.randint(3, (4,), generator=generator)
            lengths[0] = step
            every = [
                torch.randint(table.num_embeddings, (int(each),), generator=generator).repeat(2)
                for each in lengths
            ]
            rows[name] = JaggedTensor(torch.cat(every), lengths=lengths.repeat_interleave(2))
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


def _assert_equal(batch: ModelInput, before: ModelInput) -> None:
    assert torch.equal(batch.dense_features, before.dense_features), "dense_features changed"
    assert torch.equal(batch.labels, before.labels), "labels changed"
    for name in ("sparse_features", "sequence_features"):
        now, then = getattr(batch, name), getattr(before, name)
        assert (now is None) == (then is None)
        if now is not None:
            assert torch.equal(now.values(), then.values()), f"ids of {name} changed"
            assert torch.equal(now.lengths(), then.lengths()), f"lengths of {name} changed"
    for name, inverse in batch.inverse_lookup.items():
        assert torch.equal(inverse, before.inverse_lookup[name]), f"rows of {name} changed"
