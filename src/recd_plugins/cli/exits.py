"""How a command ends: by a signal, or by an unexpected error with one message."""

from __future__ import annotations

import errno
import json
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from recd_plugins.report.output import visible
from recd_plugins.runtime.errors import RankError, in_a_line
from recd_plugins.runtime.versions import __version__


class Ended(KeyboardInterrupt):
    """A signal that ends the program, as Ctrl-C does.

    Args:
        number: of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self.signal = number


@contextmanager
def unwinding() -> Iterator[None]:
    """Raise ``Ended`` at SIGTERM and SIGHUP, as Ctrl-C does.

    Ranks of torchrun end at once: they may wait for others, out of reach of exceptions.
    """

    def end(number: int, _: object) -> None:
        raise Ended(number)

    ending = () if "RANK" in os.environ else (signal.SIGTERM, signal.SIGHUP)
    mine = [number for number in ending if signal.getsignal(number) is signal.SIG_DFL]
    for number in mine:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in mine:
            signal.signal(number, signal.SIG_DFL)


#: The exit status of a fault (sysexits' EX_SOFTWARE); mistakes of users end with 1 or 2.
EXIT_STATUS = 70


def fault_message(error: Exception) -> str:
    """Return the message for an unexpected exception; write its traceback to a file."""
    text = "".join(traceback.format_exception(error))
    said = error.what if isinstance(error, RankError) else in_a_line(error)
    return (
        f"this is a fault of recd-plugins {__version__}, or of a library or plugin that it uses: "
        f"{said}\n{_kept(text)}"
    )


def tell_torchrun(message: str) -> None:
    """Have torchrun, if it started this process, print the message in its summary."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        # As torch.distributed.elastic's ErrorHandler writes it, which takes a second to import.
        message = visible(message)
        told = {"py_callstack": message, "timestamp": str(int(time.time()))}
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": {"message": message, "extraInfo": told}}))


def meant_by(error: OSError | UnicodeEncodeError) -> str | None:
    """Return the message for a path or a full disk; None for any other error."""
    if isinstance(error, OSError):
        if error.filename and error.strerror:
            return f"{error.filename}: {error.strerror}"
        full = error.errno == errno.ENOSPC
        return f"{error.strerror}, where files or standard output go" if full else None
    if error.reason != "surrogates not allowed":
        return None
    return (
        f"{error.object}: the name is not UTF-8, and the libraries that read and write files here "
        "take no other; rename the file or folder"
    )


def _kept(text: str) -> str:
    """Write a traceback to a file and name it; return the text if no file can be written."""
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="recd-fault-", suffix=".txt", delete=False, encoding="utf-8",
            errors="surrogateescape",
        ) as file:  # fmt: skip
            file.write(text)
    except OSError:
        return text
    return (
        f"The whole traceback is in {file.name}; please report it. With RECD_TRACEBACK=1 it is "
        "shown at once."
    )
