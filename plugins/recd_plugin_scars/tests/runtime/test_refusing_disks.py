"""Tables in files on disks that are full, limited or none, and files that are cut."""

import subprocess
from pathlib import Path

import pytest
import torch

from recd_plugin_scars.runtime.mover import RowMover
from recd_plugin_scars.tests.runtime.mapped_file_cases import (
    contents,
    finish,
    open_store,
    truncate,
)
from recd_plugins.errors import RecdError, SetupError

LIMITED = """
import json, resource, sys, torch
from pathlib import Path
from recd_plugin_scars.runtime.mapped_file import FileStore
from recd_plugin_scars.runtime.mover import RowMover
from recd_plugins.errors import RecdError

def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

folder = Path(sys.argv[1])
def make():
    return FileStore(folder, keep=False, name="t", num_rows=50, dim=1024, with_state=True)
"""


def test_files_that_may_not_be_so_large_are_not_made(tmp_path):
    (tmp_path / "other").write_text("mine")
    out = finish(
        LIMITED
        + """
limit(100_000)
try:
    make()
except RecdError as error:
    print(type(error).__name__, error)
""",
        tmp_path,
    )
    assert out.startswith(
        f"SetupError {tmp_path / 't.store'}: no room for 50 rows (File too large)"
    )
    assert "205,000 bytes are needed" in out
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def test_a_write_that_the_disk_refuses_is_told_by_the_next_call(tmp_path):
    out = finish(
        LIMITED
        + """
mover = RowMover(make())
limit(40 * 4096 + 7)
mover.write(torch.tensor([4, 40, 5, 49]), torch.ones(4, 1024), torch.ones(4))
for call in (mover.drain, lambda: mover.read(torch.tensor([1])), mover.close):
    try:
        call()
        print("no error")
    except RecdError as error:
        print(error)
limit(resource.RLIM_INFINITY)
""",
        tmp_path,
    )
    message = (
        f"{tmp_path / 't.store' / 'weights'}: row 40 (of 4 rows from 4 to 49) could not be written "
        "(7 of 4096 bytes)"
    )
    assert out.splitlines() == [message, message, "no error"]


def test_a_full_disk_is_told_with_the_bytes_that_are_missing(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no file system may be mounted here")
    try:
        (disk / "other").write_text("mine")
        store = open_store(disk, name="small")
        with pytest.raises(
            SetupError,
            match=r"2,800,000 bytes are needed, 1,0\d\d,\d{3} are free; 1,7\d\d,\d{3} .*missing",
        ):
            open_store(disk, num_rows=100_000)
        assert sorted(path.name for path in disk.iterdir()) == ["other", "small.store"]
        store.close()
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_a_file_cut_while_it_is_in_use_is_told(tmp_path):
    store = open_store(tmp_path)
    mover = RowMover(store)
    truncate(tmp_path)
    with pytest.raises(RecdError, match=r"weights: row 49 .* could not be read \(23 of 24 bytes\)"):
        mover.read(torch.tensor([49, 3])).wait()
    store.close()


@pytest.mark.parametrize("place", ["a file", "below a file"])
def test_a_folder_that_cannot_be_is_refused(tmp_path, place):
    (tmp_path / "file").write_text("mine")
    folder = tmp_path / "file"
    with pytest.raises(SetupError, match="cannot hold a table"):
        open_store(folder if place == "a file" else folder / "below")
    assert contents(tmp_path) == {Path("file"): b"mine"}
