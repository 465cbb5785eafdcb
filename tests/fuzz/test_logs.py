"""Log shards that are damaged, mixed up, or read with offsets that somebody changed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from tests.fuzz import tables
from tests.fuzz.cases import Case, Kinds
from tests.fuzz.oracle import Outcome, recd, wrong

KINDS = Kinds("logs")
SHARDS = 3


def write_log(
    case: Case, folder: str = "log", *, seed: int = 0, shards: int = SHARDS, rows: int = 120
) -> list[Path]:
    """A log whose shards have some blocks each; its shards."""
    tables.write(f"{folder}.parquet", tables.table(tables.rows(rows, seed)))
    record = case.one_of(["sample", "batch"], "record")
    options = ("--shards", shards, "--block-size", 0.001, "--record", record)
    done = recd("logs", "write", f"{folder}.parquet", folder, *options)
    assert done.ok, done.output
    return shards_of(folder)


def shards_of(folder: str) -> list[Path]:
    return sorted(Path(folder).glob("*.recdlog"))


def judge(*, meant: int = 1, same: bool = False, folder: str = "log") -> Outcome:
    """What is read is what was written, or less with a word about it; ``stat`` agrees.

    Args:
        meant: how often the rows of ``folder.parquet`` were written.
        same: nothing is lost.
    """
    expected = tables.counted(tables.rows_in(f"{folder}.parquet") * meant)
    stat = recd("logs", "stat", folder)
    done = recd("logs", "read", folder, "back.parquet", leaves=["back.parquet"])
    found = tables.counted(tables.rows_in("back.parquet") if os.path.exists("back.parquet") else [])
    if found - expected:
        wrong(f"{done}: rows that nobody wrote, or twice: {found - expected}; {done.output}")
    if done.ok and found != expected:
        wrong(f"{done}: {(expected - found).total()} rows are missing, and it succeeded")
    if done.ok != stat.ok:
        wrong(f"{done} and stat do not agree: {done.output} / {stat.output}")
    if done.ok:
        return Outcome.RIGHT
    if same:
        wrong(f"{done} failed on a whole log: {done.output}")
    return done.refused("log")


def damage(case: Case, change: Callable[[bytes], bytes]) -> Outcome:
    path = case.one_of(write_log(case), "shard")
    path.write_bytes(change(path.read_bytes()))
    return judge()


@KINDS.add
def flipped_bits(case: Case) -> Outcome:
    def flip(data: bytes) -> bytes:
        changed = bytearray(data)
        for _ in range(case.number(1, 3, "flips")):
            changed[case.number(0, len(data) - 1, "byte")] ^= 1 << case.number(0, 7, "bit")
        return bytes(changed)

    return damage(case, flip)


@KINDS.add
def cut_anywhere(case: Case) -> Outcome:
    return damage(case, lambda data: data[: case.number(0, len(data) - 1, "bytes")])


@KINDS.add
def bytes_behind(case: Case) -> Outcome:
    more = case.draw(st.binary(min_size=1, max_size=99), "bytes")
    return damage(case, lambda data: data + more)


@KINDS.add
def bytes_in_front(case: Case) -> Outcome:
    more = case.draw(st.binary(min_size=1, max_size=99), "bytes")
    return damage(case, lambda data: more + data)


@KINDS.add
def zeros_in_it(case: Case) -> Outcome:
    def zero(data: bytes) -> bytes:
        at, count = case.number(0, len(data) - 1, "at"), case.number(1, 600, "bytes")
        return data[:at] + bytes(min(count, len(data) - at)) + data[at + count :]

    return damage(case, zero)


def blocks(data: bytes) -> list[bytes]:
    """The header of a shard and then its blocks, cut where the 16 bytes stand that mark one."""
    text = data[16 : 16 + int.from_bytes(data[8:12], "little")]
    sync = bytes.fromhex(json.loads(text)["sync"])
    head, *rest = data.split(sync)
    return [head, *(sync + block for block in rest)]


@KINDS.add
def blocks_in_another_order(case: Case) -> Outcome:
    def change(data: bytes) -> bytes:
        head, *rest = blocks(data)
        return b"".join([head, *case.draw(st.permutations(rest), "order")])

    return damage(case, change)


@KINDS.add
def a_block_twice(case: Case) -> Outcome:
    def change(data: bytes) -> bytes:
        parts = blocks(data)
        at, to = case.number(1, len(parts) - 1, "block"), case.number(1, len(parts), "to")
        return b"".join([*parts[:to], parts[at], *parts[to:]])

    return damage(case, change)


@KINDS.add
def a_block_left_out(case: Case) -> Outcome:
    def change(data: bytes) -> bytes:
        parts = blocks(data)
        del parts[case.number(1, len(parts) - 1, "block")]
        return b"".join(parts)

    return damage(case, change)


@KINDS.add
def a_block_of_another_shard(case: Case) -> Outcome:
    one, two, _ = write_log(case)
    mine, others = blocks(one.read_bytes()), blocks(two.read_bytes())
    at = case.number(1, len(mine) - 1, "block")
    other = others[case.number(1, len(others) - 1, "other")]
    if case.draw(st.booleans(), "with the mark of this shard"):
        other = mine[1][:16] + other[16:]
    mine[at] = other
    one.write_bytes(b"".join(mine))
    return judge()


@KINDS.add
def the_header_of_another_shard(case: Case) -> Outcome:
    one, two, _ = write_log(case)
    one.write_bytes(b"".join([blocks(two.read_bytes())[0], *blocks(one.read_bytes())[1:]]))
    return judge()


@KINDS.add
def text_of_the_header(case: Case) -> Outcome:
    """Fields that say something else, with checksums that are right."""
    import struct
    import zlib

    def change(data: bytes) -> bytes:
        head, *rest = blocks(data)
        said = json.loads(head[16 : 16 + int.from_bytes(head[8:12], "little")])
        field = case.one_of(list(said), "field")
        said[field] = case.one_of(
            [
                None,
                -1,
                0,
                1,
                2,
                99,
                1.5,
                True,
                "",
                "sample",
                "batch",
                "message",
                "ts",
                [],
                {},
                "00" * 16,
                "AAAA",
            ],
            "value",
        )
        text = json.dumps(said).encode()
        size = len(text).to_bytes(4, "little")
        one = struct.pack("<8sII", head[:8], len(text), zlib.crc32(size + text)) + text
        return b"".join([one, one, *rest])

    return damage(case, change)


@KINDS.add
def shards_swapped(case: Case) -> Outcome:
    one, two, _ = write_log(case)
    content = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(content)
    return judge()


@KINDS.add
def a_shard_by_another_name(case: Case) -> Outcome:
    shards = write_log(case)
    name = case.one_of(
        [
            "shard-00000-of-00004",
            "shard-00003-of-00003",
            "shard-00002-of-00002",
            "shard-1-of-3",
            "x",
            "shard-00001-of-00003.bak",
            "SHARD-00001-OF-00003",
        ]
    )
    case.one_of(shards, "shard").rename(f"log/{name}.recdlog")
    return judge()


@KINDS.add
def a_shard_removed(case: Case) -> Outcome:
    case.one_of(write_log(case), "shard").unlink()
    return judge()


@KINDS.add
def a_shard_more(case: Case) -> Outcome:
    shards = write_log(case)
    name = case.one_of(["shard-00003-of-00003", "shard-00000-of-00001", "copy"], "name")
    shutil.copyfile(case.one_of(shards, "of"), f"log/{name}.recdlog")
    return judge()


@KINDS.add
def a_shard_of_another_log(case: Case) -> Outcome:
    """With the same columns, or with others."""
    one = case.one_of(write_log(case), "shard")
    if case.draw(st.booleans(), "other columns"):
        tables.write("other.parquet", tables.table(tables.rows(120, 1)).drop_columns("price"))
        assert recd("logs", "write", "other.parquet", "other", "--shards", SHARDS).ok
        other = shards_of("other")
    else:
        other = write_log(case, "other", seed=1)
    shutil.copyfile(other[case.number(0, 2, "of")], one)
    return judge()


@KINDS.add
def an_earlier_state_of_a_shard(case: Case) -> Outcome:
    """As a backup would put it back."""
    shards = write_log(case)
    case_of = case.number(0, 2, "shard")
    before = shards[case_of].read_bytes()
    assert recd("logs", "write", "log.parquet", "log", "--append").ok
    shards[case_of].write_bytes(before)
    return judge(meant=2)


@KINDS.add
def an_empty_shard(case: Case) -> Outcome:
    return damage(case, lambda data: b"")


@KINDS.add
def files_that_are_no_shards(case: Case) -> Outcome:
    write_log(case)
    name = case.one_of(["README", "shard-00000-of-00003.recdlog.tmp", ".hidden", "_SUCCESS"])
    Path("log", name).write_bytes(case.draw(st.binary(max_size=20), "content"))
    return judge(same=True)


@KINDS.add
def shards_that_are_no_files(case: Case) -> Outcome:
    path = case.one_of(write_log(case), "shard")
    path.unlink()
    what = case.one_of(["folder", "dangling", "device", "loop"], "what")
    if what == "folder":
        path.mkdir()
    else:
        to = {"dangling": "nowhere", "device": "/dev/null", "loop": path.name}[what]
        path.symlink_to(to)
    return judge()


@KINDS.add
def no_log_at_all(case: Case) -> Outcome:
    tables.write_two()
    Path("empty").mkdir()
    Path("file").write_bytes(case.draw(st.binary(max_size=30), "content"))
    path = case.one_of(["table", "empty", "file", "nowhere", "table/a.parquet", "file/x"], "path")
    commands: list[tuple[Any, ...]] = [("stat", path), ("read", path, "back.parquet")]
    return recd("logs", *case.one_of(commands, "command")).refused(path)


@KINDS.add
def other_files_of_the_folder_damaged(case: Case) -> Outcome:
    """Whatever a log keeps beside its shards."""
    write_log(case)
    others = [path for path in Path("log").iterdir() if path.suffix != ".recdlog"]
    if not others:
        return judge(same=True)
    path = case.one_of(sorted(others), "file")
    data = path.read_bytes()
    how = case.one_of(["gone", "empty", "cut", "flip", "of another log", "deep"], "how")
    if how == "gone":
        path.unlink()
    elif how == "of another log":
        write_log(case, "other", seed=1)
        shutil.copyfile(Path("other", path.name), path)
    elif how == "flip" and data:
        changed = bytearray(data)
        changed[case.number(0, len(data) - 1, "byte")] ^= 1 << case.number(0, 7, "bit")
        path.write_bytes(changed)
    else:
        path.write_bytes(
            {"empty": b"", "deep": b"[" * 100_000}.get(how, data[: max(0, len(data) - 5)])
        )
    return judge()


@KINDS.add
def appended_after_damage(case: Case) -> Outcome:
    """Rows that are added to a damaged log are all there, and of those before no more is lost."""
    path = case.one_of(write_log(case), "shard")
    data = bytearray(path.read_bytes())
    if case.draw(st.booleans(), "cut"):
        del data[case.number(1, len(data) - 1, "bytes") :]
    else:
        data[case.number(0, len(data) - 1, "byte")] ^= 1 << case.number(0, 7, "bit")
    path.write_bytes(data)
    done = recd("logs", "write", "log.parquet", "log", "--append", leaves=["log"])
    return judge(meant=2 if done.ok else 1)


@KINDS.add
def offsets_that_were_changed(case: Case) -> Outcome:
    """Of what is new since these offsets nothing is invented and nothing comes twice."""
    write_log(case)
    assert recd("logs", "read", "log", "one.parquet", "--offsets", "offsets.json").ok
    said = json.loads(Path("offsets.json").read_text(encoding="utf-8"))
    shard = case.one_of(sorted(said["shards"]), "shard")
    field = case.one_of([*said["shards"][shard], "new"], "field")
    value = case.one_of([None, -1, 0, 1, 7, 1 << 40, 1 << 70, 1.5, True, "", "x", [], {}], "value")
    how = case.one_of(["value", "shard gone", "file gone", "text", "swapped"], "how")
    if how == "value":
        said["shards"][shard][field] = value
    elif how == "shard gone":
        del said["shards"][shard]
    elif how == "swapped":
        names = sorted(said["shards"])
        said["shards"] = dict(
            zip(names, [said["shards"][name] for name in names[::-1]], strict=True)
        )
    text = json.dumps(said)
    if how == "text":
        text = case.one_of(["", "null", "[]", "{}", text[:-5], "[" * 100_000, '{"shards": []}'])
    Path("offsets.json").write_text(text, encoding="utf-8")
    if how == "file gone":
        Path("offsets.json").unlink()
    done = recd(
        "logs",
        "read",
        "log",
        "two.parquet",
        "--offsets",
        "offsets.json",
        leaves=["two.parquet", "offsets.json"],
    )
    rows = tables.counted(tables.rows_in("log.parquet"))
    found = tables.counted(tables.rows_in("two.parquet") if os.path.exists("two.parquet") else [])
    if found - rows:
        wrong(f"{done}: rows that nobody wrote, or twice: {found - rows}")
    return Outcome.RIGHT if done.ok else done.refused()


test_logs = KINDS.test()
