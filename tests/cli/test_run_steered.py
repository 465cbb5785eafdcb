"""`recd run` that is validated, stopped early, ended by signals, and gone on with: bit for bit."""

from __future__ import annotations

import csv
import fcntl
import json
import os
import re
import select
import signal
import subprocess
import termios
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests import forked
from tests.cli import programs
from tests.plugin_files import write_plugins
from tests.small_registry import random_rows, write_registry

RANKS_OF_TORCHRUN = '''
import os, signal

class Ends(Callback):
    """End rank 1 by SIGTERM."""
    name = "acme.ends"

    def on_step(self, step):
        if (step.rank, step.step) == (1, 9):
            os.kill(os.getpid(), signal.SIGTERM)

    def on_interrupt(self, interruption):
        print(f"seen {interruption.by} on {interruption.rank}", flush=True)
'''

# Workers, a schedule, epochs and a test split that fills no batch: what could be disturbed. Ranks
# ask each other after up to 50 steps whether to end: a run that is over by then ends as ever.
STEPS = 120
VALIDATED = {"every": 7}


def write(folder: Path, validation: Any = None, epochs: int = 6, **sections: Any) -> Path:
    tracker = {"use": "trackers.csv", "options": {"path": f"{folder}/run.csv", "every": 4}}
    return write_registry(
        folder,
        dataset=random_rows(640, test_rows=77),
        sharding=[{"use": "torchrec.row_wise", "tables": ["*"]}],
        **{"callbacks": [tracker], **sections},
        training={
            "ranks": 2,
            "epochs": epochs,
            "workers": 1,
            "schedule": {"warmup": 5},
            "device": "auto",
            "checkpoint": {"path": f"{folder}/checkpoints", "every": 10, "keep": 1},
            "validation": validation,
        },
    )


def progress(folder: Path, step: int) -> Any:
    return json.loads((folder / f"checkpoints/step-{step:09}/progress.json").read_text())


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "run.csv").open() as file:
        untimed = list(csv.DictReader(file))
    for row in untimed:
        del row["time"], row["samples_per_second"]
    return untimed


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    report = programs.report_of("run", write(folder, VALIDATED))
    (folder / "losses").write_text(json.dumps(report["losses"]))
    assert report["validation"]["steps"] == [*range(7, STEPS, 7), STEPS]
    assert report["test"]["log_loss"] == pytest.approx(0.75, abs=0.1)
    return folder


def test_validation_changes_no_loss(whole: Path, tmp_path: Path) -> None:
    report = programs.report_of("run", write(tmp_path))
    assert report["validation"] is None
    assert report["losses"] == json.loads((whole / "losses").read_text())


def test_a_run_that_is_ended_goes_on_bit_for_bit(whole: Path, tmp_path: Path) -> None:
    registry = write(tmp_path, VALIDATED)
    program = forked.Program([forked.RECD, "run", registry])
    try:
        while not list(tmp_path.glob("checkpoints/step-*")):
            assert program.poll() is None, program.output()[1]
            time.sleep(0.005)
        started = psutil.Process(program.pid).children(recursive=True)
        program.send_signal(signal.SIGTERM)
        assert program.wait(120) == 128 + signal.SIGTERM
        said = program.output()[1]
        _, alive = psutil.wait_procs(started, timeout=30)
        assert not alive
    finally:
        program.kill_all()
    (step,) = map(int, re.findall(r"SIGTERM: the run was ended after step (\d+)", said))
    assert step < STEPS, "it was over before"
    assert "SIGTERM: every rank finishes its step" in said
    assert f"step-{step:09}. To resume, run: recd run {registry} --resume" in said
    assert "Traceback" not in said
    programs.report_of("run", registry, "--resume")
    assert progress(tmp_path, STEPS) == progress(whole, STEPS)
    assert rows(tmp_path) == rows(whole)


def at_a_terminal() -> None:
    """Have standard input for it, and end with it though tests may run under nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def test_a_terminal_that_goes_leaves_a_checkpoint(tmp_path: Path) -> None:
    registry = write(tmp_path, VALIDATED, epochs=100)
    ours, terminal = os.openpty()
    program = subprocess.Popen(
        [forked.RECD, "run", registry],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
        preexec_fn=at_a_terminal,
    )
    os.close(terminal)
    # The first one by number of steps; the best one of step 7 may be there before it.
    while not any(tmp_path.glob("checkpoints/step-0*[1-9]?")):
        assert program.poll() is None
        if select.select([ours], [], [], 0.005)[0]:
            os.read(ours, 1 << 16)
    started = psutil.Process(program.pid).children(recursive=True)
    os.close(ours)
    assert program.wait(120) == 128 + signal.SIGHUP
    _, alive = psutil.wait_procs(started, timeout=30)
    assert not alive
    newest = int(max(tmp_path.glob("checkpoints/step-*")).name.removeprefix("step-"))
    report = programs.report_of("run", registry, "--resume", "--steps", str(newest + 1))
    assert report["first_step"] == newest >= 10


def test_early_stopping_and_what_follows(tmp_path: Path) -> None:
    validation = {"every": 4, "metric": "calibrated", "mode": "max", "patience": 2}
    registry = write(tmp_path, validation, epochs=1, metrics=[{"use": "acme.falls"}])
    write_plugins(tmp_path, FALLS, "Falls")
    done = programs.run_with_plugins(registry)
    said = done.stderr + " ".join(done.stdout.split())
    assert "step 4, 77 rows of the test split: " in said
    assert "the best calibrated of the validations was -1.00000, after step 4" in said
    assert "stopped early after step 12: calibrated has not improved for 2 validations" in said
    again = programs.run_with_plugins(registry, "--resume")
    assert "training.validation.patience (2) was reached at step 12" in again.stderr
    assert progress(tmp_path, 12)["validation"]["steps"] == [4, 8, 12]
    more = programs.run_with_plugins(registry, "--resume", "training.validation.patience=3")
    assert "There is nothing to train" not in more.stderr
    assert progress(tmp_path, 16)["validation"]["steps"] == [4, 8, 12, 16]


FALLS = '''
class Falls(Metric):
    """A figure that only falls."""
    name = "acme.falls"
    times = 0

    def start(self):
        return 0

    def update(self, state, batch):
        return state

    def results(self, states):
        type(self).times += 1
        return {"calibrated": float(-self.times)}
'''


def test_ranks_of_torchrun_end_together(tmp_path: Path) -> None:
    registry = write(tmp_path, callbacks=[{"use": "acme.ends"}])
    plugins = write_plugins(tmp_path, RANKS_OF_TORCHRUN, "Ends")
    done = forked.torchrun([forked.RECD, "--plugins-dir", plugins, "run", registry], ranks=2)
    assert done.returncode == 128 + signal.SIGTERM
    assert done.stderr.count("the run was ended after step") == 1
    assert sorted(re.findall("seen SIGTERM on (.)", done.stdout)) == ["0", "1"]
    assert list((tmp_path / "checkpoints").glob("step-*"))


SLOW_DATA = '''
import os, signal, time

class Slow(Dataset):
    """Data that takes long to prepare."""
    name = "acme.slow"

    def prepare(self):
        open("half", "w").close()
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        finally:
            os.remove("half")

    def schema(self):
        return FeatureSchema(("user",), (), "label")

    def reader(self, **arguments): ...
'''


def test_sigterm_says_what_it_ended_and_leaves_no_half(cwd: Path) -> None:
    write_plugins(cwd, SLOW_DATA, "Slow")
    training = {"evaluate": False, "checkpoint": {"path": "checkpoints"}}
    registry = write_registry(cwd, dataset={"use": "acme.slow"}, training=training)
    done = programs.run_with_plugins(registry, expect=128 + signal.SIGTERM)
    assert "a signal ended the run before its first step" in done.stderr
    assert not Path("half").exists()
    assert not list(Path("checkpoints").iterdir())
