"""Every command that reads a file or folder, with what is none, or cannot be read: no traceback."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from recd_plugins.cli import main

#: Arguments of commands; IN is what is read, OUT a place to write.
COMMANDS = [
    "analyze IN",
    "cluster IN OUT --memory 1500MB",
    "convert-layout IN OUT --layout list_dict",
    "logs write IN OUT --shards 2",
    "logs stat IN",
    "logs read IN OUT",
    "logs read log OUT --offsets IN",
    "criteo convert IN OUT",
    "trace profile IN --output OUT",
    "trace generate IN --output OUT",
    "profile show IN",
    "profile merge IN IN --output OUT",
    "validate IN",
    "analyze of_it.yaml",
    "--plugins-dir IN plugins",
]


def table() -> pa.Table:
    return pa.table({"session_id": [1, 1], "ts": [1, 2], "label": [0, 1], "a": [[1], [2, 3]]})


def truncated(path: Path) -> None:
    pq.write_table(table(), path)
    os.truncate(path, path.stat().st_size // 2)


def double(path: Path) -> None:
    columns = table().columns
    names = table().column_names
    pq.write_table(pa.table([*columns, columns[0]], names=[*names, names[0]]), path)


def broken_lists(path: Path) -> None:
    field = pa.field("a", pa.binary(), metadata={b"recd.layout": b"list_dict"})
    pq.write_table(table().set_column(3, field, pa.array([b"7 bytes", b""])), path)


def folder_with_a_link_to_nothing(path: Path) -> None:
    path.mkdir()
    pq.write_table(table(), path / "a.parquet")
    (path / "b.parquet").symlink_to("nothing")


KINDS: dict[str, Callable[[Path], object]] = {
    "a folder": Path.mkdir,
    "empty": Path.touch,
    "text": lambda path: path.write_text("hello\nworld\n"),
    "bytes": lambda path: path.write_bytes(bytes(range(256)) * 9),
    "truncated": truncated,
    "a column twice": double,
    "broken lists": broken_lists,
    "a link to nothing": lambda path: path.symlink_to("nothing"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a pipe": os.mkfifo,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a folder with a link to nothing": folder_with_a_link_to_nothing,
    "below a file": lambda path: path.parent.touch(),
    "missing": lambda path: None,
}
#: What the commands take all the same.
TAKEN = {
    ("--plugins-dir IN plugins", "a folder"),
    ("--plugins-dir IN plugins", "a folder with a link to nothing"),
    ("logs read log OUT --offsets IN", "missing"),
}


@pytest.fixture(scope="module")
def log(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    pq.write_table(table(), folder / "rows.parquet")
    log = folder / "log"
    result = CliRunner().invoke(main, ["logs", "write", str(folder / "rows.parquet"), str(log)])
    assert result.exit_code == 0, result.output
    return log


@pytest.mark.parametrize("kind", KINDS)
def test_what_cannot_be_read_is_refused(tmp_path, monkeypatch, log, kind):
    monkeypatch.chdir(tmp_path)
    name = "file/in.parquet" if kind == "below a file" else "in.parquet"
    KINDS[kind](tmp_path / name)
    Path("of_it.yaml").write_text(
        f"version: 1\ndataset: {{use: recd.session_parquet, options: {{path: {name}}}}}\n"
        "converter: {use: recd.kjt}\n"
    )
    shutil.copytree(log, "log")
    there = sorted(os.listdir())
    for command in COMMANDS:
        words = [{"IN": name, "OUT": "out"}.get(word, word) for word in command.split()]
        result = CliRunner().invoke(main, words)
        failed = not isinstance(result.exception, SystemExit | None)
        assert not failed, (command, repr(result.exception))
        assert (not result.exit_code) == ((command, kind) in TAKEN), (command, result.output)
        if result.exit_code:
            assert "in.parquet" in result.stderr, (command, result.output)
        if not result.exit_code and Path("out").exists():
            Path("out").unlink()
            Path(name).unlink(missing_ok=True)
        assert sorted(os.listdir()) == there, command


@pytest.mark.parametrize("words", [["analyze"], ["logs", "stat"], ["profile", "show"]])
def test_a_name_that_is_not_utf8(tmp_path, monkeypatch, log, words):
    monkeypatch.chdir(tmp_path)
    name = os.fsdecode(b"caf\xe9.parquet")
    pq.write_table(table(), "in.parquet")
    os.rename("in.parquet", name)
    result = CliRunner().invoke(main, [*words, name])
    assert isinstance(result.exception, SystemExit), repr(result.exception)
    assert b"caf\xe9.parquet" in result.stderr_bytes
    shutil.copytree(log, os.fsdecode(b"log\xe9"))
    result = CliRunner().invoke(main, ["logs", "stat", os.fsdecode(b"log\xe9")])
    assert result.exit_code == 0, repr(result.exception)
    assert b"log\xe9: 2 records" in result.stdout_bytes


@pytest.mark.parametrize("command", COMMANDS[:-2])
def test_a_name_that_is_too_long(tmp_path, monkeypatch, log, command):
    monkeypatch.chdir(tmp_path)
    words = [{"IN": "x" * 300, "OUT": "out", "log": str(log)}.get(w, w) for w in command.split()]
    result = CliRunner().invoke(main, words)
    assert isinstance(result.exception, SystemExit), repr(result.exception)
    assert "File name too long" in result.stderr or "no such file" in result.stderr
