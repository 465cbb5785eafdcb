"""Draws bad inputs, runs commands on them and checks the outcome.

A command refuses a bad input by a message, or does what it would do with a good one. It raises
nothing, and changes no file if it fails.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from click.testing import CliRunner
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from tests.covering import by_night

from recd_plugins.cli import main

T = TypeVar("T")

#: More cases, of draws that differ from night to night.
_ALONE = os.environ.get("RECD_FUZZ") == "nightly"
#: Draws of a test, of which the first is the simplest one.
CASES = int(os.environ.get("RECD_FUZZ_CASES", "8" if _ALONE else "2"))
#: One rank, in this process: `recd run` takes it for a rank that torchrun started.
ONE_RANK = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
}

#: JSON values, those first that are mistaken for others.
json_values: st.SearchStrategy[Any] = st.sampled_from(
    [None, -1, 0, 1, 1 << 70, 0.5, 1e400, float("nan"), "", "x", "5", True, [], {}, [[]], [None]]
) | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=3,
)
no_json = st.sampled_from(
    ["", "null", "[]", "{", "{}", "5", '"x"', "[[1]]", "[" * 100_000, "NaN", "\0", "\ufeff{}"]
)


@dataclass(frozen=True)
class Case:
    """One bad input in the making. The current folder is its own, and empty at the start."""

    data: st.DataObject

    def draw(self, strategy: st.SearchStrategy[T], label: str | None = None) -> T:
        return self.data.draw(strategy, label)

    def one_of(self, choices: Any, label: str | None = None) -> Any:
        return self.draw(st.sampled_from(choices), label)

    def number(self, least: int, most: int, label: str | None = None) -> int:
        return self.draw(st.integers(least, most), label)

    def flag(self, label: str) -> bool:
        return self.draw(st.booleans(), label)

    def place(self, size: int, label: str | None = None) -> int:
        """Draw a place in what may be longer in the next run, as with times in it."""
        return self.number(0, (1 << 20) - 1, label) % max(1, size)

    def damaged(self, data: bytes) -> bytes:
        """Flip bits, cut, clear, insert, remove or append bytes."""
        how = self.one_of(
            ["flip", "cut", "zeros", "insert", "remove", "swap", "append", "empty"], "how"
        )
        at, count = self.place(len(data), "at"), self.number(1, 99, "bytes")
        if how == "flip":
            changed = bytearray(data)
            for place in (at, *(self.place(len(data)) for _ in range(self.number(0, 2, "more")))):
                changed[place : place + 1] = bytes(
                    byte ^ 1 << self.number(0, 7, "bit") for byte in changed[place : place + 1]
                )
            return bytes(changed)
        return {
            "swap": data[at:] + data[:at],
            "cut": data[:at],
            "zeros": data[:at] + bytes(min(count, len(data) - at)) + data[at + count :],
            "insert": data[:at] + b"\x07" * count + data[at:],
            "remove": data[:at] + data[at + count :],
            "append": data + data[:count],
            "empty": b"",
        }[how]

    def damage(self, path: str | Path) -> None:
        Path(path).write_bytes(self.damaged(Path(path).read_bytes()))

    def no_file(self, path: Path) -> None:
        """Put a folder, a link to nowhere, a device or a loop in the place of a file."""
        path.unlink()
        what = self.one_of(["folder", "nowhere", "/dev/null", path.name], "what")
        if what == "folder":
            path.mkdir()
        else:
            path.symlink_to(what)


def fuzz(kind: Callable[[Case], None]) -> Callable[..., None]:
    """Make a test of a function that tries one case. Its first draws are the same everywhere."""

    def test(data: st.DataObject) -> None:
        before = Path.cwd()
        logging.disable(logging.WARNING)  # TorchRec logs whole models at each start of a run
        with tempfile.TemporaryDirectory(prefix="recd-fuzz-") as folder:
            os.chdir(folder)
            try:
                kind(Case(data))
            finally:
                os.chdir(before)
                logging.disable(logging.NOTSET)

    test.__name__ = test.__qualname__ = kind.__name__
    test.__module__ = kind.__module__
    drawn = settings(
        max_examples=CASES,
        deadline=None,
        phases=(Phase.explicit, Phase.reuse, Phase.generate),
        suppress_health_check=list(HealthCheck),
    )(given(data=st.data())(test))
    return drawn if _ALONE or by_night() else seed(0)(drawn)


def wrong(message: str) -> NoReturn:
    """The command succeeded, or failed, in a way that misleads."""
    raise AssertionError(message)


@dataclass(frozen=True)
class Done:
    """A command that ended as it should, and its output in single spaces."""

    arguments: tuple[str, ...]
    ok: bool
    output: str

    def refused(self, *names: object) -> None:
        """Check that it failed, and that its message has all of ``names``."""
        if self.ok:
            wrong(f"{self} succeeded: {self.output[-400:]}")
        for name in names:
            if " ".join(str(name).split()) not in self.output:
                wrong(f"{self} failed without naming {name!r}: {self.output[-800:]}")

    def __str__(self) -> str:
        return f"recd {' '.join(self.arguments)}"


def recd(*arguments: object, leaves: Iterable[str] = ()) -> Done:
    """Run a command here; fail on a traceback, no message, or files changed but ``leaves``."""
    before = _tree(leaves)
    given = tuple(map(str, arguments))
    result = CliRunner(env=ONE_RANK).invoke(main, given)
    error = result.exception
    notes = getattr(error, "__notes__", [])  # of plugins, whose errors the program shows
    output = "\n".join([result.output, *notes])
    done = Done(given, result.exit_code == 0, " ".join(output.split()))
    if error is not None and not isinstance(error, SystemExit) and not notes:
        wrong(f"{done}\n{''.join(traceback.format_exception(error))[-3000:]}")
    if "Traceback (most recent call last)" in result.output:
        wrong(f"{done}\n{result.output[-3000:]}")
    if not done.ok:
        if result.exit_code not in (1, 2) or not done.output:
            wrong(f"{done} ended with {result.exit_code} and said {done.output!r}")
        if changed := {name for name, _ in before.items() ^ _tree(leaves).items()}:
            wrong(f"{done} failed and changed {', '.join(sorted(changed))}: {done.output[-400:]}")
    return done


def _tree(without: Iterable[str]) -> dict[str, str]:
    found = {}
    ignored = set(without)
    for folder, folders, files in os.walk("."):
        folders[:] = [name for name in folders if name != "__pycache__"]
        if folder == ".":
            folders[:] = [name for name in folders if name not in ignored]
            files = [name for name in files if name not in ignored]
        for name in (*folders, *files):
            path = Path(folder, name)
            regular = path.is_file() and not path.is_symlink()
            content = path.read_bytes() if regular else b"no file"
            found[str(path)] = hashlib.sha256(content).hexdigest()
    return found
