"""A trainer's source, with the three lines that its diff puts in."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Literal

NAMES = ("golden", "dlrm_main", "hstu", "hstu_pooled")
Side = Literal["stock", "ours"]
_FOLDER = Path(__file__).with_name("trainers")


def source(name: str) -> str:
    """The trainer as it is."""
    return _path(name).read_text(encoding="utf-8")


def diff(name: str) -> str:
    """What three lines change of it."""
    return (_FOLDER / f"{name}.diff").read_text(encoding="utf-8")


def changes(name: str) -> list[tuple[str, str]]:
    """Old lines and new ones; the old one of a line that is new is empty."""
    found: list[tuple[str, str]] = []
    old: list[str] = []
    for line in diff(name).splitlines():
        if line.startswith("-") and not line.startswith("---"):
            old.append(line[1:])
        elif line.startswith("+") and not line.startswith("+++"):
            found.append((old.pop(0) if old else "", line[1:]))
    return found


def changed(name: str) -> str:
    """The trainer after its diff."""
    lines = source(name).splitlines()
    for old, new in changes(name):
        if old:
            at = lines.index(old)
            lines[at] = new
        else:
            lines.insert(lines.index("import torch"), new)
    return "\n".join(lines) + "\n"


def trainer_module(name: str, side: Side) -> ModuleType:
    """The trainer's module, stock or after its diff; imported anew."""
    module = ModuleType(f"{__name__}_{name}_{side}")
    sys.modules[module.__name__] = module  # dataclasses look there
    text = source(name) if side == "stock" else changed(name)
    exec(compile(text, str(_path(name)), "exec"), vars(module))
    return module


def _path(name: str) -> Path:
    return _FOLDER / f"{name.removesuffix('_pooled')}.py"
