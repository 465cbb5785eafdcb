"""`recd run` writes files that packages have the options of."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.commands import invoke, recd
from tests.plugin_files import write_plugins
from tests.small_registry import write_registry

MARKDOWN = r"""
from recd_plugins.api import file_utils


class Markdown(RunReport):
    flag = "--markdown"
    help = "Write figures as tables here."

    def write(self, path, report):
        from recd_plugins.api import run_results

        both = {side: report[side] for side in ("baseline", "plugins") if side in report}
        text = ""
        for side, values in (report.get("shardings") or both or {"run": report}).items():
            text += f"| {side} | |\n|---|---|\n"
            for name, figure in run_results.figures_of(values).items():
                words = run_results.figure_words(name).strip()
                text += f"| {words} | {run_results.figure_text(*figure)} |\n"
        file_utils.write_text(path, text)


@hookimpl
def register_reports():
    return [Markdown]
"""


@pytest.fixture
def folder(cwd: Path) -> Path:
    write_plugins(cwd, MARKDOWN)
    write_registry(cwd, training={"ranks": 1, "evaluate": False})
    return cwd


RUN = ["--plugins-dir", "plugins", "run", "registry.yaml"]


def test_a_strangers_file_is_written_at_the_end(folder: Path) -> None:
    recd(*RUN, "--steps", "2", "--markdown", "run.md")
    text = Path("run.md").read_text(encoding="utf-8")
    assert text.startswith("| run | |\n|---|---|\n| train samples |")
    assert "| loss at the last step | 0." in text


MISTAKES = {
    "--markdown run.md --dry-run": "--markdown needs a training run. Remove --dry-run",
    "--markdown /proc/run.md": "/proc/run.md: the file cannot be written",
    "--markdon run.md": (
        "No such option '--markdon'. (Did you mean one of: '--breakdown', '--markdown'"
    ),
    "--batch-size 8": (
        "No such option '--batch-size'. To override this value of the registry file, add "
        "training.batch_size=VALUE after REGISTRY"
    ),
}


@pytest.mark.parametrize("arguments", MISTAKES)
def test_mistakes_are_told_before_the_run(folder: Path, arguments: str) -> None:
    result = invoke(*RUN, *arguments.split())
    assert result.exit_code != 0
    assert MISTAKES[arguments] in " ".join(result.output.split())
    assert not Path("run.md").exists()
