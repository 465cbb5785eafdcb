"""Lines of TSV: parsed as Python would, and malformed ones named."""

from __future__ import annotations

import json
from contextlib import closing, nullcontext
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from recd_plugin_dlrm.criteo import tsv
from recd_plugin_dlrm.criteo.tsv import TsvStream
from recd_plugin_dlrm.tests.criteo.criteo_cases import make, sample_rows, write_day
from recd_plugins.runtime.errors import DataError

GOOD = "\t".join(["1", *[str(number) for number in range(13)], *["0a"] * 26])

_values = st.sampled_from(["", "0", "1", "-1", "-", "a0", "12", "9" * 18, "9" * 19, "f" * 15])
_hex = st.sampled_from(["", "0", "deadBEEF", "f" * 15, "f" * 16, "g", "-1", " 1", "é"])
_lines = st.one_of(
    st.builds(
        lambda label, dense, sparse: "\t".join([label, *dense, *sparse]),
        st.sampled_from(["0", "1"] * 5 + ["", "2", "01", "-1"]),
        st.lists(st.sampled_from(["", "5", "-7"]), min_size=13, max_size=13),
        st.lists(st.sampled_from(["", "0", "deadBEEF"]), min_size=26, max_size=26),
    ),
    st.builds(
        lambda place, value: "\t".join(
            [*GOOD.split("\t")[:place], value, *GOOD.split("\t")[place + 1 :]]
        ),
        st.integers(0, 39),
        st.one_of(_values, _hex),
    ),
    st.sampled_from(["", "\t", GOOD + "\t", GOOD.rpartition("\t")[0], " " + GOOD, "x" * 50]),
)


def reference(line: str) -> list[int] | None:
    values = line.split("\t")
    if len(values) != 40 or values[0] not in ("0", "1"):
        return None
    numbers = [int(values[0])]
    for value, base in [*((value, 10) for value in values[1:14]), *((v, 16) for v in values[14:])]:
        digits = value.removeprefix("-") if base == 10 else value
        known = "0123456789" if base == 10 else "0123456789abcdefABCDEF"
        if not set(digits) <= set(known) or len(digits) > (18 if base == 10 else 15):
            return None
        if value and not digits:
            return None
        numbers.append(int(value or "0", base))
    return numbers


@settings(
    deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    lines=st.lists(_lines, max_size=30),
    ends=st.sampled_from(["\n", "\r\n"]),
    has_last_end=st.booleans(),
    chunk=st.sampled_from([7, 100, 5000]),
    most=st.sampled_from([1, 4, 100]),
)
def test_lines_are_parsed_as_python_would(
    tmp_path, monkeypatch, lines, ends, has_last_end, chunk, most
):
    monkeypatch.setattr(tsv, "_CHUNK", chunk)
    text = ends.join(lines) + (ends if has_last_end else "")
    # After the last end of a line there is none; without one, an empty line is none either.
    if not lines and has_last_end:
        lines = [""]
    elif not has_last_end and lines and not lines[-1]:
        lines = lines[:-1]
    path = tmp_path / "day_0"
    path.write_bytes(text.encode())
    expected = [reference(line) for line in lines]
    bad = expected.index(None) if None in expected else len(lines)
    is_bad = bad < len(lines)
    named = pytest.raises(DataError, match=rf"{path}:{bad + 1}: ") if is_bad else nullcontext()
    found = []
    with named, closing(TsvStream(path)) as stream:
        while len(rows := stream.read(most)):
            found += np.stack([rows.labels, *rows.dense, *rows.sparse], axis=1).tolist()
        assert stream.offset >= len(text.encode())
    # Rows that were read together with the bad line are lost.
    assert found == expected[: bad - bad % most if is_bad else bad]


@pytest.mark.parametrize("file_format", ["tsv", "gz", "zst"])
def test_seeking_goes_to_a_line(tmp_path, monkeypatch, file_format):
    monkeypatch.setattr(tsv, "_CHUNK", 1000)
    write_day(tmp_path, "day_0", file_format, sample_rows(100))
    (path,) = tmp_path.iterdir()
    with closing(TsvStream(path)) as stream:
        offsets, rows = [], []
        for _ in range(100):
            offsets.append(stream.offset)
            rows.append(np.stack(stream.read(1).sparse))
    with closing(TsvStream(path)) as stream:
        for row in (3, 50, 51, 99, *((0, 98) if file_format == "tsv" else ())):
            stream.seek(offsets[row], row + 1)
            assert np.array_equal(np.stack(stream.read(1).sparse), rows[row])
            assert stream.line == row + 2


def with_lines(path: Path, bad: str = GOOD, rows: int = 40) -> Path:
    lines = [*[GOOD] * 22, bad, *[GOOD] * (rows - 23)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    return path


def changed(column: int, value: str) -> str:
    values = GOOD.split("\t")
    values[column - 1] = value
    return "\t".join(values)


@pytest.mark.parametrize(
    "line", [changed(1, "2"), changed(3, "1.5"), changed(40, "-1"), GOOD[2:], ""]
)
def test_a_bad_line_is_named(tmp_path, line):
    path = with_lines(tmp_path / "day_0", line)
    with pytest.raises(DataError, match="day_0:23: the line is malformed"):
        make(path).prepare()
    assert not (tmp_path / ".recd-criteo").exists()


def test_a_file_is_counted_once(tmp_path, monkeypatch):
    path = with_lines(tmp_path / "data" / "day_0")
    options = {"cache": tmp_path / "cache", "evaluate": "nothing"}
    make(path, **options).prepare()
    (kept,) = (tmp_path / "cache").iterdir()
    assert not (path.parent / ".recd-criteo").exists()
    with monkeypatch.context() as patch:
        patch.setattr(tsv.TsvStream, "read", None)
        make(path, **options).prepare()
    assert json.loads(kept.read_text())["value"]["num_rows"] == 40
    with_lines(path, rows=41)
    make(path, **options).prepare()
    assert json.loads(kept.read_text())["value"]["num_rows"] == 41
    kept.write_text("{}")
    make(path, **options).prepare()
    assert json.loads(kept.read_text())["value"]["num_rows"] == 41
