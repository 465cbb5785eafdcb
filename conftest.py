"""Tests see the plugins of this repository and no others that happen to be installed."""

import gc
import os
from collections.abc import Generator
from datetime import date
from functools import cache
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
from hypothesis import is_hypothesis_test, settings
from tests.covering import by_night, cells_of_today, of_today
from tests.schedule import BENCHMARKS, BY_NIGHT, IN_TURN, RAY, SLOW, TOGETHER_IN_TURN

_plugins = sorted(Path(__file__).parent.glob("plugins/*/pyproject.toml"))
os.environ["RECD_ONLY"] = ",".join(path.parent.name.replace("_", "-") for path in _plugins)
# Before torch is imported, here and in programs: there are as many workers as cores, and threads of
# OpenMP that wait for one another take the time of others.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # as recd does, before torch is imported
# Whose turn it is. All workers have the one of the process that starts them, also at midnight.
_fuzzing = os.environ.get("RECD_FUZZ") == "nightly"
os.environ.setdefault("RECD_DAY", "all" if _fuzzing else str(date.today().toordinal()))
# Until all tests are collected: what they import stays.
gc.disable()
# No test is timed: a kernel is compiled first, or another process has the cores.
# Examples that failed are kept in .hypothesis, and are tried first in the next run.
settings.register_profile("untimed", deadline=None, print_blob=True)
settings.register_profile("nightly", settings.get_profile("untimed"))
settings.load_profile("untimed")
#: What a night draws for one example of a day.
_NIGHTLY = 20

# Processes of ranks, of readers and of programs are forked from a server that has imported all that
# any of them needs, once.
forkserver.set_forkserver_preload(["tests.fork_imports"])
forkserver.set_forkserver_preload = lambda modules_names: None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests of a file share what it makes, and some those of several: one worker has them."""
    from xdist.scheduler import LoadFileScheduling

    class BySharing(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            for together in (RAY, BENCHMARKS):
                if any(map(Path(file).match, together)):
                    return together[0]
            return file

    return BySharing(config, log)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files of which no test would be left are not imported."""
    if collection_path.suffix != ".py":
        return None
    return (config.option.markexpr == "not slow" and "" in _tests_of(collection_path, SLOW)) or None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not by_night():
        _leave_out(config, items, _cells_of_other_days(items))
        _leave_out(config, items, {item for item in items if _is_of(item, BY_NIGHT)})
        _leave_out(config, items, _turns_of_other_days(items))
    files = {item.path for item in items}
    on_ray = {file for file in files if any(map(file.match, RAY))}
    slow = {item for item in items if _is_of(item, SLOW)}
    for item in slow:
        item.add_marker(pytest.mark.slow)
    # What takes longest first, so that no worker has it left when the others are done.
    items.sort(key=lambda item: (item.path not in on_ray, item not in slow))
    if by_night():
        tests = {getattr(item, "function", None) for item in items}
        for test in filter(is_hypothesis_test, tests):
            _draw_more(test)


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, Any, Any]:
    """pytest-xdist sends UTF-8 alone, and names of files that are none are printed in tests."""
    return _sendable((yield))


def _sendable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_sendable(key): _sendable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_sendable, value))
    return value


def pytest_collection_finish() -> None:
    # Thousands of tests, and what they import, stay: no collection of garbage looks at them again.
    gc.collect()
    gc.freeze()
    gc.enable()


def _cells_of_other_days(items: list[pytest.Item]) -> set[pytest.Item]:
    """Of each test with parameters, all but the cells of today."""
    matrices: dict[Any, dict[tuple[str, ...], pytest.Item]] = {}
    for item in items:
        if callspec := getattr(item, "callspec", None):
            test = (item.parent, getattr(item, "originalname", item.name))
            matrices.setdefault(test, {})[tuple(map(repr, callspec.params.values()))] = item
    others = set()
    for matrix in matrices.values():
        # Runs and their like take long, and what any two values do is tested close to it.
        together = 1 if any(_is_of(item, SLOW) for item in matrix.values()) else 2
        chosen = set(cells_of_today(list(matrix), together))
        others |= {item for cell, item in matrix.items() if cell not in chosen}
    return others


def _turns_of_other_days(items: list[pytest.Item]) -> set[pytest.Item]:
    others = set()
    for turns, patterns in IN_TURN.items():
        those = [item for item in items if _is_of(item, patterns)]
        others |= set(those) - set(of_today(those, turns))
    for number, (pattern, turns) in enumerate(TOGETHER_IN_TURN.items()):
        if not of_today([pattern], turns, number):  # Each begins on another day.
            others |= {item for item in items if _is_of(item, (pattern,))}
    return others


def _leave_out(config: pytest.Config, items: list[pytest.Item], some: set[pytest.Item]) -> None:
    if some:
        config.hook.pytest_deselected(items=list(some))
        items[:] = [item for item in items if item not in some]


def _is_of(item: pytest.Item, patterns: tuple[str, ...]) -> bool:
    return item.name.startswith(_tests_of(item.path, patterns))


@cache
def _tests_of(file: Path, patterns: tuple[str, ...]) -> tuple[str, ...]:
    """What the names of tests of a file start with."""
    parts = [pattern.partition("::") for pattern in patterns]
    return tuple(tests for files, _, tests in parts if file.match(files))


def _draw_more(test: Any) -> None:
    """More examples in a property test, and others each time, whatever its settings say."""
    # Where hypothesis keeps what @settings said; there is no other way to it.
    of_test = getattr(test, "_hypothesis_internal_use_settings", None) or settings()
    test._hypothesis_internal_use_settings = settings(
        of_test, max_examples=of_test.max_examples * _NIGHTLY, derandomize=False
    )


@pytest.fixture
def movielens() -> Path:
    """MovieLens-100K, which nobody may pass on: at RECD_MOVIELENS, or where its README puts it."""
    example = Path(__file__).parent / "examples" / "movielens" / "data" / "ml-100k.inter"
    path = Path(os.environ.get("RECD_MOVIELENS", example))
    if not path.is_file():
        pytest.skip(f"{path} is missing; examples/movielens/README.md says how to get it")
    return path.resolve()


@pytest.fixture(scope="session", autouse=True)
def _forkserver() -> None:
    """Start the fork server before any test changes the working directory.

    Before Python 3.13 it imports its modules from there, and ignores missing ones.
    """
    forkserver.ensure_running()


@pytest.fixture
def cwd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change the current folder to ``tmp_path``."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
