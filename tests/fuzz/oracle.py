"""What became of a bad input: refused, right, or one of three faults."""

from __future__ import annotations

import hashlib
import os
import signal
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import NoReturn

from click.testing import CliRunner

from recd_plugins.cli import main

#: Longest that a command may take; most take a hundredth of it.
SECONDS = 60.0
#: One rank, in this process: `recd run` takes it for a rank that torchrun started.
ONE_RANK = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
}


class Outcome(StrEnum):
    """What became of one bad input; all but the first two are faults."""

    REFUSED = "refused"
    RIGHT = "right"
    WRONG = "wrong"
    TRACEBACK = "traceback"
    HANG = "hang"


class Fault(AssertionError):
    """A bad input that was neither refused nor taken for what it is."""

    def __init__(self, outcome: Outcome, message: str) -> None:
        super().__init__(f"{outcome}: {message}")
        self.outcome = outcome


def wrong(message: str) -> NoReturn:
    """The command succeeded, or failed, in a way that misleads."""
    raise Fault(Outcome.WRONG, message)


class _HangError(BaseException):
    """Not an Exception: nothing may take it for an error of the input."""


@dataclass(frozen=True)
class Done:
    """A command that ended as a command should.

    Attributes:
        arguments: of ``recd``.
        ok: whether it succeeded.
        output: all that it wrote, white space made single.
    """

    arguments: tuple[str, ...]
    ok: bool
    output: str

    def refused(self, *names: object) -> Outcome:
        """It failed, and its message has all of ``names``."""
        if self.ok:
            wrong(f"{self} succeeded: {self.output[-400:]}")
        for name in names:
            if " ".join(str(name).split()) not in self.output:
                wrong(f"{self} failed without naming {name!r}: {self.output[-800:]}")
        return Outcome.REFUSED

    def __str__(self) -> str:
        return f"recd {' '.join(self.arguments)}"


def recd(
    *arguments: object, leaves: Iterable[str] = (), environ: dict[str, str] | None = None
) -> Done:
    """Run a command in this process and this folder.

    Args:
        arguments: of ``recd``.
        leaves: names of files and folders that may be there after it failed.
        environ: more of the environment.

    Raises:
        Fault: a traceback, a hang, no message, or a failure that left something else.
    """
    before = _tree(leaves)
    given = tuple(map(str, arguments))
    with _limited(given):
        result = CliRunner(env={**ONE_RANK, **(environ or {})}).invoke(main, given)
    done = Done(given, result.exit_code == 0, " ".join(result.output.split()))
    error = result.exception
    if error is not None and not isinstance(error, SystemExit):
        text = "".join(traceback.format_exception(error))
        raise Fault(Outcome.TRACEBACK, f"{done}\n{text[-3000:]}")
    if "Traceback (most recent call last)" in result.output:
        raise Fault(Outcome.TRACEBACK, f"{done}\n{result.output[-3000:]}")
    if not done.ok:
        if result.exit_code not in (1, 2) or not done.output:
            wrong(f"{done} ended with {result.exit_code} and said {done.output!r}")
        after = _tree(leaves)
        if changed := {name for name, _ in before.items() ^ after.items()}:
            wrong(f"{done} failed and changed {', '.join(sorted(changed))}: {done.output[-400:]}")
    return done


@contextmanager
def _limited(arguments: tuple[str, ...]) -> Iterator[None]:
    """Raise in the main thread after a time; another timer of the process goes on afterwards."""

    def end(_signal: int, _frame: FrameType | None) -> None:
        raise _HangError

    handler = signal.signal(signal.SIGALRM, end)
    left, _ = signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    except _HangError:
        where = f"recd {' '.join(arguments)} was not done after {SECONDS:g} s"
        raise Fault(Outcome.HANG, f"{where}\n{traceback.format_exc()[-2000:]}") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, left)
        signal.signal(signal.SIGALRM, handler)


def _tree(without: Iterable[str]) -> dict[str, str]:
    """Every file below this folder and what is in it, but for bytecode that imports leave."""
    found = {}
    ignored = set(without)
    for folder, folders, files in os.walk("."):
        folders[:] = [name for name in folders if name != "__pycache__"]
        if folder == ".":
            folders[:] = [name for name in folders if name not in ignored]
            files = [name for name in files if name not in ignored]
        for name in (*folders, *files):
            path = Path(folder, name)
            found[str(path)] = _digest(path)
    return found


def _digest(path: Path) -> str:
    if path.is_symlink() or not path.is_file():
        return "no file"
    return hashlib.sha256(path.read_bytes()).hexdigest()
