import gc
import json
import os
import subprocess
from typing import Any

import pytest
import torch
from tests import forked

from recd_plugin_scars.runtime.mover import RowMover
from recd_plugin_scars.tests.runtime.mapped_file_cases import (
    DIM,
    NUM_ROWS,
    command,
    contents,
    finish,
    open_store,
    truncate,
)
from recd_plugins.errors import DataError, SetupError


def random_rows(store):
    """Fill a store through its mover's ways; gives what it holds."""
    generator = torch.Generator().manual_seed(1)
    weights = torch.rand(NUM_ROWS, DIM, generator=generator)
    state = torch.rand(NUM_ROWS, generator=generator)
    store.write(torch.arange(NUM_ROWS), weights, state)
    return weights, state


@pytest.fixture
def kept(tmp_path):
    """The folder of a table that was kept, and what it holds."""
    store = open_store(tmp_path, keep=True)
    rows = random_rows(store)
    store.close()
    return tmp_path, rows


# Scratch files


def test_scratch_files_go_with_close_and_leave_no_folder(tmp_path):
    store = open_store(tmp_path / "new" / "stores")
    weights, _ = random_rows(store)
    mapped = store.weights
    assert len(list((tmp_path / "new" / "stores").glob("*/*"))) == 3
    store.close()
    store.close()
    assert list(tmp_path.rglob("*")) == [tmp_path / "new"]
    # Who still has the tensor may read it.
    assert torch.equal(mapped, weights)


def test_scratch_files_go_with_the_store(tmp_path):
    store = open_store(tmp_path)
    store.cycle = store
    del store
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_a_table_that_nobody_uses_is_no_obstacle_to_the_next(tmp_path):
    gc.disable()
    try:
        store = open_store(tmp_path)
        store.cycle = store
        del store
        open_store(tmp_path).close()
    finally:
        gc.enable()


PROGRAM = """
import os, sys, torch
from pathlib import Path
from recd_plugin_scars.runtime.mapped_file import FileStore
from recd_plugin_scars.runtime.mover import RowMover
from recd_plugin_scars.tests.runtime.mapped_file_cases import (
    DIM,
    NUM_ROWS,
    command,
    contents,
    finish,
    open_store,
    truncate,
)

folder, keep = Path(sys.argv[1]), bool(int(sys.argv[2]))
store = FileStore(folder, keep=keep, name="t", num_rows=50, dim=6, with_state=True)
mover = RowMover(store)
"""


def test_scratch_files_go_when_the_interpreter_ends(tmp_path):
    program = (
        PROGRAM
        + """
mover.write(torch.arange(50), torch.ones(50, 6), torch.ones(50))
if os.fork() == 0:
    sys.exit()  # A forked process removes nothing.
os.wait()
print(len(list(folder.glob("*/*"))))
"""
    )
    # An interpreter of its own: a process of multiprocessing ends otherwise.
    done = subprocess.run(
        [*command(program), str(tmp_path), "0"], capture_output=True, text=True, check=True
    )
    assert done.stdout == "3\n"
    assert list(tmp_path.iterdir()) == []


def test_stores_of_other_names_share_a_folder(tmp_path):
    names = ["t", "t/0", "..", "x" * 300, "x" * 299 + "y"]
    stores = [open_store(tmp_path, name=name) for name in names]
    for value, store in enumerate(stores):
        store.weights.fill_(value)
    assert [store.weights[0, 0].item() for store in stores] == list(range(len(names)))
    for store in stores:
        store.close()
    assert list(tmp_path.iterdir()) == []


def test_only_its_own_files_are_removed(tmp_path):
    store = open_store(tmp_path)
    (folder,) = tmp_path.iterdir()
    (folder / "notes").write_text("mine")
    store.close()
    assert [path.name for path in folder.iterdir()] == ["notes"]


# Folders in use


@pytest.mark.parametrize("keep", [False, True])
def test_a_folder_in_use_is_refused(tmp_path, keep):
    store = open_store(tmp_path, keep=keep)
    before = contents(tmp_path)
    for other in (False, True):
        with pytest.raises(SetupError, match=rf"t\.store: is in use .*process {os.getpid()} "):
            open_store(tmp_path, keep=other)
    assert contents(tmp_path) == before
    store.close()


def test_a_folder_in_use_by_another_process_is_refused(tmp_path):
    waits = """
import time
print("open", flush=True)
while not folder.with_suffix(".end").exists():
    time.sleep(0.01)
mover.close()
"""
    process = forked.Program(command(PROGRAM + waits, tmp_path, 0))
    assert process.first_line() == "open\n"
    with pytest.raises(SetupError, match=rf"is in use .*process {process.pid} "):
        open_store(tmp_path)
    tmp_path.with_suffix(".end").touch()
    assert process.wait(120) == 0
    open_store(tmp_path).close()


# Kept files


def test_a_kept_table_goes_on_in_a_later_run(kept):
    folder, (weights, state) = kept
    store = open_store(folder, keep=True)
    assert store.is_kept
    assert torch.equal(store.weights, weights)
    assert torch.equal(store.state, state)
    store.write(torch.tensor([3]), torch.full((1, DIM), 9.0), torch.tensor([9.0]))
    store.close()
    again = open_store(folder, keep=True)
    assert again.weights[2:5, 0].tolist() == [weights[2, 0], 9, weights[4, 0]]
    again.close()


def change_manifest(folder, **values):
    (manifest,) = folder.glob("*/manifest.json")
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), **values}))


FAULTS: dict[str, Any] = {
    "missing file": (
        lambda folder: next(folder.glob("*/state")).unlink(),
        {},
        r"t\.store/state: is missing; a file of 200 bytes",
    ),
    "truncated file": (truncate, {}, r"weights: has 1,199 bytes and should have 1,200"),
    "other rows": (None, {"num_rows": 51}, "num_rows is 50 in the table .* 51 in this run"),
    "other dim": (None, {"dim": 8}, "dim is 6 in the table .* 8 in this run"),
    "other tables": (None, {"shards": ["u"]}, r"shards is \[\] in the table .* \['u'\] in this"),
    "other optimizer": (None, {"with_state": False}, "optimizer_state is True .* False in this"),
    "other dtype": (
        lambda folder: change_manifest(folder, dtype="float16"),
        {},
        "dtype is 'float16' .* 'float32' in this",
    ),
    "other format": (lambda folder: change_manifest(folder, format=2), {}, "format is 2 .* be 1"),
    "no manifest": (
        lambda folder: next(folder.glob("*/manifest.json")).unlink(),
        {},
        "weights is there without manifest.json",
    ),
    "broken manifest": (
        lambda folder: next(folder.glob("*/manifest.json")).write_text("{"),
        {},
        "manifest.json: is not the manifest of a table",
    ),
    "manifest of nothing": (
        lambda folder: next(folder.glob("*/manifest.json")).write_text('{"format": 1}'),
        {},
        "manifest.json: is not the manifest of a table .*keep",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_kept_table_that_is_another_is_refused_and_left_as_it_is(kept, fault):
    folder, _ = kept
    spoil, arguments, message = FAULTS[fault]
    if spoil:
        spoil(folder)
    before = contents(folder)
    with pytest.raises(DataError, match=message) as caught:
        open_store(folder, keep=True, **arguments)
    assert "remove the folder" in str(caught.value)
    assert contents(folder) == before


def test_a_run_that_keeps_nothing_does_not_touch_what_was_kept(kept):
    folder, _ = kept
    before = contents(folder)
    with pytest.raises(SetupError, match="holds a table that an earlier run kept: set keep"):
        open_store(folder)
    assert contents(folder) == before


TRAINED = """
mover.write(torch.arange(50), torch.ones(50, 6), torch.ones(50))
mover.close()
"""


def test_a_kept_table_whose_run_was_not_closed_is_refused(tmp_path):
    finish(PROGRAM + TRAINED, tmp_path, 1)
    before = contents(tmp_path)
    with pytest.raises(DataError, match=r"status is 'in use' .* ended without closing"):
        open_store(tmp_path, keep=True)
    with pytest.raises(SetupError, match="kept"):
        open_store(tmp_path)
    assert contents(tmp_path) == before


def test_a_run_that_changes_no_row_leaves_a_kept_table_as_it_was(kept):
    folder, (weights, _) = kept
    before = contents(folder)
    finish(PROGRAM + "mover.read(torch.arange(50)).wait(); mover.close()", folder, 1)
    assert contents(folder) == before
    store = open_store(folder, keep=True)
    with pytest.raises(SetupError, match=r"another table \(which has changed no row yet"):
        open_store(folder, keep=True)
    assert torch.equal(store.weights, weights)
    store.lend()
    assert contents(folder) != before
    del store
    with pytest.raises(DataError, match=r"status is 'in use' .* rows may be of different steps"):
        open_store(folder, keep=True)


@pytest.mark.parametrize("ends", ["", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"])
def test_a_new_table_that_nobody_trained_is_made_anew(tmp_path, ends):
    first = "store.lend(); store.weights.fill_(1); mover.close()\n"
    forked.run(command(PROGRAM + first + ends, tmp_path, 1), check=not ends)
    store = open_store(tmp_path, keep=True)
    assert not store.is_kept
    assert not store.weights.any()
    store.close()
    store = open_store(tmp_path, keep=True)
    assert store.is_kept, "closed, it is kept, whoever wrote its rows"
    store.close()


# Kills

WRITING = (
    PROGRAM
    + """
import signal
import torch.distributed.checkpoint as dcp
value = 1.0
def write():
    mover.write(torch.arange(50), torch.full((50, 6), value), torch.full((50,), value))
write()
mover.drain()
dcp.save({"weights": store.weights, "state": store.state}, checkpoint_id=sys.argv[3], no_dist=True)
if sys.argv[4] == "between":
    mover.read(torch.arange(50)).wait()
    print("ready", flush=True)
    signal.pause()
while True:
    value += 1
    write()
    if value == 50:
        print("ready", flush=True)
    if value % 50 == 0:
        mover.drain()
"""
)


@pytest.mark.parametrize("when", ["between", "writing"])
def test_a_killed_run_leaves_its_checkpoint_whole_and_the_next_run_starts(tmp_path, when):
    import torch.distributed.checkpoint as dcp

    process = forked.Program(command(WRITING, tmp_path / "stores", 0, tmp_path / "saved", when))
    assert process.first_line() == "ready\n"
    process.kill()
    process.wait(120)
    assert len(list((tmp_path / "stores").glob("*/*"))) == 3

    store = open_store(tmp_path / "stores")
    assert not store.is_kept
    assert store.weights.count_nonzero() == 0
    dcp.load(
        {"weights": store.weights, "state": store.state},
        checkpoint_id=tmp_path / "saved",
        no_dist=True,
    )
    weights, state = RowMover(store).read(torch.arange(NUM_ROWS)).wait()
    assert torch.equal(weights, torch.ones(NUM_ROWS, DIM))
    assert state is not None
    assert torch.equal(state, torch.ones(NUM_ROWS))
    store.close()
