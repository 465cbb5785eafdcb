from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

PLUGIN = """\
import click
from recd_plugins.config.hookspecs import hookimpl

@click.command()
def falter():
    {}["no such key"]

@hookimpl
def register_commands(cli): cli.add_command(falter)
"""


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "falters.py").write_text(PLUGIN)
    return tmp_path


RECD = ["-c", "import sys; from recd_plugins.cli import main; sys.exit(main())"]
FALTER = ["--plugins-dir", ".", "falter"]


def python(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env={"PYTHONPATH": ":".join(sys.path), "TMPDIR": str(folder), **environment},
        cwd=folder,
        capture_output=True,
        text=True,
    )


def test_a_program_shows_a_message_and_keeps_the_traceback(folder):
    done = python(folder, *RECD, *FALTER)
    assert done.returncode == 70
    assert "internal error in recd-plugins" in done.stderr
    assert "KeyError: 'no such key' (falters.py:6)" in done.stderr
    assert "Traceback" not in done.stderr
    kept = re.search(r"The full traceback is in (\S+)\.", done.stderr)
    assert kept
    assert "Traceback" in Path(kept[1]).read_text()


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["validate", "no.yaml"], "no.yaml: the file cannot be read: No such file or directory"),
        (FALTER, "internal error in recd-plugins"),
    ],
)
def test_torchrun_ends_with_the_message(folder: Path, command: list[str], said: str) -> None:
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", "--no-python"]
    done = python(folder, *ranks, sys.executable, *RECD, *command)
    assert done.returncode == 1
    first, _, summary = done.stderr.partition("Root Cause")
    assert said in first
    assert f"traceback : {said}" in summary


def test_the_traceback_is_shown_where_it_is_asked_for(folder):
    done = python(folder, *RECD, *FALTER, RECD_TRACEBACK="1")
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "internal error" not in done.stderr
