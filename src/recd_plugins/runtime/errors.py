"""Errors a user can cause. The command line prints them without a traceback and exits with 1."""

from __future__ import annotations

import re
import signal
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


class RecdError(Exception):
    """Base of every error whose message alone tells the user what, where and what to do."""


class PluginError(RecdError):
    """A plugin could not be loaded, or two plugins claim one name."""


class DataError(RecdError):
    """Input data is wrong; the message names file, column, row and value."""


class SetupError(RecdError):
    """The machine or the installed versions cannot do what was asked."""


class RunInterrupted(RecdError):
    """A run that Ctrl-C, SIGTERM or SIGHUP ended before its time.

    Attributes:
        signal: its number; the exit code of the command is 128 more.
        resumable: whether a checkpoint was written, from which the same command goes on.
    """

    signal: int = signal.SIGINT
    resumable: bool = False

    @classmethod
    def by(cls, number: int, what: str, *, resumable: bool = False) -> RunInterrupted:
        """Of this signal, with what came of the run."""
        error = cls(what)
        error.signal, error.resumable = number, resumable
        return error

    def __str__(self) -> str:
        return f"{signal.Signals(self.signal).name}: {super().__str__()}"


class RankError(RuntimeError):
    """A rank raised what is no RecdError; the message carries its traceback.

    Attributes:
        what: it raised, and where, in a line.
    """

    def __init__(self, message: str, what: str = "") -> None:
        super().__init__(message)
        self.what = what


def on_rank(error: RecdError, rank: int) -> RecdError:
    """The error of code or data that failed on one rank alone, with the rank; or as it is."""
    if type(error) not in (PluginError, DataError) or re.search(r"\brank \d", str(error)):
        return error
    return type(error)(f"on rank {rank}: {error}").with_traceback(error.__traceback__)


class NoPlanError(SetupError):
    """The tables do not fit into the memory of the ranks."""


class ExactnessError(RecdError):
    """A combination that is known to corrupt training silently, refused instead."""


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a registry file. ``line`` is 1-based, 0 where none applies."""

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
    """Everything that is wrong with a registry file, collected before it is raised."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


def in_a_line(error: BaseException) -> str:
    """Type and first line of an exception, where it was raised, and its notes."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    said = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}{where}"
    return "; ".join([said, *getattr(error, "__notes__", ())])
