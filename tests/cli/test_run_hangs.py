"""Runs with a stopped or slow rank or reader: it is named, and the run goes on or ends in time."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner, Result
from tests import forked
from tests.cli.programs import recd, run_with_plugins
from tests.forked import RECD
from tests.plugin_files import write_plugins
from tests.small_registry import hashed, papercal, write_registry

from recd_plugins.cli import main

PLUGIN = '''
import glob
import os
import signal

class Stop(Preprocessing):
    """Stops the process that makes batches of a rank after a checkpoint, once."""
    name = "acme.stop"
    calls = 0
    class Options(PluginOptions):
        rank: int
        note: str
    def transform(self, values, offsets):
        checkpoints = glob.glob(os.path.dirname(self.options.note) + "/checkpoints/step-*")
        # What is read before training is no step; what a checkpoint waits for neither.
        self.calls += bool(checkpoints)
        if self.calls == 2 and int(os.environ["RANK"]) == self.options.rank:
            try:
                with open(self.options.note, "x") as note:
                    note.write(str(os.getpid()))
            except FileExistsError:
                return values, offsets
            os.kill(os.getpid(), signal.SIGSTOP)
        return values, offsets
'''


def write(folder: Path, rank: int = 1) -> list[str]:
    plugins = write_plugins(folder, PLUGIN, "Stop")
    stop = {"rank": rank, "note": f"{folder}/stopped"}
    registry = write_registry(
        folder,
        dataset=papercal(folder, 512, 32),
        preprocessing=[*hashed(50), {"use": "acme.stop", "features": ["usr_0"], "options": stop}],
        model={"num_embeddings": 50, "bag_pooling": "mean"},
        training={
            "ranks": 2,
            "steps": 8,
            "evaluate": False,
            "checkpoint": {"path": f"{folder}/checkpoints", "every": 1},
        },
    )
    return ["--plugins-dir", str(plugins), "run", str(registry)]


def stopped(folder: Path) -> int:
    return int((folder / "stopped").read_text())


def ends(process: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        psutil.Process(process).wait(20)
    return not psutil.pid_exists(process)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def test_a_stopped_rank_is_named_and_ends_the_run(tmp_path: Path) -> None:
    arguments = write(tmp_path)
    done = run(*arguments, "--hang-notice", "1", "--hang-timeout", "3")
    assert done.exit_code == 1, done.output
    process = stopped(tmp_path)
    said = [line for line in done.stderr.splitlines() if f"(process {process} of " in line]
    assert len(said) >= 2, "it says it before it ends"
    pattern = (
        r"(Error: )?the run has made no progress for \d+ s: rank 0 waits in [\w ]+ of step \d "
        rf"for rank 1, which sends no heartbeats \(process {process} of "
    )
    assert all(re.match(pattern, line) for line in said)
    assert "exceeds hang_timeout (3 s), so the run ends. The newest checkpoint" in said[-1]
    resume = f"run: recd run {tmp_path}/registry.yaml --resume"
    assert f"To resume from this checkpoint, {resume}" in said[-1]
    assert "Traceback" not in done.stderr
    assert ends(process)

    # A program of its own: what ranks say goes where its server, which tests share, was started.
    resumed = recd(*arguments, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert re.search(r"^resumed at step [1-6] of", resumed.stderr, re.M)


def test_a_stopped_reader_is_named(tmp_path: Path) -> None:
    done = run(*write(tmp_path), "--workers", "1", "--hang-notice", "1", "--hang-timeout", "3")
    assert done.exit_code == 1, done.output
    process = stopped(tmp_path)
    assert re.search(
        r"rank 0 waits in [\w ]*step \d for rank 1, which is (still )?reading data.* and waits "
        rf"for reader worker \d \(process {process}\)",
        done.stderr,
    )
    os.kill(process, signal.SIGCONT)
    assert ends(process), "its trainer has ended"


def test_a_continued_rank_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Said(io.StringIO):
        def write(self, text: str) -> int:
            if found := re.search(r"sends no heartbeats \(process (\d+)", text):
                os.kill(int(found[1]), signal.SIGCONT)
            return super().write(text)

    arguments = [*write(tmp_path), "--hang-notice", "1", "--json", str(tmp_path / "figures.json")]
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", said := Said())
        main(arguments, standalone_mode=False)
    assert f"(process {stopped(tmp_path)} of " in said.getvalue()
    progress = r"^the run makes progress again, after a pause of \d+ s$"
    assert re.search(progress, said.getvalue(), re.M)
    losses = json.loads((tmp_path / "figures.json").read_text())["losses"]
    assert len(losses) == 8

    (tmp_path / "checkpoints").rename(tmp_path / "before")
    again = run(*arguments)  # the note is there: nothing stops
    assert again.exit_code == 0, again.stderr
    assert json.loads((tmp_path / "figures.json").read_text())["losses"] == losses


def test_under_torchrun_the_other_rank_says_it(tmp_path: Path) -> None:
    arguments = [*write(tmp_path, rank=0), "--hang-notice", "1", "--hang-timeout", "3"]
    done = forked.torchrun([RECD, *arguments], ranks=2)  # ends all at the first failure
    assert done.returncode != 0
    told = re.findall(
        r"^the run has made no progress for .* rank 1 waits in [\w ]+ of step \d for rank 0, "
        rf"which sends no heartbeats \(process {stopped(tmp_path)} of ",
        done.stderr,
        re.M,
    )
    assert len(told) >= 2
    assert "To resume from this checkpoint, run" in done.stderr


SLOW = '''
import time

class Slow(Preprocessing):
    """Takes its time."""
    name = "test.slow"

    def transform(self, values, offsets):
        time.sleep(0.2)
        return values % 2000, offsets
'''


@pytest.mark.parametrize("workers", [0, 1])
def test_the_cause_is_named(tmp_path: Path, workers: int) -> None:
    write_registry(
        tmp_path,
        dataset=papercal(tmp_path, 2048, 256, sparse=["item_0"]),
        converter={"use": "recd.ikjt"},
        preprocessing=[{"use": "test.slow", "features": ["item_0"]}],
        model={"num_embeddings": 2000},
        training={"batch_size": 64, "ranks": 1, "steps": 14, "evaluate": False},
    )
    write_plugins(tmp_path, SLOW, "Slow")
    options = ["--json", tmp_path / "report.json", "--workers", workers, "-v"]
    done = run_with_plugins(tmp_path / "registry.yaml", *options)
    found = json.loads((tmp_path / "report.json").read_text())["stalls"]
    assert found["worst"]["rank"] == 0
    # 14 steps: 5 are left out, and 2 take no batch.
    assert found["steps"] == 7
    shares = found["shares"]
    assert max(shares, key=lambda cause: shares[cause]) == "preprocess"
    (rank,) = found["ranks"]
    assert rank["making"]["preprocess"] >= 0.2
    assert (rank["making"]["arrival"] > 0) == (workers > 0)
    assert found["share"] == pytest.approx(sum(rank["seconds"].values()) / rank["step_seconds"])
    words = " ".join(done.stdout.split())
    assert "waiting for data, share of a step" in words
    assert "mostly for preprocess" in words
