"""Exceptions with messages for users. ``recd`` prints them without a traceback."""

from __future__ import annotations

import re
import signal
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


class RecdError(Exception):
    """Base class of exceptions that the user can fix. The message says how."""


class PluginError(RecdError):
    """Raised if a plugin cannot be loaded, or if two plugins have the same name."""


class DataError(RecdError):
    """Raised for invalid input data. The message names the file, column, row or value."""


class SetupError(RecdError):
    """Raised if the hardware, installed packages or configuration cannot run the request."""


class RunInterrupted(RecdError):
    """Raised if a signal such as SIGINT ended a run early.

    Attributes:
        signal: number of the signal. The command exits with code 128 plus this number.
        resumable: whether ``recd run --resume`` can continue the run from a checkpoint.
    """

    signal: int = signal.SIGINT
    resumable: bool = False

    @classmethod
    def by(cls, number: int, what: str, *, resumable: bool = False) -> RunInterrupted:
        """Create the exception. ``number`` is the signal number, and ``what`` the message."""
        error = cls(what)
        error.signal, error.resumable = number, resumable
        return error

    def __str__(self) -> str:
        return f"{signal.Signals(self.signal).name}: {super().__str__()}"


class RankError(RuntimeError):
    """Raised if a rank raised another exception than RecdError. The message has its traceback.

    Attributes:
        what: error, file and line as one line of text.
    """

    def __init__(self, message: str, what: str = "") -> None:
        super().__init__(message)
        self.what = what


def on_rank(error: RecdError, rank: int) -> RecdError:
    """Return the error; a PluginError or DataError gets "on rank N" in its message."""
    if type(error) not in (PluginError, DataError) or re.search(r"\brank \d", str(error)):
        return error
    return type(error)(f"on rank {rank}: {error}").with_traceback(error.__traceback__)


class NoPlanError(SetupError):
    """Raised if the tables do not fit into the memory of the ranks."""


class ExactnessError(RecdError):
    """Raised for a configuration that would silently train incorrectly."""


@dataclass(frozen=True)
class Problem:
    """A problem in a registry file (YAML). ``line`` starts at 1, and is 0 if unknown."""

    path: str
    line: int
    field: str
    message: str

    @property
    def place(self) -> str:
        """Return the location as text, such as ``registry.yaml:12 sharding[0]``."""
        where = f"{self.path}:{self.line}" if self.line else self.path
        return f"{where} {self.field}" if self.field else where

    def __str__(self) -> str:
        return f"{self.place}: {self.message}"


class RegistryError(RecdError):
    """Raised if the registry file (YAML) of a run is invalid. The message lists all problems."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


#: Attribute of an exception that a plugin raised: the plugin, its method and the line at fault.
FAILED_CALL = "recd_failed_call"


def in_a_line(error: BaseException) -> str:
    """Return an exception as one line: type, first line of the message, location and notes.

    The line starts with the plugin, if ``code_call`` found that a plugin raised the exception.
    """
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    said = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    notes = getattr(error, "__notes__", ())
    if call := getattr(error, FAILED_CALL, ""):
        return "; ".join([f"{call}: {said}", *(note for note in notes if note != call)])
    return "; ".join([f"{said}{where}", *notes])
