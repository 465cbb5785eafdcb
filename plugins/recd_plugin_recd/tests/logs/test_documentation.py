"""docs/commands/logs.md: its examples run, and its format is the format."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shlex
import struct
import zlib
from pathlib import Path

import pyarrow as pa
import zstandard
from click.testing import CliRunner

from recd_plugin_recd.logs.commands import logs
from recd_plugin_recd.tests.logs.tables import rows, write
from recd_plugins.cli import main

PAGE = (Path(__file__).parents[4] / "docs" / "commands" / "logs.md").read_text()


def blocks_of(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", PAGE, flags=re.DOTALL)


def test_the_commands_run_and_print_what_the_page_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for example in blocks_of("console")[0].split("$ ")[1:]:
        command, _, output = example.partition("\n")
        result = CliRunner().invoke(main, shlex.split(command)[1:])
        assert result.exit_code == 0, result.output
        # Sizes are those of a version of zstd.
        assert re.sub(r"[\d.]+(?= MB|x)", "", result.stdout) == re.sub(
            r"[\d.]+(?= MB|x)", "", output
        )


def test_the_program_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (program,) = blocks_of("python")
    exec(compile(program, "logs.md", "exec"), {})


def test_the_page_names_every_option():
    usage = re.search(r"^    recd logs write(.*?)\n\n", PAGE, re.MULTILINE | re.DOTALL)
    assert usage
    for name, command in logs.commands.items():
        assert f"recd logs {name} " in usage[0]
        for parameter in command.params:
            assert all(option in usage[0] for option in parameter.opts if option.startswith("--"))


def parse(data: bytes):
    """A shard, read with nothing but what the page says: header, and records of each block."""
    magic, size, crc = struct.unpack_from("<8sII", data)
    text = data[16 : 16 + size]
    assert magic == b"RECDLOG\x01"
    assert crc == zlib.crc32(data[8:12] + text)
    assert data[: 16 + size] == data[16 + size : 2 * (16 + size)]
    header = json.loads(text)
    at, found = 2 * (16 + size), []
    while at < len(data):
        block = struct.unpack_from("<16sQIIIII", data, at)
        sync, first, records, raw, stored, crc, header_crc = block
        payload = data[at + 44 : at + 44 + stored]
        assert sync.hex() == header["sync"]
        assert header_crc == zlib.crc32(data[at : at + 40])
        assert crc == zlib.crc32(payload)
        plain = zstandard.decompress(payload)
        assert len(plain) == raw
        found.append((first, records, plain))
        at += 44 + stored
    return header, found


def sample(data: bytes) -> dict:
    """A row of the columns of ``tables.SCHEMA``: int64, int32, float32, list<int64>."""
    null, session, row, score, items = struct.unpack_from("<BqifI", data)
    assert null == 0
    return {
        "session_id": session,
        "row": row,
        "score": score,
        "items": list(struct.unpack_from(f"<{items}q", data, 21)),
    }


def hash_of(session: int) -> int:
    state = (session + 0x9E3779B97F4A7C15) % 2**64
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    state = (state ^ state >> 27) * 0x94D049BB133111EB % 2**64
    return state ^ state >> 31


def test_samples_are_as_the_page_says(tmp_path):
    write(tmp_path / "log", rows(200), num_shards=3, block_size=900)
    seen = []
    for number in range(3):
        path = tmp_path / "log" / f"shard-{number:05d}-of-00003.recdlog"
        header, blocks = parse(path.read_bytes())
        assert (header["record"], header["key"], header["session"]) == (
            "sample", "session", "session_id",
        )  # fmt: skip
        assert (header["shard"], header["num_shards"]) == (number, 3)
        schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(header["schema"])))
        assert schema.equals(rows(1).schema)
        expected = 0
        for first, records, plain in blocks:
            assert first == expected
            expected += records
            sizes = struct.unpack_from(f"<{records}I", plain)
            at = 4 * records
            for size in sizes:
                seen.append(sample(plain[at : at + size]))
                assert hash_of(seen[-1]["session_id"]) % 3 == number
                at += size
            assert at == len(plain)
    assert sorted(seen, key=lambda row: row["row"]) == rows(200).to_pylist()


def test_the_manifest_is_as_the_page_says(tmp_path):
    write(tmp_path / "log", rows(200), num_shards=2, block_size=900)
    manifest = json.loads((tmp_path / "log" / "manifest.json").read_text())
    assert manifest["version"] == 1
    for name, said in manifest["shards"].items():
        data = (tmp_path / "log" / name).read_bytes()
        header, blocks = parse(data)
        sync = bytes.fromhex(header["sync"])
        digest, at = hashlib.sha256(sync), data.index(sync)
        for _ in blocks:
            digest = hashlib.sha256(digest.digest() + data[at : at + 44])
            at += 44 + struct.unpack_from("<I", data, at + 32)[0]
        assert said == {
            "log": header["sync"],
            "bytes": len(data),
            "records": blocks[-1][0] + blocks[-1][1],
            "digest": digest.hexdigest(),
        }


def test_batches_and_strings_are_as_the_page_says(tmp_path):
    names = [f"user {i % 7}" for i in range(50)]
    batch = pa.record_batch([pa.array(names)], names=["session_id"])
    write(tmp_path / "log", batch, num_shards=2, record="batch")
    for number in range(2):
        path = tmp_path / "log" / f"shard-{number:05d}-of-00002.recdlog"
        ((_, records, plain),) = parse(path.read_bytes())[1]
        found = pa.ipc.open_stream(plain).read_all()["session_id"].to_pylist()
        assert len(found) == records
        for name in found:
            digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
            assert int.from_bytes(digest, "little") % 2 == number
