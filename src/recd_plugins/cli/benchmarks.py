"""Benchmarks by name."""

from __future__ import annotations

import importlib
import re
from typing import Any

from recd_plugins.errors import PluginError, RecdError
from recd_plugins.plugin_call import PLUGIN_FAILURES

_MODULE = re.compile(r"\w+(\.\w+)*")


class Benchmarks:
    """What ``recd bench`` can run.

    Attributes:
        modules: where each benchmark is, by name.
    """

    def __init__(self) -> None:
        self.modules: dict[str, str] = {}
        # What brought each, in words.
        self._origins: dict[str, str] = {}
        # Messages about names that two packages have.
        self._clashes: dict[str, str] = {}

    def add(self, module: Any, where: str) -> None:
        """Add what a package registers; it is not imported.

        Raises:
            PluginError: it names no module, or the benchmark is there already.
        """
        if not isinstance(module, str) or not _MODULE.fullmatch(module):
            raise PluginError(f"{where} returned {module!r}; name modules, as acme.bench.lookup")
        name = _name(module)
        if name in self.modules:
            self._clashes[name] = (
                f"{where}: benchmark {name} is {module}, and {self.modules[name]} already; rename "
                "one, or leave one package out (--without NAME)"
            )
            raise PluginError(self._clashes[name])
        self.modules[name] = module
        self._origins[name] = where.rpartition(": ")[0]

    def load(self, name: str) -> Any:
        """The module of that benchmark.

        Raises:
            RecdError: there is none, there are two, it does not import, or is no benchmark; names
                the package and the module.
        """
        if name in self._clashes:
            raise PluginError(self._clashes[name])
        if name not in self.modules:
            known = ", ".join(sorted(self.modules))
            raise RecdError(f"no benchmark is named {name}; there are: {known}")
        what = f"{self._origins[name]}: benchmark {name}: {self.modules[name]}"
        try:
            benchmark = importlib.import_module(self.modules[name])
        except PLUGIN_FAILURES as error:
            message = f"{what} failed to import: {type(error).__name__}: {error}"
            raise PluginError(message) from error
        parts = "SUMMARY", "workload", "run"
        if missing := [part for part in parts if not hasattr(benchmark, part)]:
            raise PluginError(f"{what} has no {' and no '.join(missing)}")
        if not isinstance(benchmark.SUMMARY, str):
            raise PluginError(f"{what}: SUMMARY is {benchmark.SUMMARY!r:.80}; expected a text")
        for part in parts[1:]:
            if not callable(getattr(benchmark, part)):
                raise PluginError(f"{what}: {part} is no function")
        return benchmark


def _name(module: str) -> str:
    return module.rpartition(".")[2]
