from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from recd_plugins.runtime.errors import DataError, RecdError
from recd_plugins.runtime.files import (
    check_writable,
    new_file,
    read_note,
    without_remains,
    write_json,
    write_note,
)
from recd_plugins.runtime.folders import LOCK, locked_folder, put, scratch_folder, work_folder


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_permissions_are_those_of_any_new_file(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        write_json(tmp_path / "new" / "report.json", {"rows": 3})
    finally:
        os.umask(before)
    assert (tmp_path / "new" / "report.json").stat().st_mode & 0o777 == mode
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["report.json"]


def test_a_note_is_read_as_it_was_written_or_not_at_all(tmp_path: Path) -> None:
    path, value = tmp_path / "note.json", {"rows": [1, 2], "share": 0.1, "name": "ä"}
    assert read_note(path) is None
    write_note(path, value)
    assert read_note(path) == value
    written = path.read_bytes()
    for other in (b"", b"[]", b"\xff", b"[" * 100_000, written[:-9], written.replace(b"1,", b"3,")):
        path.write_bytes(other)
        assert read_note(path) is None


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    link, target = tmp_path / "report.json", tmp_path / "elsewhere" / "r.json"
    link.symlink_to(target)
    for value in ({"rows": 3}, {"rows": 4}):  # the target is missing, then there
        check_writable(link)
        write_json(link, value)
        assert link.is_symlink()
        assert json.loads(target.read_text()) == value
    assert [path.name for path in target.parent.iterdir()] == ["r.json"]


def test_a_file_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def fail(path: Path, *others: Path) -> None:
        with without_remains(path) as token, new_file(path) as temporary:
            for each in (temporary, path.with_name(f".{path.name}.{token}"), *others):
                each.touch()
            raise KeyError

    (tmp_path / "there").mkdir()
    with pytest.raises(KeyError):
        fail(tmp_path / "there" / "file")
    with pytest.raises(KeyError):
        fail(tmp_path / "new" / "er" / "file", tmp_path / "new" / "another's")
    found = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))
    assert found[:2] == ["new", "new/another's"]
    assert "there" in found
    assert not list((tmp_path / "there").iterdir())


def test_a_place_is_tried_and_nothing_left_there(tmp_path: Path) -> None:
    (tmp_path / "report").mkdir()
    (tmp_path / "file").touch()
    check_writable(tmp_path / "new" / "folder" / "report.json")
    check_writable(tmp_path / "file")
    for place, why in (("report", "the path is a directory"), ("file/report", "Not a directory")):
        with pytest.raises(RecdError, match=rf"{place}: the file cannot be written \({why}\)"):
            check_writable(tmp_path / place)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "report"]


def test_a_file_that_another_program_wrote_meanwhile_stays(tmp_path: Path) -> None:
    path = tmp_path / "scores.csv"
    told = pytest.raises(RecdError, match="another program wrote this file")
    with told, new_file(path, replaces=False) as temporary:
        temporary.write_text("mine")
        path.write_text("theirs")
    assert path.read_text() == "theirs"
    assert list(tmp_path.iterdir()) == [path]


# Holds the lock, and has a child that it forked sleep on after it is killed.
HOLDER = """
import os, sys, time
from pathlib import Path
from recd_plugins.runtime.folders import locked_folder
with locked_folder(Path(sys.argv[1])):
    heard, said = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(1)
        os.write(said, b".")
        time.sleep(120)
    os.read(heard, 1)  # the child has run its hooks
    print(child, flush=True)
    sys.stdin.read()
"""


def test_who_holds_it_is_named_and_a_kill_frees_it(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    child = int(holder.stdout.readline())
    try:
        told = rf"process {holder.pid} on {re.escape(socket.gethostname())} \(since 20\d\d-.* UTC"
        with pytest.raises(RecdError, match=told), locked_folder(tmp_path):
            pass
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        os.kill(child, 0)  # still there, and it has no handle
        with locked_folder(tmp_path) as works:
            assert works
            (tmp_path / LOCK).read_bytes()  # closing it must not free the lock, as POSIX locks are
            with pytest.raises(RecdError, match="is writing to this"), locked_folder(tmp_path):
                pass
    finally:
        os.kill(child, signal.SIGKILL)
    assert not (tmp_path / LOCK).exists()


def made_by(name: str, target: Path, waiting: threading.Event) -> str:
    """Return the maker of the target, after waiting for another one."""
    with work_folder(target, "test", {}, lambda _: None, waits=waiting.set) as work:
        if not target.exists():
            work.table.mkdir()
            (work.table / "maker").write_text(name)
            work.publish(target)
    return (target / "maker").read_text()


@pytest.mark.parametrize("fails", [False, True])
def test_another_is_waited_for(tmp_path: Path, fails: bool) -> None:
    target, waiting = tmp_path / "made", threading.Event()
    with ThreadPoolExecutor() as threads:
        try:
            with work_folder(target, "test", {}, lambda _: None) as work:
                second = threads.submit(made_by, "second", target, waiting)
                assert waiting.wait(10)
                assert not second.done()
                refused = pytest.raises(RecdError, match="is writing to this")
                with refused, work_folder(target, "test", {}, lambda _: None):
                    pass
                if fails:
                    raise DataError("a value is wrong")
                work.table.mkdir()
                (work.table / "maker").write_text("first")
                work.publish(target)
        except DataError:
            assert fails
        assert second.result(10) == ("second" if fails else "first")
    assert [each.name for each in tmp_path.iterdir()] == ["made"]


def published(target: Path, meanwhile: str = "") -> bool:
    """Make a target; return whether earlier work was resumed."""
    with work_folder(target, "test", {}, lambda _: None) as work:
        if not work.resumed:
            work.table.mkdir()
            (work.table / "maker").touch()
        if meanwhile:
            target.write_text(meanwhile)
        work.publish(target)
    return work.resumed


def test_a_table_that_cannot_be_put_in_its_place_stays(tmp_path: Path) -> None:
    target = tmp_path / "made"
    with pytest.raises(DataError, match=r"table is in .*/\.made\.test/table"):
        published(target, meanwhile="what another program wrote")
    target.unlink()
    assert published(target), "the next run goes on from it"
    assert (target / "maker").exists()
    assert [each.name for each in tmp_path.iterdir()] == ["made"]


def test_a_scratch_folder_replaces_a_folder_and_is_gone(tmp_path: Path) -> None:
    target = tmp_path / "made"
    target.mkdir()
    left = tmp_path / ".made.new"  # of a killed process, which was replacing the target
    left.mkdir()
    target.rename(left / "old")
    (left / "half").touch()
    with suppress(KeyError), scratch_folder(target) as scratch:
        assert target.is_dir(), "it is put back"
        assert not (scratch / "half").exists()
        (scratch / "half").touch()
        raise KeyError
    with scratch_folder(target) as scratch:
        (scratch / "table").mkdir()
        (scratch / "table" / "maker").touch()
        put(scratch / "table", target, scratch)
    assert (target / "maker").exists()
    assert [each.name for each in tmp_path.iterdir()] == ["made"]


def test_a_stream_stays_and_gets_the_content(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path; from recd_plugins.runtime.files import write_text\n"
        "print('before'); write_text(Path('/dev/stdout'), 'written\\n'); print('after')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["before", "written", "after"]
    with (tmp_path / "file").open("wb") as file:
        subprocess.run([sys.executable, "-c", code], stdout=file, check=True)
    assert "written" in (tmp_path / "file").read_text()
