"""Built-in plugins whose folder was taken away: what uses them is left out of the tests."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[1]
_BUILT_IN = set(
    re.findall(r'"recd-plugin-(\w+)', (_ROOT / "packaging/recd-plugins/pyproject.toml").read_text())
)
#: Commands of plugins that are used without another word of theirs.
_COMMANDS = {
    "reports": ('report(?!")',),  # the quoted word is a name in many tests
    "scoring": ("evaluate", "predict", "export", "embeddings"),
    "tuning": ("calibrate", "profile"),
}
PRESENT = {
    path.parent.name.removeprefix("recd_plugin_") for path in _ROOT.glob("plugins/*/pyproject.toml")
}
ABSENT = _BUILT_IN - PRESENT


def uses_what_is_absent(text: str) -> bool:
    """Whether code, a registry file or a page names an absent plugin's package or a part of it."""
    if not ABSENT:
        return False
    names = "|".join(ABSENT)
    used = [rf"\brecd_plugin_({names})\b", rf"\b({names})\.[a-z]", rf"\buse\W+({names})\b"]
    if "tuning" in ABSENT:
        used.append(r"\buse\W+auto\b")
    if commands := "|".join(each for name in ABSENT for each in _COMMANDS.get(name, ())):
        used += [rf"\brecd ({commands})\b", rf'"({commands})", ']  # on a page, and in a test
    return bool(re.search("|".join(used), text))


def skip_what_is_absent(text: str) -> None:
    """Skip the test where it does."""
    if uses_what_is_absent(text):
        pytest.skip(f"uses one of {', '.join(sorted(ABSENT))}")
