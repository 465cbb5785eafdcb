"""Options of plugins as they are compared: between ranks, and by runs that go on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import pytest
from pydantic import BaseModel, PlainSerializer

from recd_plugins.api import PluginOptions
from recd_plugins.runtime.text import read_bytes


class Words(BaseModel):
    words: frozenset[str]


class OptionsOfSets(PluginOptions):
    words: frozenset[str]
    groups: dict[str, tuple[frozenset[str], ...]]
    inner: Words
    few: set[int] | None = None
    spelled: Annotated[Path, PlainSerializer(lambda path: path.name)]


def test_sets_among_options_have_one_order_in_all_processes() -> None:
    words = [f"word_{number:02}" for number in range(20)]
    found = OptionsOfSets(
        words=frozenset(words),
        groups={"b": (frozenset(words), frozenset()), "a": ()},
        inner=Words(words=frozenset(words)),
        few={10, 3},
        spelled=Path("b/a"),
    )
    dumped = {
        "words": words,
        "groups": {"b": [words, []], "a": []},
        "inner": {"words": words},
        "few": [3, 10],
        "spelled": "a",
    }
    assert found.model_dump(mode="json") == dumped
    assert json.loads(found.model_dump_json()) == dumped
    assert OptionsOfSets.model_validate({**dumped, "spelled": "b/a"}) == found


def test_bytes_are_numbers_with_units() -> None:
    sizes: dict[str | int, int] = {
        "256MB": 256_000_000,
        "2GiB": 2**31,
        "1.5 kib": 1536,
        4096: 4096,
        "10b": 10,
    }
    assert {words: read_bytes(words) for words in sizes} == sizes
    for words in ("", "MB", "12 parsecs", "-3MB", "0", "0.1b", "1e9", "9" * 400):
        with pytest.raises(ValueError, match="256MB"):
            read_bytes(words)
