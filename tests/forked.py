"""Programs of tests, forked from a server with all imports to save 4 s each.

Each has its own session, environment, folder, output, exit code, ranks and workers. Tests of the
start itself (imports, installed commands, torchrun, limits of memory) use ``subprocess``.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import connection, forkserver
from pathlib import Path

import torch
from torch.distributed import TCPStore

from recd_plugins.cli import main

RECD = str(Path(sys.executable).with_name("recd"))


class Program:
    """Running program, similar to ``subprocess.Popen``; its process id is that of its session.

    ``command`` is ``[RECD, ...]``, or Python with a script, ``-c CODE`` or ``-m MODULE``.
    """

    def __init__(
        self,
        command: Sequence[object],
        *,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._output = tempfile.TemporaryDirectory(prefix="program")
        self._streams = [Path(self._output.name) / name for name in ("stdout", "stderr")]
        for path in self._streams:
            path.touch()
        context = multiprocessing.get_context("forkserver")
        self._process = context.Process(
            target=_be,
            args=(
                [str(part) for part in command],
                str(cwd or Path.cwd()),
                dict(os.environ if env is None else env),
                [str(path) for path in self._streams],
                torch.cuda.is_available(),
            ),
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def kill_all(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.join()

    def first_line(self) -> str:
        while True:
            ended = self.poll() is not None
            line, newline, _ = self.output()[0].partition("\n")
            if newline:
                return line + newline
            assert not ended, self.output()[1]
            time.sleep(0.01)

    def output(self) -> tuple[str, str]:
        stdout, stderr = (path.read_text(encoding="utf-8") for path in self._streams)
        return stdout, stderr


def run(
    command: Sequence[object],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 240,
    check: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run a program, as ``subprocess.run`` with captured text output."""
    program = Program(command, cwd=cwd, env=env)
    try:
        code = program.wait(timeout)
    except BaseException:
        program.kill_all()
        raise
    done = subprocess.CompletedProcess([*map(str, command)], code, *program.output())
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


def imported_anew(code: str, *packages: str) -> list[str]:
    """Run a program that forgets modules whose names start so; return what it imports of them."""
    forget = f"""
import sys
def known(): return [name for name in sys.modules if name.startswith({packages})]
for name in known(): del sys.modules[name]
"""
    program = [sys.executable, "-c", f"{forget}{code}\nprint(*known())"]
    return run(program, check=True).stdout.splitlines()[-1].split()


def torchrun(
    command: Sequence[object],
    *,
    ranks: int,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run the ranks that ``torchrun --standalone --nproc-per-node RANKS COMMAND`` starts.

    The exit code is that of the first failed rank, which ends a rank that is stopped. The ranks'
    store is in this process, as in torchrun's agent.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port, "OMP_NUM_THREADS": 1,
        "TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0,
    }  # fmt: skip
    programs = []
    for rank in range(ranks):
        environ = {name: str(value) for name, value in shared.items()}
        environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        programs.append(Program(command, cwd=cwd, env={**(env or os.environ), **environ}))
    try:
        codes = [_code(program, programs) for program in programs]
    finally:
        for program in programs:
            program.kill_all()
    outputs = [program.output() for program in programs]
    stdout, stderr = ("".join(output[stream] for output in outputs) for stream in (0, 1))
    return subprocess.CompletedProcess(
        [*map(str, command)], next(filter(None, codes), 0), stdout, stderr
    )


def _code(program: Program, programs: Sequence[Program]) -> int:
    """Wait for a rank. torchrun kills ranks that do not end soon after another has failed."""
    limit = time.monotonic() + 240
    while (code := program.poll()) is None:
        assert time.monotonic() < limit
        if any(other.poll() for other in programs):
            with suppress(subprocess.TimeoutExpired):
                program.wait(5)
            program.kill_all()
        time.sleep(0.05)
    return code


def _be(command: list[str], cwd: str, env: dict[str, str], streams: list[str], cuda: bool) -> None:
    os.setsid()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    for number, path in enumerate(streams, start=1):
        file = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    if cuda:  # which does not survive a fork
        os.execve(command[0], command, env)
    sys.stdout, sys.stderr = (
        open(number, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        for number in (1, 2)
    )
    _have_a_server()
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    sys.path[:0] = env.get("PYTHONPATH", "").split(os.pathsep)
    program, *arguments = command
    if program == RECD:
        sys.argv = command
        main(prog_name="recd")
        return
    assert program == sys.executable, program
    if arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        sys.path.insert(0, "")
        exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
    elif arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path.insert(0, cwd)
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        script = Path(arguments[0]).resolve()
        sys.path.insert(0, str(script.parent))
        runpy.run_path(str(script), run_name="__main__")


def _have_a_server() -> None:
    """Fork the server of this process's ranks and workers, unlike ``ForkServer.ensure_running``."""
    server = forkserver._forkserver
    server.__init__()  # type: ignore[misc]
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(connection.arbitrary_address("AF_UNIX"))
    listener.listen()
    alive_here, alive_there = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(alive_there)
        try:
            forkserver.main(listener.detach(), alive_here, [])
        finally:
            os._exit(0)
    os.close(alive_here)
    vars(server).update(
        _forkserver_address=listener.getsockname(),
        _forkserver_alive_fd=alive_there,
        _forkserver_pid=pid,
    )
    listener.close()
