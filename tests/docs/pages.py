"""What tests of pages read of them, and run."""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path

from click.testing import CliRunner
from ruamel.yaml import YAML
from tests import forked

from recd_plugins.cli import main

DOCS = Path(__file__).parents[2] / "docs"


def page(name: str) -> str:
    """Text of ``docs/NAME``."""
    return (DOCS / name).read_text(encoding="utf-8")


def plugin_page(plugin: str, name: str = "README.md") -> str:
    """Text of a page of a built-in plugin's package."""
    return (DOCS.parent / "plugins" / f"recd_plugin_{plugin}" / "docs" / name).read_text("utf-8")


def blocks(text: str, language: str) -> list[str]:
    """The blocks of code in it."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)


def run_console(text: str) -> dict[str, str]:
    """What each ``recd`` command in its console blocks prints, run in the current directory.

    Where output stands below a command it is what the command prints, but for sizes: compressors
    of other versions make other ones.
    """
    console = "".join(blocks(text, "console"))
    printed = {}
    for example in re.split(r"^\$ ", console, flags=re.MULTILINE)[1:]:
        command, _, expected = example.partition("\n")
        program, *arguments = shlex.split(command)
        assert program == "recd"
        result = CliRunner().invoke(main, arguments, env={"COLUMNS": "80"})
        assert result.exit_code == 0, result.output
        if expected:
            assert _without_sizes(result.stdout) == _without_sizes(expected)
        printed[command] = result.stdout
    return printed


def plan_with(registry: str, entries: str) -> None:
    """``recd plan`` takes the registry file with those sections instead of its own."""
    yaml = YAML(typ="safe")
    with Path("other.yaml").open("w", encoding="utf-8") as stream:
        YAML().dump({**yaml.load(registry), **yaml.load(entries)}, stream)
    result = CliRunner().invoke(main, ["plan", "other.yaml"])
    assert result.exit_code == 0, result.output


def run_tests_of_plugins(folder: Path) -> None:
    """Run the tests in a folder with plugins in its folder ``plugins``."""
    done = forked.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "."],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": "plugins"},
    )
    assert done.returncode == 0, done.stdout


def _without_sizes(text: str) -> str:
    return re.sub(r"[\d.]+ MB", "", text)
