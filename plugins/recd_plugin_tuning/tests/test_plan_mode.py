"""`recd plan --auto` beside other options."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner
from tests.cli.plan_cases import REGISTRY, folder

from recd_plugins.cli import main

__all__ = ["folder"]

#: Says what it would train.
NAMED = """
from recd_plugins.api import hookimpl, plan_modes

class Named(plan_modes.Measurement):
    def cluster(self, device):
        raise AssertionError("no cluster is measured here")
    def steps(self, question, path):
        names = [entry.plugin.name for entry in question.registry.sharding]
        return question.spec, f"measured: steps of {', '.join(names)}"

@hookimpl
def register_measurements():
    return [Named]
"""


def test_steps_are_measured_of_the_file_and_planned_with_what_it_chooses(folder: Path) -> None:
    entry = 'sharding:\n  - {use: torchrec.row_wise, tables: ["t_*"]}\n'
    (folder / "registry.yaml").write_text(REGISTRY + entry, encoding="utf-8")
    (folder / "plugins").mkdir()
    (folder / "plugins" / "named.py").write_text(NAMED, encoding="utf-8")
    command = ["--plugins-dir", "plugins", "plan", "registry.yaml"]
    done = CliRunner().invoke(main, [*command, "--auto", "--calibrate", "here.yaml"])
    assert done.exit_code == 0, done.output
    assert "measured: steps of torchrec.row_wise\n" in done.stdout
    assert "auto: what was chosen" in done.stdout
