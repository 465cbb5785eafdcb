import os
import subprocess
import sys
import threading

import pytest
import torch

from recd_plugin_scars.runtime.mover import RowMover
from recd_plugin_scars.runtime.stores import BackingStore
from recd_plugins.runtime.errors import RecdError

NUM_ROWS, DIM = 9, 4


class BrokenStore(BackingStore):
    """Counts what is asked of it; what names row 8 fails."""

    def __init__(self, error):
        super().__init__(name="table t", num_rows=NUM_ROWS, dim=DIM, with_state=True)
        self.error = error
        self.num_calls = 0

    def read(self, rows, weights, state):
        self.num_calls += 1
        if 8 in rows:
            raise self.error
        super().read(rows, weights, state)

    def write(self, rows, weights, state):
        self.num_calls += 1
        if 8 in rows:
            raise self.error
        super().write(rows, weights, state)


@pytest.fixture
def store():
    return BackingStore(name="t", num_rows=NUM_ROWS, dim=DIM, with_state=True)


def rows_of(*rows):
    return torch.tensor(rows)


def write(mover, *rows):
    mover.write(rows_of(*rows), torch.ones(len(rows), DIM), torch.ones(len(rows)))


def test_a_read_sees_the_write_before_it(store):
    mover = RowMover(store)
    rows = torch.tensor([7, 2])
    before = mover.read(rows)
    mover.write(rows, torch.full((2, 4), 3.0), torch.tensor([5.0, 6.0]))
    weights, state = mover.read(torch.tensor([2, 7, 0])).wait()
    mover.close()
    assert before.wait()[0].tolist() == [[0.0] * 4] * 2
    assert weights[:, 0].tolist() == [3, 3, 0]
    assert state.tolist() == [6, 5, 0]


def test_drain_waits_for_what_any_thread_queued(store):
    started, go_on = threading.Event(), threading.Event()

    class Slow(BackingStore):
        def write(self, rows, weights, state):
            started.set()
            assert go_on.wait(60)
            super().write(rows, weights, state)

    slow = Slow(name="t", num_rows=NUM_ROWS, dim=DIM, with_state=True)
    mover = RowMover(slow)
    thread = threading.Thread(target=write, args=(mover, 1, 2))
    thread.start()
    thread.join()
    assert started.wait(60)
    threading.Timer(0.05, go_on.set).start()
    mover.drain()
    assert slow.weights[:, 0].tolist() == [0, 1, 1, 0, 0, 0, 0, 0, 0]
    mover.close()


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (RecdError("f: row 8 could not be read (Input/output error)"), r"^f: row 8 .* error\)$"),
        (MemoryError("too much"), "^table t: rows: .*too much"),
    ],
)
def test_after_an_error_nothing_moves_and_every_call_says_why(error, message):
    store = BrokenStore(error)
    mover = RowMover(store)
    failed = mover.read(rows_of(8))
    for call in (failed.wait, failed.wait, mover.drain):
        with pytest.raises(RecdError, match=message):
            call()
    with pytest.raises(RecdError, match=message):
        mover.read(rows_of(1))
    with pytest.raises(RecdError, match=message):
        write(mover, 1)
    assert store.num_calls == 1
    mover.close()


def test_what_was_queued_behind_an_error_is_not_done():
    store = BrokenStore(RecdError("no"))
    may_start = threading.Event()
    mover = RowMover(store)
    # The thread is kept until all is queued.
    mover._thread.submit(may_start.wait, 60)
    write(mover, 8)
    write(mover, 1)
    behind = mover.read(rows_of(2))
    may_start.set()
    with pytest.raises(RecdError, match="no"):
        behind.wait()
    assert store.num_calls == 1
    assert store.weights.count_nonzero() == 0


def test_close_tells_an_error_that_nobody_was_told():
    mover = RowMover(BrokenStore(RecdError("the disk is gone")))
    write(mover, 8)
    with pytest.raises(RecdError, match="the disk is gone"):
        mover.close()
    mover.close()


def test_close_does_what_is_queued_and_may_be_called_again(store):
    mover = RowMover(store)
    write(mover, 3)
    mover.close()
    mover.close()
    assert store.weights[3].tolist() == [1] * DIM


def test_the_thread_ends_with_its_mover(store):
    def names():
        return [
            thread.name for thread in threading.enumerate() if thread.name.startswith("rows of")
        ]

    before = names()
    mover = RowMover(store)
    assert names() == before
    mover.read(rows_of(1)).wait()
    (thread,) = (thread for thread in mover._thread._threads)
    del mover
    thread.join(60)
    assert not thread.is_alive()


FORKED = """
import os, sys, torch
from recd_plugin_scars.runtime.stores import BackingStore
from recd_plugin_scars.runtime.mover import RowMover
from recd_plugins.runtime.errors import RecdError

mover = RowMover(BackingStore(name="t", num_rows=9, dim=4, with_state=False))
mover.read(torch.tensor([1])).wait()
child = os.fork()
if child == 0:
    try:
        mover.read(torch.tensor([1]))
    except RecdError as error:
        assert f"process {os.getppid()}" in str(error), error
        mover.close()
        sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert mover.read(torch.tensor([1])).wait()[0].shape == (1, 4)
print("done")
"""

LEFT_OPEN = """
import torch
from recd_plugin_scars.runtime.stores import BackingStore
from recd_plugin_scars.runtime.mover import RowMover

store = BackingStore(name="t", num_rows=9, dim=4, with_state=False)
mover = RowMover(store)
for _ in range(100):
    pending = mover.read(torch.tensor([1]))
    mover.write(torch.tensor([1]), torch.ones(1, 4), None)
print("done")
"""


@pytest.mark.parametrize("program", [FORKED, LEFT_OPEN], ids=["forked", "left open"])
def test_no_process_hangs(program):
    ended = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "done\n", "")
