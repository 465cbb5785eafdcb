"""No row is read twice or lost, whatever the ranks and wherever a run stops."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from recd_plugins.data.reader import History, Piece, ReadPlan, Unit, cut_into_blocks


def make_units(sizes: list[int]) -> tuple[Unit, ...]:
    return tuple(Unit(0, i, sum(sizes[:i]), size) for i, size in enumerate(sizes))


def rows_of(
    plan: ReadPlan, epoch: int, history: History, rank: int, world_size: int, steps: int = 0
) -> list[int]:
    return rows_in(plan.pieces(epoch, history, rank, world_size, steps))


def rows_in(pieces: Iterable[Piece]) -> list[int]:
    return [
        piece.unit.first_row + piece.skip + row for piece in pieces for row in range(piece.num_rows)
    ]


sizes = st.lists(st.integers(1, 40), min_size=1, max_size=8)
plans = st.builds(
    lambda sizes, batch_size, shuffle: ReadPlan(make_units(sizes), batch_size, shuffle, seed=3),
    sizes,
    st.integers(1, 9),
    st.booleans(),
)
world_sizes = st.integers(1, 5)


@given(plans, world_sizes, st.integers(0, 2))
def test_every_rank_gets_equally_many_rows_and_none_twice(plan, world_size, epoch):
    shares = [rows_of(plan, epoch, (), rank, world_size) for rank in range(world_size)]
    assert {len(share) for share in shares} == {plan.num_steps(world_size) * plan.batch_size}
    read = [row for share in shares for row in share]
    assert len(set(read)) == len(read)
    assert set(read) <= set(range(plan.num_rows))
    assert plan.num_rows - len(read) < world_size * plan.batch_size


@given(plans, world_sizes, st.data())
def test_resuming_goes_on_where_it_stopped(plan, world_size, data):
    steps = data.draw(st.integers(0, plan.num_steps(world_size)))
    for rank in range(world_size):
        whole = rows_of(plan, 1, (), rank, world_size)
        assert rows_of(plan, 1, (), rank, world_size, steps) == whole[steps * plan.batch_size :]


@given(plans, st.lists(world_sizes, min_size=2, max_size=4), st.data())
def test_changing_the_ranks_loses_and_repeats_nothing(plan, stages, data):
    history: History = ()
    read: list[int] = []
    for number, world_size in enumerate(stages):
        steps = plan.num_steps(world_size, history)
        if number < len(stages) - 1:
            steps = data.draw(st.integers(0, steps))
        for rank in range(world_size):
            read += rows_of(plan, 0, history, rank, world_size)[: steps * plan.batch_size]
        history = (*history, (world_size, steps))
    assert len(set(read)) == len(read)
    assert plan.num_rows - len(read) < stages[-1] * plan.batch_size


def test_shuffle_orders_units_anew_in_each_epoch():
    plan = ReadPlan(make_units([4] * 16), batch_size=4, shuffle=True, seed=1)
    orders = [tuple(rows_of(plan, epoch, (), 0, 1)) for epoch in (0, 1, 0)]
    assert orders[0] == orders[2] != orders[1]
    assert sorted(orders[1]) == list(range(64))
    assert rows_of(plan, 0, (), 0, 1)[::4] != list(range(0, 64, 4))


@given(plans, world_sizes, st.integers(1, 40), st.data())
def test_blocks_are_whole_batches_of_the_same_rows(plan, world_size, most_rows, data):
    steps = data.draw(st.integers(0, plan.num_steps(world_size)))
    pieces = list(plan.pieces(0, (), 0, world_size, steps))
    blocks = list(cut_into_blocks(pieces, plan.batch_size, most_rows))
    assert rows_in(piece for block in blocks for piece in block) == rows_in(pieces)
    for block in blocks:
        num_rows = sum(piece.num_rows for piece in block)
        assert num_rows % plan.batch_size == 0
        assert block[0].num_rows <= max(most_rows, plan.batch_size)
        # Only what completes the last batch is of other units.
        assert num_rows - block[0].num_rows < plan.batch_size
