"""Nodes of a run under torchrun that are killed, stopped, cut off and lost: the others end and say
which rank is gone, and what goes on from the checkpoint has the same losses.

By night alone: each fault takes half a minute.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from benchmarks.shaped_network import ShapedNetwork, unavailable
from hypothesis import settings
from tests.forked import RECD
from tests.small_registry import hashed, papercal, write_registry

NODES, STEPS, TIMEOUT = 3, 200, 30
#: How often each is tried in a night, of all that RECD_FAULTS multiplies.
FAULTS = {"kill": 4, "stop": 1, "cut": 1, "lose": 1}
TIMES = int(os.environ.get("RECD_FAULTS", "1"))

pytestmark = [
    pytest.mark.skipif(
        settings.get_current_profile_name() != "nightly", reason="each takes half a minute"
    ),
    pytest.mark.skipif(unavailable() is not None, reason=f"{unavailable()}"),
]


class Run:
    """A run on three nodes that resumes from the checkpoints in ``folder``."""

    def __init__(self, network: ShapedNetwork, folder: Path) -> None:
        self.network = network
        self.folder = folder
        (folder / "logs").mkdir(exist_ok=True)
        training: dict[str, Any] = {"ranks": 3, "epochs": 100, "steps": STEPS, "evaluate": False}
        training |= {"hang_notice": 4, "hang_timeout": TIMEOUT}
        training["checkpoint"] = {"path": f"{folder}/checkpoints", "every": 20}
        registry = write_registry(
            folder,
            dataset=papercal(folder, 512, 32),
            converter={"use": "recd.ikjt"},
            preprocessing=hashed(50),
            model={"num_embeddings": 50, "bag_pooling": "mean"},
            training=training,
        )
        report = str(folder / "figures.json")
        command = [RECD, "run", str(registry), "--resume", "--json", report]
        self.programs = network.start(network.torchrun(command), folder / "logs")

    def reaches(self, step: int) -> None:
        limit = time.monotonic() + 240
        while not (self.folder / "checkpoints" / f"step-{step:09}").exists():
            assert time.monotonic() < limit, self.said()
            assert all(program.poll() is None for program in self.programs), self.said()
            time.sleep(0.1)

    def rank_on(self, node: int) -> int:
        for process in map(psutil.Process, self.network.processes(node)):
            if "RANK" in process.environ() and process.cmdline()[1:2] == [RECD]:
                return process.pid
        raise AssertionError(self.said())

    def said(self) -> str:
        logs = sorted((self.folder / "logs").iterdir())
        return "\n".join(log.read_text(errors="replace") for log in logs)

    def ends(self, nodes: set[int], seconds: float) -> None:
        limit = time.monotonic() + seconds
        for node in nodes:
            try:
                self.programs[node].wait(max(0.1, limit - time.monotonic()))
            except subprocess.TimeoutExpired:
                pytest.fail(f"node {node} still runs after {seconds} s:\n{self.said()}")


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("whole")
    with ShapedNetwork(NODES, "200mbit") as network:
        Run(network, folder).ends({0, 1, 2}, 300)
    found: list[float] = json.loads((folder / "figures.json").read_text())["losses"]
    assert len(found) == STEPS
    return found


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("fault", "number"), [(f, n) for f, times in FAULTS.items() for n in range(times * TIMES)]
)
def test_others_name_the_rank(fault: str, number: int, tmp_path: Path, losses: list[float]) -> None:
    draw = random.Random(time.time_ns() if TIMES > 1 else number)
    node = draw.randrange(NODES)
    with ShapedNetwork(NODES, "200mbit") as network:
        run = Run(network, tmp_path)
        run.reaches(20 * draw.randrange(1, 4))
        time.sleep(draw.random())
        if fault == "cut":
            network.cut(node)
        elif fault == "lose":
            network.lose(node)
        else:
            os.kill(run.rank_on(node), signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
        # A rank that is stopped has nothing to say, and its node waits for it.
        run.ends({0, 1, 2} - ({node} if fault == "stop" else set()), TIMEOUT + 45)
        assert re.search(rf"rank {node}( sends no heartbeats|, which| \()", run.said())
    with ShapedNetwork(NODES, "200mbit") as network:
        again = Run(network, tmp_path)
        again.ends({0, 1, 2}, 300)
        assert "resumed at step" in again.said()
    assert json.loads((tmp_path / "figures.json").read_text())["losses"] == losses
