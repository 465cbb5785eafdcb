"""Errors a user can cause. The command line prints them without a traceback and exits with 1."""

from __future__ import annotations

import re
import signal
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


class RecdError(Exception):
    """Base class of errors with a message for users."""


class PluginError(RecdError):
    """Raised if a plugin cannot be loaded, or if two plugins have the same name."""


class DataError(RecdError):
    """Raised for invalid input data. The message names file, column, row and value."""


class SetupError(RecdError):
    """Raised if the machine, installed versions or configuration do not support the request."""


class RunInterrupted(RecdError):
    """Raised if a signal ended a run early.

    Attributes:
        signal: number of the signal. The exit code of the command is 128 plus this number.
        resumable: whether running the same command again resumes from a checkpoint.
    """

    signal: int = signal.SIGINT
    resumable: bool = False

    @classmethod
    def by(cls, number: int, what: str, *, resumable: bool = False) -> RunInterrupted:
        """Create the error for a signal number."""
        error = cls(what)
        error.signal, error.resumable = number, resumable
        return error

    def __str__(self) -> str:
        return f"{signal.Signals(self.signal).name}: {super().__str__()}"


class RankError(RuntimeError):
    """Raised if a rank raised an error other than a RecdError. The message has the traceback.

    Attributes:
        what: error, file and line, as one line of text.
    """

    def __init__(self, message: str, what: str = "") -> None:
        super().__init__(message)
        self.what = what


def on_rank(error: RecdError, rank: int) -> RecdError:
    """Add the rank to the message of a plugin or data error."""
    if type(error) not in (PluginError, DataError) or re.search(r"\brank \d", str(error)):
        return error
    return type(error)(f"on rank {rank}: {error}").with_traceback(error.__traceback__)


class NoPlanError(SetupError):
    """Raised if the tables do not fit into the memory of the ranks."""


class ExactnessError(RecdError):
    """Raised for a configuration that would silently train incorrectly."""


@dataclass(frozen=True)
class Problem:
    """A problem in a registry file. ``line`` is 1-based; 0 if unknown."""

    path: str
    line: int
    field: str
    message: str

    @property
    def place(self) -> str:
        """Return file, line and field, such as ``registry.yaml:12 sharding[0]``."""
        where = f"{self.path}:{self.line}" if self.line else self.path
        return f"{where} {self.field}" if self.field else where

    def __str__(self) -> str:
        return f"{self.place}: {self.message}"


class RegistryError(RecdError):
    """Raised if the registry file is invalid. The message lists its problems."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


def in_a_line(error: BaseException) -> str:
    """Return the type, first line, file, line and notes of an exception as one line."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    said = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}{where}"
    return "; ".join([said, *getattr(error, "__notes__", ())])
