"""Criteo's logs."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import zstandard
from hypothesis import strategies as st
from tests.fuzz import tables
from tests.fuzz.cases import Case, Kinds
from tests.fuzz.oracle import Outcome, recd, wrong
from tests.fuzz.squeezed import squeezed

KINDS = Kinds("criteo")


def criteo_lines(count: int = 20) -> list[list[str]]:
    return [
        [
            str(at % 2),
            *("" if (at + column) % 5 == 0 else str(at * column - 3) for column in range(13)),
            *("" if (at + column) % 7 == 0 else f"{at * 31 + column:08x}" for column in range(26)),
        ]
        for at in range(count)
    ]


def criteo(
    files: dict[str, bytes], meant: Sequence[Sequence[str]] | None, *options: str, skipped: int = 0
) -> Outcome:
    """Lines go through a conversion; None has to be refused."""
    Path("days").mkdir()
    for name, content in files.items():
        Path("days", name).write_bytes(content)
    done = recd("criteo", "convert", "days", "new", "--json", "figures.json", *options)
    if not done.ok:
        return done.refused("days")
    if meant is None:
        wrong(f"{done} took what it should refuse")
    found = [tuple(row.values()) for row in tables.rows_in("new")]
    expected = [
        (
            int(line[0]),
            *(int(text or "0") for text in line[1:14]),
            *(int(text or "0", 16) for text in line[14:]),
        )
        for line in meant
    ]
    if found != expected:
        wrong(f"{len(found)} rows, not the {len(expected)} that are meant, or other values")
    figures = json.loads(Path("figures.json").read_text(encoding="utf-8"))
    if skipped and skipped not in figures.values():
        wrong(f"{skipped} lines were skipped, and the figures are {figures}")
    return Outcome.RIGHT


def tsv(lines: Sequence[Sequence[str]], end: str = "\n") -> bytes:
    return "".join("\t".join(line) + end for line in lines).encode()


@KINDS.add
def criteo_with_other_values(case: Case) -> Outcome:
    column, text, good = case.one_of(
        [
            (0, "2", False),
            (0, "", False),
            (0, "-1", False),
            (0, "1.0", False),
            (0, "01", False),
            (0, "+1", False),
            (3, "1.5", False),
            (3, "x", False),
            (3, "+5", False),
            (3, "-", False),
            (3, "1" * 19, False),
            (3, "9" * 18, True),
            (3, "-" + "9" * 18, True),
            (3, " 5", False),
            (3, "1e3", False),
            (3, "-0", True),
            (3, "0" * 18, True),
            (20, "xyz", False),
            (20, "0x1f", False),
            (20, "1" * 16, False),
            (20, "f" * 15, True),
            (20, "ABCDEF", True),
            (20, "-1", False),
            (20, "f" * 16, False),
            (20, " ", False),
            (20, "é", False),
            (20, "\0", False),
        ]
    )
    lines = criteo_lines()
    lines[case.number(0, 19, "line")][column] = text
    return criteo({"day_0": tsv(lines)}, lines if good else None)


@KINDS.add
def criteo_with_lines_of_another_form(case: Case) -> Outcome:
    """With ``--bad-lines skip`` the others are as they were."""
    lines: list[Any] = criteo_lines()
    at = case.number(0, 19, "line")
    line = lines[at]
    lines[at] = case.one_of(
        [
            line[:-1],
            [*line, ""],
            [*line, "1"],
            [],
            ["x"],
            ["\0"],
            line[1:],
            [" ".join(line)],
            [",".join(line)],
            ["", *line],
        ]
    )
    if case.draw(st.booleans(), "skip"):
        kept = [each for number, each in enumerate(lines) if number != at]
        return criteo({"day_0": tsv(lines)}, kept, "--bad-lines", "skip", skipped=1)
    return criteo({"day_0": tsv(lines)}, None)


@KINDS.add
def criteo_with_other_line_ends(case: Case) -> Outcome:
    end = case.one_of(["\n", "\r\n", "\r", "\n\n", "\0", "\t\n"])
    content = tsv(criteo_lines(), end)
    if case.draw(st.booleans(), "none at the end"):
        content = content[: -len(end)]
    return criteo({"day_0": content}, criteo_lines() if end in ("\n", "\r\n") else None)


@KINDS.add
def criteo_in_another_encoding(case: Case) -> Outcome:
    encoding = case.one_of(["utf-16", "utf-8-sig", "utf-32"])
    return criteo({"day_0": tsv(criteo_lines()).decode().encode(encoding)}, None)


@KINDS.add
def criteo_in_damaged_compression(case: Case) -> Outcome:
    data = tsv(criteo_lines())
    which = case.one_of(["gz", "zst"], "format")
    pack: Callable[[bytes], bytes] = (
        (lambda data: gzip.compress(data, mtime=0))
        if which == "gz"
        else zstandard.ZstdCompressor(write_checksum=True).compress
    )
    content, good = squeezed(case, data, pack(data))
    meant = None if good is None else [line.split("\t") for line in good.decode().splitlines()]
    return criteo({f"day_0.{which}": content}, meant)


@KINDS.add
def criteo_days_that_do_not_belong_together(case: Case) -> Outcome:
    lines = tsv(criteo_lines())
    files = case.one_of(
        [
            {"day_0": lines, "day_2": lines},
            {"day_1": lines},
            {"day_0": lines, "day_0.gz": gzip.compress(lines)},
            {"day_0": lines, "day_1.gz": gzip.compress(lines)},
            {"day_0": lines, "day_00": lines},
            {"day_0": lines, "train.txt": lines},
            {"day_-1": lines},
            {"test.txt": lines},
            {"day_0": b""},
            {"day_0": b"\n"},
            {},
            {"day_x": lines},
        ]
    )
    return criteo(files, None)


@KINDS.add
def criteo_cut_or_flipped(case: Case) -> Outcome:
    """Text has no checksum: lines that are Criteo's may be taken."""
    data = bytearray(tsv(criteo_lines()))
    if case.draw(st.booleans(), "cut"):
        del data[case.number(0, len(data) - 1, "bytes") :]
    else:
        data[case.number(0, len(data) - 1, "byte")] ^= 1 << case.number(0, 7, "bit")
    try:
        text = bytes(data).decode("ascii")
    except UnicodeDecodeError:
        return criteo({"day_0": bytes(data)}, None)
    lines = [line.removesuffix("\r").split("\t") for line in text.split("\n")]
    lines = lines[:-1] if lines[-1] == [""] else lines
    return criteo({"day_0": bytes(data)}, lines if lines and all(map(_is_criteo, lines)) else None)


def _is_criteo(line: Sequence[str]) -> bool:
    digits, hexadecimal = set("0123456789"), set("0123456789abcdefABCDEF")
    return (
        len(line) == 40
        and line[0] in ("0", "1")
        and all(
            not text
            or (0 < len(text.removeprefix("-")) < 19 and set(text.removeprefix("-")) <= digits)
            for text in line[1:14]
        )
        and all(len(text) < 16 and set(text) <= hexadecimal for text in line[14:])
    )


@KINDS.add
def criteo_npy_of_another_form(case: Case) -> Outcome:
    """Files of numpy, one of which is of another shape or type, or would run code."""
    arrays: dict[str, Any] = {
        "dense": np.ones((40, 13), np.float32),
        "sparse": np.ones((40, 26), np.int32),
        "labels": np.arange(40, dtype=np.int32).reshape(40, 1) % 2,
    }
    which = case.one_of(list(arrays), "file")
    good = arrays[which]
    arrays[which] = case.one_of(
        [
            good[:, :-1],
            good[:-1],
            good[None],
            good.astype("S4"),
            good.astype(object),
            good.astype(np.complex64),
            good.astype(">M8[s]"),
            good[:0],
            good[0, 0],
        ]
    )
    Path("days").mkdir()
    for day in (0, 1):
        for name, array in arrays.items():
            np.save(f"days/day_{day}_{name}.npy", array, allow_pickle=True)
    return _train_on_days(None)


@KINDS.add
def criteo_npy_damaged(case: Case) -> Outcome:
    Path("days").mkdir()
    for day in (0, 1):
        np.save(f"days/day_{day}_dense.npy", np.ones((40, 13), np.float32))
        np.save(f"days/day_{day}_sparse.npy", np.ones((40, 26), np.int32))
        np.save(f"days/day_{day}_labels.npy", np.arange(40, dtype=np.int32)[:, None] % 2)
    path = Path(f"days/day_0_{case.one_of(['dense', 'sparse', 'labels'], 'file')}.npy")
    data = path.read_bytes()
    if case.draw(st.booleans(), "cut"):
        path.write_bytes(data[: case.number(0, len(data) - 1, "bytes")])
    else:
        text = case.one_of([b"{'descr': '|O', ", b"__import__('os')", b"{{", b"\xff\xff"])
        path.write_bytes(data[:10] + text + data[10 + len(text) :])
    return _train_on_days(None)


def _train_on_days(meant: list[float] | None) -> Outcome:
    Path("registry.yaml").write_text(
        "version: 1\ndataset: {use: dlrm.criteo, options: {path: days, buckets: 8, prefetch: 0, "
        "evaluate: nothing}}\nconverter: {use: recd.kjt}\nmodel: {embedding_dim: 4, "
        "num_embeddings: 8, bottom_mlp: [4], top_mlp: [4]}\n"
        "training: {batch_size: 8, steps: 1, device: cpu}\n",
        encoding="utf-8",
    )
    done = recd("run", "registry.yaml", leaves=["days"])
    if not done.ok:
        return done.refused("days")
    if meant is None:
        wrong(f"{done} took what it should refuse")
    return Outcome.RIGHT


test_criteo = KINDS.test()
