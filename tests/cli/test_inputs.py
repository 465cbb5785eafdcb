"""Every command that reads a file or folder, with what is none, or cannot be read: no traceback."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.commands import invoke, recd

#: Arguments of commands; IN is what is read, OUT a place to write.
COMMANDS = [
    "analyze IN",
    "cluster IN OUT --memory 1500MB",
    "convert-layout IN OUT --layout list_dict",
    "logs write IN OUT --shards 2",
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
    data = table()
    pq.write_table(data.append_column("session_id", data["session_id"]), path)


KINDS: dict[str, Callable[[Path], object]] = {
    "a folder": Path.mkdir,
    "empty": Path.touch,
    "text": lambda path: path.write_text("hello\nworld\n"),
    "bytes": lambda path: path.write_bytes(bytes(range(256)) * 9),
    "truncated": truncated,
    "a column twice": double,
    "a link to nothing": lambda path: path.symlink_to("nothing"),
    "below a file": lambda path: path.parent.touch(),
    "missing": lambda path: None,
}
#: What the commands take all the same.
TAKEN = {("--plugins-dir IN plugins", "a folder"), ("logs read log OUT --offsets IN", "missing")}


@pytest.fixture(scope="module")
def log(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    pq.write_table(table(), folder / "rows.parquet")
    log = folder / "log"
    recd("logs", "write", folder / "rows.parquet", log)
    return log


@pytest.mark.parametrize("kind", KINDS)
def test_what_cannot_be_read_is_refused(cwd, log, kind):
    name = "file/in.parquet" if kind == "below a file" else "in.parquet"
    KINDS[kind](cwd / name)
    Path("of_it.yaml").write_text(
        f"version: 1\ndataset: {{use: recd.session_parquet, options: {{path: {name}}}}}\n"
        "converter: {use: recd.kjt}\n"
    )
    shutil.copytree(log, "log")
    there = sorted(os.listdir())
    for command in COMMANDS:
        words = [{"IN": name, "OUT": "out"}.get(word, word) for word in command.split()]
        result = invoke(*words)
        assert (not result.exit_code) == ((command, kind) in TAKEN), (command, result.output)
        if result.exit_code:
            assert "in.parquet" in result.stderr, (command, result.output)
        if not result.exit_code and Path("out").exists():
            Path("out").unlink()
            Path(name).unlink(missing_ok=True)
        assert sorted(os.listdir()) == there, command
