"""Handles signals and unexpected exceptions of ``recd`` commands."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from recd_plugins.report.output import visible
from recd_plugins.runtime.errors import FAILED_CALL, RankError, RunInterrupted, in_a_line
from recd_plugins.runtime.versions import __version__


class Ended(KeyboardInterrupt):
    """Raised when a signal such as SIGTERM ends the program.

    Args:
        number: number of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self.signal = number


def _send_again(unraisable: sys.UnraisableHookArgs) -> None:
    """Send a signal again if Python ignores its exception, which was raised in a destructor."""
    error = unraisable.exc_value
    if isinstance(error, KeyboardInterrupt | RunInterrupted):
        number = getattr(error, "signal", signal.SIGINT)
        threading.Timer(0.05, os.kill, (os.getpid(), number)).start()
    else:
        sys.__unraisablehook__(unraisable)


@contextmanager
def unwinding() -> Iterator[None]:
    """Raise ``Ended`` on SIGTERM and SIGHUP within this context, so that ``finally`` blocks run.

    Destructors ignore exceptions, so exceptions of signals are then raised again. Under torchrun
    the default signal handlers stay: they end the process immediately, because an exception cannot
    interrupt a rank that waits in a collective.
    """

    def end(number: int, _: object) -> None:
        raise Ended(number)

    ending = () if "RANK" in os.environ else (signal.SIGTERM, signal.SIGHUP)
    mine = [number for number in ending if signal.getsignal(number) is signal.SIG_DFL]
    for number in mine:
        signal.signal(number, end)
    before, sys.unraisablehook = sys.unraisablehook, _send_again
    try:
        yield
    finally:
        sys.unraisablehook = before
        for number in mine:
            signal.signal(number, signal.SIG_DFL)


#: The exit status of an internal error (EX_SOFTWARE of sysexits). User errors exit with 1 or 2.
EXIT_STATUS = 70


def fault_message(error: Exception) -> str:
    """Write the traceback of an unexpected exception to a file and return a short message."""
    text = "".join(traceback.format_exception(error))
    said = error.what if isinstance(error, RankError) else in_a_line(error)
    if hasattr(error, FAILED_CALL):
        advice = "If you did not write this plugin, report the error to its authors"
        return f"{said}\n{_save_traceback(text, advice)}"
    return (
        f"internal error in recd-plugins {__version__}, or in a library or plugin that it uses: "
        f"{said}\n{_save_traceback(text, 'Please report this error')}"
    )


def tell_torchrun(message: str) -> None:
    """Write ``message`` to torchrun's error file, so that torchrun prints it in its summary.

    Does nothing if torchrun did not start this process.
    """
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        # The format of torch.distributed.elastic's ErrorHandler, whose import takes a second.
        message = visible(message)
        told = {"py_callstack": message, "timestamp": str(int(time.time()))}
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": {"message": message, "extraInfo": told}}))


def meant_by(error: OSError | UnicodeEncodeError) -> str | None:
    """Return a message for the user if the error is about a path or a full disk, else None."""
    if isinstance(error, OSError):
        if error.filename and error.strerror:
            return f"{error.filename}: {error.strerror}"
        full = error.errno == errno.ENOSPC
        return f"{error.strerror}. Free some space for output files." if full else None
    if error.reason != "surrogates not allowed":
        return None
    return (
        f"{error.object}: the name is not valid UTF-8, which the libraries that read and write "
        "files require. Rename the file or folder."
    )


def _save_traceback(text: str, advice: str) -> str:
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="recd-fault-", suffix=".txt", delete=False, encoding="utf-8",
            errors="surrogateescape",
        ) as file:  # fmt: skip
            file.write(text)
    except OSError:
        return text
    return (
        f"The full traceback is in {file.name}. {advice} and attach the file. Set "
        "RECD_TRACEBACK=1 to print tracebacks instead."
    )
