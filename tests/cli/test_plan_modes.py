"""Modes of `recd plan` that plugins bring: what they are handed, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.commands import invoke, refusal
from tests.plugin_files import write_plugins
from tests.small_registry import write_registry

from recd_plugins.cli import main

MODE = """
import click
from recd_plugins.api import plan_modes

class Replicas(plan_modes.PlanMode):
    flag = "--replicas"
    help = "Plan replicas instead."
    because = "knows of no others"
    def options(self):
        return [
            click.Option(["--copies"], type=int, default=3, help="at most so many."),
            click.Option(["--all-tables", "every"], is_flag=True, help="not only those that pay."),
        ]
    def check(self, options, auto):
        if options["copies"] < 1:
            raise click.UsageError("--copies 0 is plain recd plan")
    def plan(self, question):
        question.say("planning replicas")
        found = {"ranks": question.spec.world_size, "rows": question.batch_size, **question.options}
        return plan_modes.PlanAnswer(f"replicas: {found}", lambda: found)

@hookimpl
def register_plans():
    return [Replicas]
"""


@pytest.fixture
def folder(cwd: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COLUMNS", "200")
    options = {"path": "table", "sparse": ["item_0"]}
    dataset = {"use": "recd.session_parquet", "options": options}
    write_registry(cwd, dataset=dataset, training={"batch_size": 64, "ranks": 2})
    write_plugins(cwd, MODE)
    return cwd


PLAN = ["--plugins-dir", "plugins", "plan", "registry.yaml"]


def test_a_mode_plans_what_it_is_asked(folder: Path) -> None:
    arguments = ["--topology", "ndv4", "--batch-size", "32", "--all-tables"]
    result = invoke(*PLAN, "--replicas", *arguments, "--json", "r.json")
    assert result.exit_code == 0, result.output
    found = {"ranks": 8, "rows": 32, "copies": 3, "every": True}
    assert result.stdout == f"replicas: {found}\n"
    assert json.loads((folder / "r.json").read_text()) == found
    shown = invoke(*PLAN, "--replicas").stdout
    assert shown.startswith("replicas: {'ranks': 2, 'rows': 64, 'copies': 3,")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('question.say("planning replicas")', "1 / 0"), "Replicas failed in plan ("),
        (("lambda: found", "lambda: 1 / 0"), "Replicas failed in as_json ("),
        (('if options["copies"] < 1', "if 1 / 0"), "Replicas failed in check ("),
    ],
)
def test_faults_of_a_mode(folder: Path, change: tuple[str, str], message: str) -> None:
    assert change[0] in MODE
    write_plugins(folder, MODE.replace(*change))
    result = CliRunner().invoke(main, [*PLAN, "--replicas", "--json", "r.json"])
    assert message in "".join(getattr(result.exception, "__notes__", ()))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--copies 2", "--copies needs --replicas"),
        ("--tiers --copies 2", "--copies needs --replicas"),
        ("--replicas --tiers", "--tiers and --replicas cannot be combined"),
        ("--replicas --batch-size auto", "--replicas knows of no others. Remove --batch-size auto"),
        ("--replicas --copies 0", "--copies 0 is plain recd plan"),
    ],
)
def test_options_that_do_not_go_together(folder: Path, arguments: str, message: str) -> None:
    assert message in refusal(*PLAN, *arguments.split(), code=2)


def test_a_mode_that_is_none_is_refused(folder: Path) -> None:
    write_plugins(folder, MODE.replace("[Replicas]", "Replicas"))
    for arguments in (["plan", "registry.yaml"], ["plan", "--help"], ["plugins"]):
        said = refusal("--plugins-dir", "plugins", *arguments)
        assert said.startswith(str(Path("plugins") / "acme.py"))
        assert "register_plans failed: TypeError" in said
