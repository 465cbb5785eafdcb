"""Every benchmark runs at its tiny size; docs/performance.md quotes what benchmarks measure."""

from __future__ import annotations

import math
import os
import re
import shlex
from pathlib import Path

import click
import pytest
from tests.absent import ABSENT
from tests.benchmarks.tiny import MODULES, skip_what_is_not_of_today, tiny

from recd_plugins.cli import main

PAGE = (Path(__file__).parents[2] / "docs" / "performance.md").read_text(encoding="utf-8")
SLOW = {
    "network": "starts torchrun on two nodes, half a minute of processor time, and needs root; "
    "tests/benchmarks/test_network.py of recd covers it",
}
# Without MovieLens-100K, which nobody may pass on, and without compiling, which takes minutes.
NOT_TINY = re.compile(r"movielens_|compiled_")


def skip_what_is_slow(chosen: set[str]) -> None:
    """RECD_SLOW_BENCHMARKS=1 runs it."""
    if (slow := chosen & SLOW.keys()) and os.environ.get("RECD_SLOW_BENCHMARKS") != "1":
        pytest.skip(SLOW[slow.pop()])


def title(section: str) -> str:
    """Of a section."""
    return section.partition("\n")[0]


def commands(section: str) -> list[list[str]]:
    """The commands of a section, on lines of their own and in its text, without variables."""
    lines = re.findall(r"^    (.*)$", section, re.M) + re.findall(r"`(recd [^`]+)`", section)
    parts = [shlex.split(part) for line in lines for part in line.split("&&")]
    bare = [[word for word in words if not re.match(r"[A-Z_]+=", word)] for words in parts]
    return [words for words in bare if words]


def benchmarks(section: str) -> set[str]:
    """Those that a section says to run."""
    return {words[2] for words in commands(section) if words[:2] == ["recd", "bench"]}


#: Sections of the page; not those of benchmarks of a plugin whose folder was taken away.
SECTIONS = [
    each
    for each in re.split(r"^## ", PAGE, flags=re.M)[1:]
    if not ABSENT or benchmarks(each) <= MODULES.keys()
]


def quoted(section: str) -> list[str]:
    """The figures that its tables name."""
    rows = re.findall(r"^\| (`[^|]*) \|", section, re.M)
    found = [figure for row in rows for figure in re.findall(r"`([a-zA-Z0-9_.]+)`", row)]
    return [figure for figure in found if not NOT_TINY.match(figure)]


def matches(figure: str, measured: list[str]) -> bool:
    """Whether a figure is there, by its name without the model's, or by the part that is quoted."""
    if figure.startswith((".", "_")) or figure.endswith("_"):
        return any(figure.strip(".") in name for name in measured)
    return any(name == figure or name.endswith(f"_{figure}") for name in measured)


@pytest.mark.parametrize("name", sorted(MODULES))
def test_it_runs(name: str) -> None:
    skip_what_is_slow({name})
    figures = tiny(name)["figures"]
    assert figures
    for figure in figures:
        assert math.isfinite(figure["value"]), figure["figure"]


@pytest.mark.parametrize("section", [each for each in SECTIONS if quoted(each)], ids=title)
def test_the_page_quotes_what_is_measured(section: str) -> None:
    skip_what_is_slow(benchmarks(section))
    skip_what_is_not_of_today(benchmarks(section))
    reports = [tiny(name) for name in benchmarks(section)]
    measured = [figure["figure"] for each in reports for figure in each["figures"]]
    left_out = " ".join(note for each in reports for note in each["notes"])
    missing = [figure for figure in quoted(section) if not matches(figure, measured)]
    # What this machine cannot measure a note says, such as the file store's without a memory limit.
    assert [figure for figure in missing if f"{figure} was not measured" not in left_out] == []


@pytest.mark.parametrize("section", [each for each in SECTIONS if "\n| " in each], ids=title)
def test_figures_stand_below_a_command(section: str) -> None:
    assert any(words[0] in ("recd", "python", "cd") for words in commands(section)), section[:60]


@pytest.mark.parametrize(
    "command",
    [words for section in SECTIONS for words in commands(section) if words[0] == "recd"],
    ids=" ".join,
)
def test_its_commands_exist_with_these_options(command: list[str]) -> None:
    context = click.Context(main, info_name="recd")
    rest, found = command[1:], main.get_command(context, command[1])
    assert found is not None
    while isinstance(found, click.Group):
        rest = rest[1:]
        found = found.get_command(click.Context(found), rest[0])
        assert found is not None
    parameters = found.get_params(click.Context(found))
    options = {option for parameter in parameters for option in parameter.opts}
    assert {word for word in rest if word.startswith("--")} <= options
