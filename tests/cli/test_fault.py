"""A fault of this project, as a program shows it and as tests see it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from recd_plugins.cli import main
from recd_plugins.cli.fault import fault_message
from recd_plugins.errors import RankError

PLUGIN = """\
import click
from recd_plugins.hookspecs import hookimpl

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


def program(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    code = "import sys; from recd_plugins.cli import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", code, "--plugins-dir", str(folder), "falter"],
        env={"PYTHONPATH": ":".join(sys.path), "TMPDIR": str(folder), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_program_shows_a_message_and_keeps_the_traceback(folder):
    done = program(folder)
    assert done.returncode == 70
    assert "this is a fault of recd-plugins" in done.stderr
    assert "KeyError: 'no such key' (falters.py:6)" in done.stderr
    assert "Traceback" not in done.stderr
    kept = re.search(r"The whole traceback is in (\S+);", done.stderr)
    assert kept
    assert "Traceback" in Path(kept[1]).read_text()


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["validate", "no.yaml"], "no.yaml: cannot be read: No such file or directory"),
        (["--plugins-dir", ".", "falter"], "this is a fault of recd-plugins"),
    ],
)
def test_torchrun_ends_with_the_message(folder: Path, command: list[str], said: str) -> None:
    ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    program = ["--no-python", sys.executable, "-c", "from recd_plugins.cli import main; main()"]
    done = subprocess.run(
        [*ranks, *program, *command],
        env={"PYTHONPATH": ":".join(sys.path), "TMPDIR": str(folder)},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    first, _, summary = done.stderr.partition("Root Cause")
    assert said in first
    assert f"traceback : {said}" in summary


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
def test_an_output_that_takes_no_more_is_no_fault_and_files_are_written_before(tmp_path):
    source = Path(__file__).parents[2] / "registry.yaml"
    code = "import sys; from recd_plugins.cli import main; sys.exit(main())"
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", code, "plan", str(source), "--json", str(tmp_path / "p.json")],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 1
    assert "No space left on device, where files or standard output go" in done.stderr
    assert (tmp_path / "p.json").stat().st_size > 0


def test_the_traceback_is_shown_where_it_is_asked_for(folder):
    done = program(folder, RECD_TRACEBACK="1")
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "this is a fault" not in done.stderr


def test_tests_see_the_exception(folder):
    result = CliRunner().invoke(main, ["--plugins-dir", str(folder), "falter"])
    assert isinstance(result.exception, KeyError)
    with pytest.raises(KeyError):
        main(["--plugins-dir", str(folder), "falter"], standalone_mode=False)


def test_a_full_disk_loses_no_traceback(monkeypatch):
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.NamedTemporaryFile", full)
    try:
        raise ValueError("oh")
    except ValueError as error:
        message = fault_message(error)
    assert "Traceback" in message


def test_what_a_rank_raised_is_shown_in_place_of_a_rank_error():
    said = fault_message(
        RankError("rank 0 failed:\nTraceback", "KeyError: 'x' (a.py:3), on rank 0")
    )
    assert "uses: KeyError: 'x' (a.py:3), on rank 0\n" in said
    assert "RankError" not in said
