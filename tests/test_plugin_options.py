"""Options of plugins as they are compared: between ranks, and by runs that go on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, PlainSerializer

from recd_plugins.api import PluginOptions


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
