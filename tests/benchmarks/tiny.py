"""Benchmarks at their tiny size: each runs once, whichever tests look at it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection
from functools import cache
from typing import Any

import pytest
import torch
from tests.covering import of_today

from recd_plugins.cli.benchmarks import Benchmarks
from recd_plugins.manager import PluginManager
from recd_plugins.testing.benchmark import report

_benchmarks = Benchmarks()
PluginManager().hand("register_benchmarks", _benchmarks.add)
#: Every benchmark, by name.
MODULES = _benchmarks.modules
#: What is kept of a benchmark besides its report: what these functions return.
_MEASURING = {
    "flexshard": (
        "recd_plugin_flexshard.benchmarks.one_table_figures.measure_one_table",
        "recd_plugin_flexshard.benchmarks.papercal_figures.measure_papercal",
        "recd_plugin_flexshard.benchmarks.drift.measure_drift",
    ),
    "scars": (
        "recd_plugin_scars.benchmarks.cells.measure_cells",
        "recd_plugin_scars.benchmarks.by_registry.measure_by_registry",
    ),
}
#: Those that take more than a second of a processor, in parts that take as long as one another,
#: 20 s. By day one part runs, another one each day; all others run every time.
_PARTS = ({"scars"}, {"flexshard"})
_measured: dict[str, Any] = {}


def skip_what_is_not_of_today(names: Collection[str]) -> None:
    """Skip the test where one of these benchmarks does not run today."""
    if others := set(names) & set().union(*_PARTS).difference(*of_today(_PARTS, len(_PARTS))):
        pytest.skip(f"{others.pop()} runs by night, and on another day")


@cache
def tiny(name: str) -> dict[str, Any]:
    """Its report, without MovieLens-100K; skips the test where it runs on another day."""
    skip_what_is_not_of_today([name])
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RECD_MOVIELENS", raising=False)
        for path in _MEASURING.get(name, ()):
            module, _, function = path.rpartition(".")
            patch.setattr(path, _kept(function, getattr(importlib.import_module(module), function)))
        try:
            return report(name, importlib.import_module(MODULES[name]), "tiny")
        finally:
            torch.set_num_threads(threads)


def measured(name: str, function: str) -> Any:
    """What a function returned while a benchmark ran."""
    tiny(name)
    return _measured[function]


def _kept(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        _measured[name] = function(*args, **kwargs)
        return _measured[name]

    return call
