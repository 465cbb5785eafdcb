"""Errors a user can cause. The command line prints them without a traceback and exits with 1."""

from __future__ import annotations

import re
import signal
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


class RecdError(Exception):
    """Base of errors with a message for users."""


class PluginError(RecdError):
    """A plugin could not be loaded, or two plugins claim one name."""


class DataError(RecdError):
    """Input data is wrong; the message names file, column, row and value."""


class SetupError(RecdError):
    """The machine, the installed versions or the setup do not support the request."""


class RunInterrupted(RecdError):
    """A signal ended a run early.

    Attributes:
        signal: number of the signal; the exit code of the command is 128 more.
        resumable: whether the same command resumes from a checkpoint.
    """

    signal: int = signal.SIGINT
    resumable: bool = False

    @classmethod
    def by(cls, number: int, what: str, *, resumable: bool = False) -> RunInterrupted:
        """Make the error of a signal."""
        error = cls(what)
        error.signal, error.resumable = number, resumable
        return error

    def __str__(self) -> str:
        return f"{signal.Signals(self.signal).name}: {super().__str__()}"


class RankError(RuntimeError):
    """A rank raised an error other than a RecdError; the message has the traceback.

    Attributes:
        what: error and place in one line.
    """

    def __init__(self, message: str, what: str = "") -> None:
        super().__init__(message)
        self.what = what


def on_rank(error: RecdError, rank: int) -> RecdError:
    """Add the rank to an error of a plugin or data."""
    if type(error) not in (PluginError, DataError) or re.search(r"\brank \d", str(error)):
        return error
    return type(error)(f"on rank {rank}: {error}").with_traceback(error.__traceback__)


class NoPlanError(SetupError):
    """The tables do not fit into the memory of the ranks."""


class ExactnessError(RecdError):
    """A combination that would silently train incorrectly."""


@dataclass(frozen=True)
class Problem:
    """Problem of a registry file; ``line`` is 1-based, or 0 for none."""

    path: str
    line: int
    field: str
    message: str

    @property
    def place(self) -> str:
        """File, line and field, as ``registry.yaml:12 sharding[0]``."""
        where = f"{self.path}:{self.line}" if self.line else self.path
        return f"{where} {self.field}" if self.field else where

    def __str__(self) -> str:
        return f"{self.place}: {self.message}"


class RegistryError(RecdError):
    """The registry file has problems."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


def in_a_line(error: BaseException) -> str:
    """Return the type, first line, place and notes of an exception."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    said = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}{where}"
    return "; ".join([said, *getattr(error, "__notes__", ())])
