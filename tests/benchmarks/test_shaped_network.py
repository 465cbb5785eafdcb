import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from benchmarks.shaped_network import ShapedNetwork, unavailable

from benchmarks import shaped_network

needs_network = pytest.mark.skipif(unavailable() is not None, reason=f"{unavailable()}")

# Node 1 sends a megabyte to node 0, and again when it is told to.
TALK = """
import os, socket, sys
if os.environ["NODE_RANK"] == "0":
    with socket.create_server((os.environ["MASTER_ADDR"], 9000)) as server:
        talk, _ = server.accept()
        for left in (1_000_000, 1):
            while left > 0:
                left -= len(talk.recv(min(left, 1 << 16)))
            print(socket.gethostname(), flush=True)
else:
    import time
    for _ in range(200):
        try:
            talk = socket.create_connection((os.environ["MASTER_ADDR"], 9000))
            break
        except OSError:
            time.sleep(0.05)
    talk.sendall(bytes(1_000_000))
    time.sleep(1.5)
    talk.sendall(b"1")
"""


def names() -> list[str]:
    told = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return [line.split()[0] for line in told.stdout.splitlines() if line.startswith("recd-net-")]


@needs_network
def test_links_are_shaped_counted_and_cut(tmp_path: Path) -> None:
    command = [sys.executable, "-c", TALK]
    with ShapedNetwork(2, "20mbit") as network:
        before, started = network.counters(), time.monotonic()
        programs = network.start([command, command], tmp_path)
        log = tmp_path / "node0.log"
        while "node0" not in log.read_text():
            assert time.monotonic() < started + 30
            time.sleep(0.02)
        # 8 Mbit less the burst at 20 Mbit a second.
        assert time.monotonic() - started > 0.3
        sent = network.counters()[1].since(before[1]).sent
        assert 1_000_000 < sent < 1_050_000
        network.cut(1)
        time.sleep(2.2)
        assert log.read_text() == "node0\n"
        network.restore(1)
        assert [program.wait(20) for program in programs] == [0, 0]
        assert log.read_text() == "node0\nnode0\n"
        _, lost = network.start([["true"], ["sleep", "60"]], tmp_path)
        network.lose(1)
        assert lost.wait(5) == -signal.SIGKILL
    assert not [name for name in names() if f"-{os.getpid()}-" in name]


@needs_network
def test_who_takes_sigterm_already_keeps_it() -> None:
    def mine(*_: object) -> None:
        """Takes it."""

    before = signal.signal(signal.SIGTERM, mine)
    try:
        with ShapedNetwork(1):
            assert signal.getsignal(signal.SIGTERM) is mine
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)


@needs_network
def test_sigterm_leaves_nothing_and_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    code = (
        "import pathlib, sys, time\n"
        "from benchmarks.shaped_network import ShapedNetwork\n"
        "with ShapedNetwork(1) as network:\n"
        "    network.start([['sleep', '600']], pathlib.Path(sys.argv[1]))\n"
        "    print('there', flush=True)\n"
        # In one long sleep, a signal that comes as it begins is heard when it ends.
        "    while True: time.sleep(0.1)\n"
    )
    for number in (signal.SIGTERM, signal.SIGKILL):
        program = subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)],
            cwd=Path(__file__).parents[2],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert program.stdout.readline() == "there\n"
        program.send_signal(number)
        assert program.wait(60) == (143 if number == signal.SIGTERM else -signal.SIGKILL)
        program.stdout.close()
        left = [name for name in names() if f"-{program.pid}-" in name]
        assert bool(left) == (number == signal.SIGKILL)
    with ShapedNetwork(1):
        assert not [name for name in names() if f"-{program.pid}-" in name]


@needs_network
def test_sessions_are_grouped_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grouping = tmp_path / "sched_autogroup_enabled"
    monkeypatch.setattr(shaped_network, "_GROUPING", grouping)
    for before in ("1\n", "0\n"):
        grouping.write_text(before)
        with ShapedNetwork(1):
            assert grouping.read_text() == "0\n"
        assert grouping.read_text() == before


@needs_network
def test_what_a_restart_left_is_removed() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    stale = [
        folder / f"recd-net-{process}-n0"
        for process in (gone.pid, os.getpid())
        for folder in (shaped_network._FILES, shaped_network._NAMESPACES)
    ]
    for folder, file in zip(stale[::2], stale[1::2], strict=True):
        folder.mkdir(parents=True)
        (folder / "hosts").touch()
        file.parent.mkdir(exist_ok=True)
        file.touch()
    with ShapedNetwork(1) as network:
        assert [path.exists() for path in stale] == [False, False, True, True]
        assert network.counters()[0].sent >= 0
    assert not any(path.exists() for path in stale)
