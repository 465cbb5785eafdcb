"""Files are whole or not there, and anybody may read them whom the umask lets."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from recd_plugins.runtime.errors import RecdError
from recd_plugins.runtime.files import (
    check_writable,
    new_file,
    read_note,
    without_remains,
    write_json,
    write_note,
)


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_permissions_are_those_of_any_new_file(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        write_json(tmp_path / "new" / "report.json", {"rows": 3})
    finally:
        os.umask(before)
    assert (tmp_path / "new" / "report.json").stat().st_mode & 0o777 == mode
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["report.json"]


def test_a_note_is_read_as_it_was_written_or_not_at_all(tmp_path):
    path, value = tmp_path / "note.json", {"rows": [1, 2], "share": 0.1, "name": "ä"}
    assert read_note(path) is None
    write_note(path, value)
    assert read_note(path) == value
    written = path.read_bytes()
    others = [b"", b"[]", b"\xff", b"[" * 100_000, written[:-9], written.replace(b"1,", b"3,")]
    for other in others:
        path.write_bytes(other)
        assert read_note(path) is None


def test_a_link_stays_one(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    link, target = tmp_path / "report.json", tmp_path / "elsewhere" / "r.json"
    link.symlink_to(target)
    for value in ({"rows": 3}, {"rows": 4}):  # of a file that is not there yet, and of one that is
        check_writable(link)
        write_json(link, value)
        assert link.is_symlink()
        assert json.loads(target.read_text()) == value
    assert [path.name for path in target.parent.iterdir()] == ["r.json"]
    assert [path.name for path in target.parent.iterdir()] == ["r.json"]


def test_folders_that_were_made_for_a_file_that_fails_are_gone(tmp_path):
    def fail(path, *others):
        with new_file(path) as temporary:
            for each in (temporary, *others):
                each.touch()
            raise KeyError

    (tmp_path / "there").mkdir()
    with pytest.raises(KeyError):
        fail(tmp_path / "there" / "new" / "er" / "file")
    with pytest.raises(KeyError):
        fail(tmp_path / "new" / "er" / "file", tmp_path / "new" / "another's")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "there"]
    assert not list((tmp_path / "there").iterdir())
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["another's"]


def test_a_place_is_tried_and_nothing_left_there(tmp_path):
    (tmp_path / "report").mkdir()
    (tmp_path / "file").touch()
    check_writable(tmp_path / "new" / "folder" / "report.json")
    check_writable(tmp_path / "file")
    with pytest.raises(RecdError, match=r"report: cannot be written \(a directory\)"):
        check_writable(tmp_path / "report")
    with pytest.raises(RecdError, match=r"file/report: cannot be written \(Not a directory\)"):
        check_writable(tmp_path / "file" / "report")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "report"]


def test_what_another_program_wrote_meanwhile_stays(tmp_path):
    path = tmp_path / "scores.csv"

    def write() -> None:
        with new_file(path, replaces=False) as temporary:
            temporary.write_text("mine")
            path.write_text("theirs")

    with pytest.raises(RecdError, match="another program has written it meanwhile; it stays"):
        write()
    assert path.read_text() == "theirs"
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_left_where_all_was_killed_is_removed_by_the_next(tmp_path: Path) -> None:
    path = tmp_path / "scores[1].csv"
    mine = tmp_path / ".scores[1].csv.backup"
    mine.write_text("a user's own")
    code = (
        "import sys, time; from pathlib import Path\n"
        "from recd_plugins.runtime.files import new_file, without_remains\n"
        "path = Path(sys.argv[1])\n"
        "with without_remains(path) as token, new_file(path, token=token) as part:\n"
        "    part.write_text('half'); print(part.name, flush=True); time.sleep(600)"
    )
    writers = [
        subprocess.Popen([sys.executable, "-c", code, path], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    killed, living = (str(writer.stdout.readline()).strip() for writer in writers if writer.stdout)
    try:
        writers[0].kill()
        writers[0].communicate()
        assert {each.name for each in tmp_path.iterdir()} == {mine.name, killed, living}
        with without_remains(path):
            assert {each.name for each in tmp_path.iterdir()} == {mine.name, living}
    finally:
        writers[1].kill()
        writers[1].communicate()
