"""Every benchmark runs at its tiny size; docs/performance.md quotes what benchmarks measure."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from benchmarks.__main__ import BENCHMARKS, report
from benchmarks.__main__ import main as benchmarks
from click.testing import CliRunner
from tests.covering import of_today

from recd_plugins.cli import main

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
SECTIONS = re.split(r"^## ", PAGE, flags=re.M)[1:]
#: By day one part runs, which takes some 20 s of a processor, another one each day.
PARTS = (
    {"scars", "dynamic"},
    {"ablation", "logs"},
    {"flexshard", "dlrm"},
    {"train", "convert"},
    {"storage", "reader", "requests", "host", "histories"},
    {"serving", "balance"},
)


@cache
def tiny(name: str) -> dict[str, Any]:
    """Return a benchmark's report; skip the test where it runs on another day, or by hand."""
    if name == "network" and os.environ.get("RECD_SLOW_BENCHMARKS") != "1":
        pytest.skip("starts torchrun on two nodes, and needs root: RECD_SLOW_BENCHMARKS=1 runs it")
    if name in set().union(*PARTS).difference(*of_today(PARTS, len(PARTS))):
        pytest.skip(f"{name} runs by night, and on another day")
    if name == "serving":
        pytest.importorskip("uvicorn")
    threads = torch.get_num_threads()
    try:
        return report(name, "tiny")
    finally:
        torch.set_num_threads(threads)


def commands(section: str) -> list[list[str]]:
    """Return the commands of a section, on lines of their own and in its text."""
    lines = "".join(re.findall(r"^```sh\n(.*?)^```$", section, re.M | re.S)).splitlines()
    lines += re.findall(r"`((?:recd|python -m) [^`]+)`", section)
    parts = [shlex.split(part) for line in lines for part in line.split("&&")]
    return [words for words in parts if words]


@pytest.mark.parametrize("name", sorted(BENCHMARKS))
def test_it_measures(name: str) -> None:
    found = tiny(name)
    assert found["figures"]
    for figure in found["figures"]:
        assert math.isfinite(figure["value"]), figure
        assert figure["min"] <= figure["value"] <= figure["max"]
        if figure["figure"].endswith("loss_max_abs_diff"):
            assert figure["value"] <= figure["goal"], figure


@pytest.mark.parametrize(
    "section", [each for each in SECTIONS if "\n| " in each], ids=lambda each: each.split("\n")[0]
)
def test_the_commands_of_the_page_exist(section: str) -> None:
    assert any(words[0] in ("recd", "python", "cd") for words in commands(section)), section[:60]
    for words in commands(section):
        if words[0] != "recd" and words[:3] != ["python", "-m", "benchmarks"]:
            continue
        found: click.Command = main if words[0] == "recd" else benchmarks
        rest = words[1:] if words[0] == "recd" else words[3:]
        while isinstance(found, click.Group):
            command = found.get_command(click.Context(found), rest[0])
            assert command is not None, words
            found, rest = command, rest[1:]
        parameters = found.get_params(click.Context(found))
        options = {option for parameter in parameters for option in parameter.opts}
        assert {word for word in rest if word.startswith("--")} <= options, words


def test_the_command_writes_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks._measure import Detail, Findings, higher

    from benchmarks import storage

    detail = Detail("t", ["", "x"], [["a", 1.0]])
    found = Findings("2 rows", [higher("gain", [2, 1, 3])], [detail], ["note"])
    monkeypatch.setattr(storage, "run", lambda size: found)
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(benchmarks, ["storage", "--json", "r.json"])
    assert done.exit_code == 0, done.output
    written = json.loads(Path("r.json").read_text())
    assert list(written) == ["name", "machine", "workload", "figures", "details", "notes"]
    expected = {"figure": "gain", "value": 2, "runs": 3, "min": 1, "max": 3, "better": "higher"}
    assert expected.items() <= written["figures"][0].items()
    assert set(BENCHMARKS) <= set(CliRunner().invoke(benchmarks, ["--help"]).output.split())


def test_what_is_no_number_is_never_a_figure() -> None:
    from benchmarks._measure import higher, max_abs_diff

    with pytest.raises(ValueError, match="gain: a sample"):
        higher("gain", [1.0, math.nan, 2.0])
    assert math.isnan(max_abs_diff([[1.0, math.nan], [1.0, 2.0]]))
    assert max_abs_diff([[1.0, 2.0], [1.5, 2.25]]) == 0.5


def test_the_bound_of_an_ablation() -> None:
    from benchmarks.ablation import BASELINE, DEDUP, Ablation, Measured

    from recd_plugins.interfaces.step_cost import StageTimes

    stages = StageTimes(lookup=4, gemm=4, all_to_all=4, all_reduce=1, other=2)
    shares: dict[Any, float] = {"gemm": 0.5, "other": 0.0}
    stock = Measured(
        ids={"seq_0": 8, "a": 8}, bytes_by_kind={"all_to_all": 8}, stages=stages, pooling=shares
    )
    ours = Measured(ids={"seq_0": 2, "a": 2}, bytes_by_kind={"all_to_all": 4})
    ablation = Ablation("rm1", {BASELINE.name: stock, DEDUP.name: ours})
    assert ablation._bound(BASELINE) == pytest.approx(15 / (1 + 2 + 2.5 + 1 + 2))
