"""Nodes of a cluster as network namespaces of this machine, joined by links of a rate.

What runs on them sees a network as between machines: each node has its address, its host name
(``node0`` and so on, which the others can look up) and a link of its own, and what ranks of one
node send each other takes its loopback. Processors, which nodes share here, are divided among
ranks evenly: while there are nodes, Linux does not group processes by session
(``kernel.sched_autogroup_enabled``), which had a rank wait for seconds. Needs root and iproute2
(``tc tbf`` works in containers where netem does not); ``unavailable`` says what is missing::

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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Self

from recd_plugins.errors import SetupError

__all__ = ["LinkBytes", "ShapedNetwork", "link_bytes", "unavailable"]

_PREFIX = "recd-net-"
#: ``ip netns exec`` puts what lies here, by namespace, over the files in /etc.
_FILES, _NAMESPACES = Path("/etc/netns"), Path("/run/netns")
_TOOLS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux"}
# Whether Linux groups processes by session, and what each network that is there has found.
_GROUPING, _NOTES = Path("/proc/sys/kernel/sched_autogroup_enabled"), Path("/run")
_GROUPED = "-sessions-grouped"
_SUBNET = "10.77.0"
_PORT = 29517
#: Of each node.
INTERFACE = "eth0"
# Of a packet: Ethernet 14, IPv4 20, TCP 20 and its timestamps 12.
_HEADER_BYTES = 66


@dataclass(frozen=True)
class LinkBytes:
    """Bytes of a node's link so far, by the counters of its interface, headers included.

    Attributes:
        sent: by the node.
        received: by it.
        packets: that it sent; TCP's acknowledgements are some.
    """

    sent: int
    received: int
    packets: int

    @property
    def payload(self) -> int:
        """Bytes that the node sent, without the headers of packets."""
        return self.sent - _HEADER_BYTES * self.packets

    def since(self, before: LinkBytes) -> LinkBytes:
        """Those since an earlier reading."""
        return LinkBytes(
            self.sent - before.sent,
            self.received - before.received,
            self.packets - before.packets,
        )


def link_bytes(*where: str) -> LinkBytes:
    """Counters of the link of the node that this process is on.

    Args:
        where: arguments of ``ip`` that name another namespace.
    """
    (link,) = json.loads(_tell("ip", *where, "-s", "-j", "link", "show", "dev", INTERFACE))
    counters = link["stats64"]
    sent = counters["tx"]
    return LinkBytes(sent["bytes"], counters["rx"]["bytes"], sent["packets"])


@cache
def unavailable() -> str | None:
    """Why there can be no shaped network on this machine; None where there can be."""
    for tool, package in _TOOLS.items():
        if shutil.which(tool) is None:
            return f"the program {tool} is missing; install {package}"
    if os.geteuid() != 0:
        return "network namespaces need root; run it as root, in a container of your own if need be"
    name = f"{_PREFIX}{os.getpid()}-try"
    try:
        _tell("ip", "netns", "add", name)
        _tell("ip", "-n", name, "link", "add", INTERFACE, "type", "veth")
        _tell("tc", "-n", name, "qdisc", "add", "dev", INTERFACE, *_shape("1gbit"))
    except SetupError as error:
        return str(error)
    finally:
        _remove(name)
    return None


class ShapedNetwork:
    """A context in which there are nodes, with links of one rate.

    At its end, on an error, on Ctrl-C and on SIGTERM all processes on the nodes are killed and the
    nodes are removed; sessions are grouped again if they were. What a killed process left is put in
    order by the next one.

    Args:
        num_nodes: at most 200.
        rate: of each link in each direction, as ``tc`` takes it (``200mbit``); None for unshaped.

    Raises:
        SetupError: this machine has no such networks; on entering.
    """

    def __init__(self, num_nodes: int, rate: str | None = None) -> None:
        self.num_nodes = num_nodes
        self.rate = rate
        name = f"{_PREFIX}{os.getpid()}"
        self._hub = f"{name}-hub"
        self._nodes = [f"{name}-n{node}" for node in range(num_nodes)]
        self._note = _NOTES / f"{name}{_GROUPED}"
        self._programs: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        if (why := unavailable()) is not None:
            raise SetupError(f"no shaped network: {why}")
        _remove_leftovers()
        self._ending = _ended_by_sigterm()
        self._ending.__enter__()
        try:
            self._make()
            _ungroup_sessions(self._note)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            with _signals_wait():
                # One that has just started may not be on its node yet.
                for program in self._programs:
                    if program.poll() is None:
                        program.kill()
                for node in [*self._nodes, self._hub]:
                    _remove(node)
                for program in self._programs:
                    program.wait()
                _group_again(self._note)
        finally:
            self._ending.__exit__(None, None, None)

    def torchrun(
        self, command: Sequence[str], *, ranks_per_node: int = 1, options: Sequence[str] = ()
    ) -> list[list[str]]:
        """The command line of each node that starts ``command`` on ranks of all of them.

        Args:
            command: a program; or a module or script of Python with the ``options`` for it.
            ranks_per_node: processes.
            options: further ones of torchrun; ``--no-python`` without any.
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
        """Start a command on each node.

        They see MASTER_ADDR, MASTER_PORT, NODE_RANK, NODES and GLOO_SOCKET_IFNAME.

        Args:
            commands: by node.
            logs: a folder; what node 2 writes comes into ``node2.log``, after what is there.
            environment: further variables.
        """
        return [
            self.start_on(node, command, logs, environment) for node, command in enumerate(commands)
        ]

    def start_on(
        self, node: int, command: Sequence[str], logs: Path, environment: Mapping[str, str] = {}
    ) -> subprocess.Popen[bytes]:
        """Start a command on one node, as ``start`` does on all."""
        # A host name of its own: by it ranks tell whether they share a machine.
        named = 'hostname "$0" && exec "$@"'
        with (logs / f"node{node}.log").open("ab") as log:
            program = subprocess.Popen(
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
                    "GLOO_SOCKET_IFNAME": INTERFACE,
                    **environment,
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._programs.append(program)
        return program

    def run(
        self,
        commands: Sequence[Sequence[str]],
        logs: Path,
        environment: Mapping[str, str] = {},
        timeout: float | None = None,
    ) -> list[int]:
        """``start``, and the exit codes of all nodes; one that fails does not end the others.

        Raises:
            TimeoutExpired: they take longer than ``timeout`` seconds; of ``subprocess``.
        """
        started = time.monotonic()
        programs = self.start(commands, logs, environment)
        return [
            program.wait(None if timeout is None else started + timeout - time.monotonic())
            for program in programs
        ]

    def address(self, node: int) -> str:
        """IP address of a node."""
        return f"{_SUBNET}.{node + 1}"

    def counters(self) -> list[LinkBytes]:
        """Bytes of the links so far, by node."""
        return [link_bytes("-n", node) for node in self._nodes]

    def processes(self, node: int) -> list[int]:
        """Process ids of all that runs on a node."""
        return _processes(self._nodes[node])

    def cut(self, node: int) -> None:
        """Take the link of a node down; what is sent meanwhile is lost."""
        _tell("ip", "-n", self._hub, "link", "set", f"p{node}", "down")

    def restore(self, node: int) -> None:
        """Take it up again."""
        _tell("ip", "-n", self._hub, "link", "set", f"p{node}", "up")

    def lose(self, node: int) -> None:
        """Cut a node off and kill all that runs on it: nobody on the others is told."""
        self.cut(node)
        _kill(self._nodes[node])

    def _make(self) -> None:
        hub = ("ip", "-n", self._hub)
        _tell("ip", "netns", "add", self._hub)
        _tell(*hub, "link", "add", "br0", "type", "bridge")
        _tell(*hub, "link", "set", "br0", "up")
        names = "".join(f"{self.address(node)} node{node}\n" for node in range(self.num_nodes))
        for number, node in enumerate(self._nodes):
            # No name server can be reached: who looks a name up would wait for it.
            files = _FILES / node
            files.mkdir(parents=True)
            (files / "hosts").write_text(f"127.0.0.1 localhost\n{names}", encoding="utf-8")
            (files / "nsswitch.conf").write_text("hosts: files\n", encoding="utf-8")
            ours, port = ("ip", "-n", node), f"p{number}"
            _tell("ip", "netns", "add", node)
            peer = ("peer", "name", port, "netns", self._hub)
            _tell(*("ip", "link", "add", INTERFACE, "netns", node, "type", "veth"), *peer)
            _tell(*ours, "addr", "add", f"{self.address(number)}/24", "dev", INTERFACE)
            _tell(*ours, "link", "set", "lo", "up")
            _tell(*ours, "link", "set", INTERFACE, "up")
            _tell(*hub, "link", "set", port, "master", "br0")
            _tell(*hub, "link", "set", port, "up")
            if self.rate is not None:
                shape = _shape(self.rate)
                _tell("tc", "-n", node, "qdisc", "add", "dev", INTERFACE, *shape)
                _tell("tc", "-n", self._hub, "qdisc", "add", "dev", port, *shape)


def _ungroup_sessions(note: Path) -> None:
    """Divide processors among processes, not sessions, until ``_group_again``.

    Of four ranks of gloo in a session each, as torchrun starts them, that computed until a barrier
    was over, Linux 6.18 gave one of two processors to one rank alone, and another rank none, for up
    to 34 seconds; loops without threads got even parts. Where it groups none, or lets nobody say
    so, all stays as it is.
    """
    with suppress(OSError):
        note.write_text("0\n")  # before it is looked at: who ends now leaves it to this network
        if _GROUPING.read_text() == "1\n":
            note.write_text("1\n")
            _GROUPING.write_text("0\n")


def _group_again(note: Path) -> None:
    """Undo it, or leave that to another network that is there."""
    if not note.exists():
        return
    is_grouped = note.read_text() != "0\n"
    note.unlink(missing_ok=True)
    if is_grouped:
        others = (each for each in _notes() if not _is_left(each))
        with suppress(OSError):
            next(others, _GROUPING).write_text("1\n")


def _notes() -> list[Path]:
    return sorted(_NOTES.glob(f"{_PREFIX}*{_GROUPED}"))


def _shape(rate: str) -> tuple[str, ...]:
    """Arguments of ``tc qdisc add``."""
    return ("root", "tbf", "rate", rate, "burst", "128kb", "latency", "400ms")


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """A context that SIGTERM leaves by an exception, so that nothing stays behind.

    Where somebody takes it already, as ``recd`` does, it is theirs.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def end(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def _signals_wait() -> Iterator[None]:
    """A context that Ctrl-C and SIGTERM let come to its end: a second one would leave nodes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []

    def wait(number: int, _: FrameType | None) -> None:
        came.append(number)

    before = {number: signal.signal(number, wait) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for first in came[:1]:
            signal.raise_signal(first)


def _remove_leftovers() -> None:
    """Remove the nodes of processes that are gone, and have sessions grouped as these had."""
    for note in _notes():
        if _is_left(note):
            _group_again(note)
    for folder in (_NAMESPACES, _FILES):
        for path in folder.glob(f"{_PREFIX}*"):
            if _is_left(path):
                _remove(path.name)


def _is_left(path: Path) -> bool:
    """Whether the process of a namespace or note is gone, be it that ours has its number."""
    process = path.name.removeprefix(_PREFIX).partition("-")[0]
    return process == str(os.getpid()) or not Path("/proc", process).exists()


def _remove(namespace: str) -> None:
    """Kill what runs there and remove it, as far as it is there."""
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
    # Of a group of its own, which Ctrl-C of the terminal does not end.
    done = subprocess.run(command, capture_output=True, text=True, check=False, process_group=0)
    if done.returncode:
        raise SetupError(f"{' '.join(command)} failed: {done.stderr.strip()}")
    return done.stdout
