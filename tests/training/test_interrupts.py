from __future__ import annotations

import os
import signal
import subprocess
import time
from multiprocessing.util import Finalize
from typing import Any

import pytest

from recd_plugins.runtime.errors import RunInterrupted, SetupError
from recd_plugins.runtime.launch import launch
from recd_plugins.runtime.signals import Interrupts, passed_on
from recd_plugins.testing.gloo import run_on_ranks


def steps_until_asked(rank: int, world_size: int) -> tuple[int, int]:
    with Interrupts(rank, world_size) as interrupts:
        for step in range(1, 1000):
            if rank == 1 and step == 20:
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.001 * rank)
            if number := interrupts.asked():
                return step, number
    raise AssertionError("nobody was asked")


def asked_at_its_end(rank: int, _world_size: int, command: int) -> int:
    if rank == 0:
        Finalize(None, os.kill, (command, signal.SIGTERM), exitpriority=10)
    return rank


def test_all_ranks_end_after_the_same_step() -> None:
    (step, number), other = run_on_ranks(steps_until_asked, 2)
    assert (step, number) == other
    assert number == signal.SIGTERM
    assert 20 <= step <= 120


def test_what_was_there_before_comes_back(capfd: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Interrupts(0, 1) as interrupts:
        assert interrupts.asked() == 0
        os.kill(os.getpid(), signal.SIGTERM)
        deadline = time.monotonic() + 10
        while not interrupts.asked() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert interrupts.asked() == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before
    assert "SIGTERM: every rank finishes its step" in capfd.readouterr().err


@pytest.fixture
def rank() -> Any:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


def run_ranks(rank: Any, signals: int, error: Exception) -> None:
    with passed_on([rank]):
        for _ in range(signals):
            os.kill(os.getpid(), signal.SIGTERM)
        assert not signals or rank.wait(10) == -signal.SIGTERM
        raise error


def test_the_first_is_passed_on(rank: Any, capfd: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    of_rank = RunInterrupted.by(signal.SIGINT, "the run was ended after step 3")
    with pytest.raises(RunInterrupted, match="SIGTERM: the run was ended after step 3"):
        run_ranks(rank, 1, of_rank)
    assert signal.getsignal(signal.SIGTERM) is before
    with pytest.raises(RunInterrupted, match="before its first step"):
        run_ranks(rank, 1, SetupError("rank 0 was killed by SIGTERM"))
    with pytest.raises(SetupError, match="another one"):
        run_ranks(rank, 0, SetupError("another one"))
    assert "A second signal ends the run" in capfd.readouterr().err


def test_the_second_ends_them(rank: Any) -> None:
    with pytest.raises(RunInterrupted, match="ended the run"):
        run_ranks(rank, 2, RuntimeError("not reached"))


def test_a_signal_while_ranks_end_leaves_their_results(capfd: pytest.CaptureFixture[str]) -> None:
    results = launch(asked_at_its_end, 2, os.getpid(), interruptible=True)
    assert results == [0, 1]
    assert "SIGTERM: every rank" in capfd.readouterr().err
