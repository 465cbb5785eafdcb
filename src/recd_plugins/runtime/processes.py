"""Helpers for the child processes of a run: ranks and readers."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import wait
from typing import TypeVar

from recd_plugins.runtime.errors import RecdError

_SAFE_PATH = "PYTHONSAFEPATH"
_OF_TERMINAL = (signal.SIGINT, signal.SIGHUP)

E = TypeVar("E", bound=Exception)


def end_with_parent() -> None:
    """Make this process exit when its parent process ends, even if the parent is killed.

    Call it at the start of a child process, for example with
    ``ProcessPoolExecutor(initializer=end_with_parent)``.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None, "call end_with_parent in a process that multiprocessing started"
    sentinel = parent.sentinel

    def watch() -> None:
        wait([sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="parent watch").start()


@contextmanager
def safe_path() -> Iterator[None]:
    """Remove the current folder from ``sys.path`` of interpreters that start in this context.

    multiprocessing runs ``python -c``, which would otherwise import modules of the current folder.
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
    """Set the parent's environment variables in a process that was started in ``safe_path``."""
    os.environ.pop(_SAFE_PATH, None)
    os.environ.update(environ)


def ignore_terminal() -> None:
    """Make a child process ignore Ctrl-C and the closing of the terminal, which its parent handles.

    Undoes the blocking of ``terminal_blocked``, in which this process was started.
    """
    for number in _OF_TERMINAL:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _OF_TERMINAL)


@contextmanager
def terminal_blocked() -> Iterator[None]:
    """Block signals of the terminal in processes that start in this context.

    They call ``ignore_terminal``. Until then, imports cannot fail with a KeyboardInterrupt.
    """
    resource_tracker.ensure_running()  # unblocks SIGINT in this process
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _OF_TERMINAL)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start_fork_server() -> None:
    """Start multiprocessing's fork server if needed. It and its children ignore Ctrl-C."""
    # Imports check for a GPU. NVML answers without initializing CUDA, which forks would break.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    with safe_path(), terminal_blocked():
        forkserver._forkserver.ensure_running()


def share_fork_server() -> None:
    """Make this process fork its children from the fork server that forked this process.

    By default, multiprocessing (3.11 to 3.14) starts another server, which repeats all imports.
    """
    server = forkserver._forkserver
    if server._forkserver_address is not None:  # type: ignore[attr-defined]
        server.ensure_running = resource_tracker.ensure_running  # type: ignore[method-assign]


def portable(error: E) -> E | RecdError:
    """Return the error if it survives pickling, otherwise a RecdError with its message."""
    try:
        survives = str(pickle.loads(pickle.dumps(error))) == str(error)
    except Exception:  # any error of a foreign __reduce__: the message still arrives
        survives = False
    return error if survives else RecdError(str(error))
