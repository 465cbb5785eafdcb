"""Simulates cluster nodes as network namespaces of this machine, with links of limited rate.

Each node has its own IP address, host name (``node0``, ``node1``, ...) and link. Ranks of one node
communicate over loopback. All nodes share the processors of this machine. Needs root and
iproute2::

    with ShapedNetwork(4, "200mbit") as network:
        command = network.torchrun(["recd", "run", "registry.yaml"], ranks_per_node=2)
        assert network.run(command, logs) == [0, 0, 0, 0]
        print([link.sent for link in network.counters()])
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Self

from recd_plugins.runtime.errors import SetupError

_PREFIX = "recd-net-"
# ``ip netns exec NAME`` mounts the files of /etc/netns/NAME over those in /etc.
_FILES, _NAMESPACES = Path("/etc/netns"), Path("/run/netns")
_TOOLS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux"}
# Linux may schedule processors per session, and torchrun starts each rank in its own session.
# With four ranks on two processors, one rank waited for up to 34 seconds.
_GROUPING = Path("/proc/sys/kernel/sched_autogroup_enabled")
_SUBNET, _PORT, _INTERFACE = "10.77.0", 29517, "eth0"


@dataclass(frozen=True)
class LinkBytes:
    """Bytes that a node has sent and received, from the counters of its network interface."""

    sent: int
    received: int

    def since(self, before: LinkBytes) -> LinkBytes:
        return LinkBytes(self.sent - before.sent, self.received - before.received)


def link_bytes(*where: str) -> LinkBytes:
    """Read the link counters of this process's node; pass ``-n NAME`` for another namespace."""
    (link,) = json.loads(_tell("ip", *where, "-s", "-j", "link", "show", "dev", _INTERFACE))
    counters = link["stats64"]
    return LinkBytes(counters["tx"]["bytes"], counters["rx"]["bytes"])


@cache
def unavailable() -> str | None:
    """Return why this machine cannot create network namespaces, or None if it can."""
    for tool, package in _TOOLS.items():
        if shutil.which(tool) is None:
            return f"the program {tool!r} is not installed. Install package {package}."
    if os.geteuid() != 0:
        return "network namespaces need root. Run the command as root, for example in a container."
    name = f"{_PREFIX}{os.getpid()}-try"
    try:
        _tell("ip", "netns", "add", name)
        _tell("ip", "-n", name, "link", "add", _INTERFACE, "type", "veth")
        _tell("tc", "-n", name, "qdisc", "add", "dev", _INTERFACE, *_shape("1gbit"))
    except SetupError as error:
        return str(error)
    finally:
        _remove(name)
    return None


class ShapedNetwork:
    """Context manager that creates nodes with links, and kills all their processes on exit.

    Args:
        num_nodes: number of nodes, at most 200.
        rate: bandwidth of each link in each direction, in ``tc`` syntax such as ``200mbit``; None
            means unlimited.

    Raises:
        SetupError: on entering, if this machine cannot create network namespaces.
    """

    def __init__(self, num_nodes: int, rate: str | None = None) -> None:
        self.num_nodes = num_nodes
        self.rate = rate
        name = f"{_PREFIX}{os.getpid()}"
        self._hub = f"{name}-hub"
        self._nodes = [f"{name}-n{node}" for node in range(num_nodes)]
        self._programs: list[subprocess.Popen[bytes]] = []
        self._was_grouped = self._takes_sigterm = False

    def __enter__(self) -> Self:
        if (why := unavailable()) is not None:
            raise SetupError(f"cannot create a shaped network: {why}")
        _remove_leftovers()
        is_main = threading.current_thread() is threading.main_thread()
        self._takes_sigterm = is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        if self._takes_sigterm:
            signal.signal(signal.SIGTERM, _exit)
        try:
            self._make()
            with suppress(OSError):
                self._was_grouped = _GROUPING.read_text() == "1\n"
                _GROUPING.write_text("0\n")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        # A process that has just started may not be in its namespace yet.
        for program in self._programs:
            if program.poll() is None:
                program.kill()
        for node in [*self._nodes, self._hub]:
            _remove(node)
        for program in self._programs:
            program.wait()
        if self._was_grouped:
            _GROUPING.write_text("1\n")
        if self._takes_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def torchrun(
        self, command: Sequence[str], *, ranks_per_node: int = 1, options: Sequence[str] = ()
    ) -> list[list[str]]:
        """Return the torchrun command line of each node to start ``command`` on all ranks.

        The command is a program with arguments. With further torchrun ``options`` instead of
        ``--no-python``, it is a Python module or script.
        """
        return [
            [
                *(sys.executable, "-P", "-m", "torch.distributed.run"),
                *("--nnodes", str(self.num_nodes), "--node-rank", str(node)),
                *("--nproc-per-node", str(ranks_per_node), "--local-addr", self.address(node)),
                *("--master-addr", self.address(0), "--master-port", str(_PORT)),
                *(options or ("--no-python",)),
                *command,
            ]
            for node in range(self.num_nodes)
        ]

    def start(
        self, commands: Sequence[Sequence[str]], logs: Path, environment: Mapping[str, str] = {}
    ) -> list[subprocess.Popen[bytes]]:
        """Start one command line on each node, with additional variables in ``environment``.

        Sets MASTER_ADDR, MASTER_PORT, NODE_RANK, NODES and GLOO_SOCKET_IFNAME for the commands.
        Node 2 appends its output to ``node2.log`` in the folder ``logs``.
        """
        # Ranks compare host names to find out whether they share a machine.
        named = 'hostname "$0" && exec "$@"'
        started = []
        for node, command in enumerate(commands):
            with (logs / f"node{node}.log").open("ab") as log:
                started.append(
                    subprocess.Popen(
                        [
                            *("ip", "netns", "exec", self._nodes[node]),
                            *("unshare", "--uts", "sh", "-c", named, f"node{node}", *command),
                        ],
                        env={
                            **os.environ,
                            "MASTER_ADDR": self.address(0),
                            "MASTER_PORT": str(_PORT),
                            "NODE_RANK": str(node),
                            "NODES": str(self.num_nodes),
                            "GLOO_SOCKET_IFNAME": _INTERFACE,
                            **environment,
                        },
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
                )
        self._programs += started
        return started

    def run(
        self, commands: Sequence[Sequence[str]], logs: Path, environment: Mapping[str, str] = {}
    ) -> list[int]:
        """Start one command per node, wait, and return the exit code of each node."""
        return [program.wait() for program in self.start(commands, logs, environment)]

    def address(self, node: int) -> str:
        return f"{_SUBNET}.{node + 1}"

    def counters(self) -> list[LinkBytes]:
        """Return the bytes sent and received so far, one entry per node."""
        return [link_bytes("-n", node) for node in self._nodes]

    def processes(self, node: int) -> list[int]:
        """Return the process ids of all processes on a node."""
        return _processes(self._nodes[node])

    def cut(self, node: int) -> None:
        """Disconnect the link of a node. Packets sent meanwhile are lost."""
        _tell("ip", "-n", self._hub, "link", "set", f"p{node}", "down")

    def restore(self, node: int) -> None:
        """Reconnect the link of a node."""
        _tell("ip", "-n", self._hub, "link", "set", f"p{node}", "up")

    def lose(self, node: int) -> None:
        """Disconnect a node and kill all its processes, without notifying the other nodes."""
        self.cut(node)
        _kill(self._nodes[node])

    def _make(self) -> None:
        hub = ("ip", "-n", self._hub)
        _tell("ip", "netns", "add", self._hub)
        _tell(*hub, "link", "add", "br0", "type", "bridge")
        _tell(*hub, "link", "set", "br0", "up")
        names = "".join(f"{self.address(node)} node{node}\n" for node in range(self.num_nodes))
        for number, node in enumerate(self._nodes):
            # Use only the hosts file, because a lookup would wait for an unreachable name server.
            files = _FILES / node
            files.mkdir(parents=True)
            (files / "hosts").write_text(f"127.0.0.1 localhost\n{names}", encoding="utf-8")
            (files / "nsswitch.conf").write_text("hosts: files\n", encoding="utf-8")
            ours, port = ("ip", "-n", node), f"p{number}"
            _tell("ip", "netns", "add", node)
            peer = ("peer", "name", port, "netns", self._hub)
            _tell(*("ip", "link", "add", _INTERFACE, "netns", node, "type", "veth"), *peer)
            _tell(*ours, "addr", "add", f"{self.address(number)}/24", "dev", _INTERFACE)
            _tell(*ours, "link", "set", "lo", "up")
            _tell(*ours, "link", "set", _INTERFACE, "up")
            _tell(*hub, "link", "set", port, "master", "br0")
            _tell(*hub, "link", "set", port, "up")
            if self.rate is not None:
                shape = _shape(self.rate)
                _tell("tc", "-n", node, "qdisc", "add", "dev", _INTERFACE, *shape)
                _tell("tc", "-n", self._hub, "qdisc", "add", "dev", port, *shape)


def _exit(number: int, _: Any) -> None:
    """Convert SIGTERM to SystemExit, so that all namespaces are removed."""
    raise SystemExit(128 + number)


def _shape(rate: str) -> tuple[str, ...]:
    """Return ``tc qdisc add`` arguments. Uses tbf, because netem fails in some containers."""
    return ("root", "tbf", "rate", rate, "burst", "128kb", "latency", "400ms")


def _remove_leftovers() -> None:
    """Remove namespaces left by processes that no longer exist."""
    for path in [*_NAMESPACES.glob(f"{_PREFIX}*"), *_FILES.glob(f"{_PREFIX}*")]:
        process = path.name.removeprefix(_PREFIX).partition("-")[0]
        if process == str(os.getpid()) or not Path("/proc", process).exists():
            _remove(path.name)


def _remove(namespace: str) -> None:
    """Kill all processes of a namespace and remove it. Ignores missing namespaces."""
    shutil.rmtree(_FILES / namespace, ignore_errors=True)
    with suppress(SetupError):
        _kill(namespace)
    with suppress(SetupError):
        _tell("ip", "netns", "del", namespace)


def _kill(namespace: str) -> None:
    while processes := _processes(namespace):
        for process in processes:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.01)


def _processes(namespace: str) -> list[int]:
    return [int(line) for line in _tell("ip", "netns", "pids", namespace).split()]


def _tell(*command: str) -> str:
    # Use a separate process group, so that Ctrl-C does not kill the command.
    done = subprocess.run(command, capture_output=True, text=True, check=False, process_group=0)
    if done.returncode:
        raise SetupError(f"{' '.join(command)} failed: {done.stderr.strip()}")
    return done.stdout
