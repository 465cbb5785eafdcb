"""Files that would take minutes or the machine's memory, and what is no file."""

from __future__ import annotations

import os

import pytest

from recd_plugins.errors import RegistryError
from recd_plugins.registry import bounds
from recd_plugins.registry.loader import read_yaml


def said(path) -> str:
    with pytest.raises(RegistryError) as caught:
        read_yaml(path)
    return str(caught.value).removeprefix(str(path))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            # 10 to the power of 9 values.
            "a: &a [1,1,1,1,1,1,1,1,1,1]\n"
            + "".join(
                f"{b}: &{b} [{','.join([f'*{a}'] * 10)}]\n"
                for a, b in zip("abcdefgh", "bcdefghi", strict=True)
            ),
            ":1: more than 50,000 keys, values and items, which is the most, through aliases",
        ),
        (
            "a: &a0 [1]\n" + "".join(f"k{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 90)),
            ":1: nested deeper than 64 levels, which is the most, through aliases",
        ),
        ("a: 1\nb: " + "{a: " * 70, ":2: nested deeper than 64 levels, which is the most"),
        ("a: 1\n#" + "x" * (1 << 20), ": is larger than 1,048,576 bytes, which is the most"),
    ],
    ids=["alias bomb", "chain of aliases", "depth", "size"],
)  # fmt: skip
def test_what_is_too_much(tmp_path, text, expected):
    path = tmp_path / "r.yaml"
    path.write_text(text)
    assert said(path).startswith(expected)


def test_too_many_values(tmp_path, monkeypatch):
    monkeypatch.setattr(bounds, "MOST_VALUES", 10)
    path = tmp_path / "r.yaml"
    path.write_text("a:\n" + "- 1\n" * 7)
    assert read_yaml(path).data == {"a": [1] * 7}
    path.write_text("a:\n" + "- 1\n" * 8)
    assert said(path).startswith(":9: more than")


def test_a_file_at_the_limits_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(bounds, "MOST_BYTES", 40)
    path = tmp_path / "r.yaml"
    path.write_text("a: [1, &b [2, 3], *b]\n".ljust(40, "#"))
    assert read_yaml(path).data == {"a": [1, [2, 3], [2, 3]]}


def test_what_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "dangling").symlink_to("nothing")
    assert said(tmp_path) == ": is a folder, no registry file; name the file"
    for name in ("pipe", "/dev/zero"):
        assert said(tmp_path / name).startswith((": is no regular", "/dev/zero: is no regular"))
    assert said(tmp_path / "loop").startswith(": cannot be read: Too many levels")
    assert said(tmp_path / "dangling").startswith(": cannot be read: No such file")
    assert said(tmp_path / ("x" * 300)).startswith(": cannot be read: File name too long")
