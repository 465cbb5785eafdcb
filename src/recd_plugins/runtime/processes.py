"""What the processes that this package starts have in common, ranks and reader workers."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import wait
from typing import TypeVar

import psutil

from recd_plugins.runtime.errors import RecdError

_SAFE_PATH = "PYTHONSAFEPATH"
# Seconds for a fork server that closes its socket to end.
_END_SECONDS = 2.0
_STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)

E = TypeVar("E", bound=Exception)


def end_with_parent() -> None:
    """End this process, from now on, when the one that started it does, however that ends.

    Called first in a reader that multiprocessing or a pool of ``concurrent.futures`` starts: a
    trainer that is killed closes no feed.

    Raises:
        RuntimeError: multiprocessing has not started this process.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        raise RuntimeError(
            "end_with_parent is called in the process that was started, by multiprocessing, as "
            "ProcessPoolExecutor(initializer=end_with_parent) does; this one is none"
        )
    sentinel = parent.sentinel

    def watch() -> None:
        wait([sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="parent watch").start()


def is_stopped(process: int) -> bool:
    """Whether a process of this machine is stopped, as by SIGSTOP or a debugger."""
    try:
        return psutil.Process(process).status() in _STOPPED
    except psutil.Error:
        return False


def kill_stopped_below(process: int) -> None:
    """Kill the stopped descendants of a process, which would not notice that it ends."""
    with suppress(psutil.Error):
        for child in psutil.Process(process).children(recursive=True):
            with suppress(psutil.Error):
                if child.status() in _STOPPED:
                    child.kill()


@contextmanager
def safe_path() -> Iterator[None]:
    """Keep the current folder off ``sys.path`` of interpreters that start in this context.

    multiprocessing starts them by ``python -c``, which would import a module of that folder in
    place of an installed one. Each process takes over the ``sys.path`` of its parent later.
    """
    before = os.environ.get(_SAFE_PATH)
    os.environ[_SAFE_PATH] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_SAFE_PATH]
        else:
            os.environ[_SAFE_PATH] = before


def adopt_environ(environ: Mapping[str, str]) -> None:
    """Take over the environment that the parent had outside ``safe_path``."""
    os.environ.pop(_SAFE_PATH, None)
    os.environ.update(environ)


def start_fork_server() -> None:
    """Start what processes are forked from, unless this process has it already.

    It stays where a terminal goes, as do what is forked from it and what tracks their memory.
    """
    # Whether there is a GPU is asked at import. By NVML that does not start CUDA, which would be of
    # no use in what is forked.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    if threading.current_thread() is not threading.main_thread():
        with safe_path():
            forkserver._forkserver.ensure_running()  # signals are the main thread's
        return
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with safe_path():
            forkserver._forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGHUP, before)


def share_fork_server() -> None:
    """Have what this process starts forked from the server that it was forked from itself.

    multiprocessing promises as much, but looks for a server that this very process started, and
    would start another, which imports everything again (3.11 to 3.14, where only ``_forkserver``
    knows of the server).
    """
    server = forkserver._forkserver
    if server._forkserver_address is not None:  # type: ignore[attr-defined]
        server.ensure_running = resource_tracker.ensure_running  # type: ignore[method-assign]


def portable(error: E) -> E | RecdError:
    """The error itself where pickle brings it across, else its message."""
    try:
        survives = str(pickle.loads(pickle.dumps(error))) == str(error)
    except Exception:  # a plugin's error may raise anything when it is made anew
        survives = False
    return error if survives else RecdError(str(error))
