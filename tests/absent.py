"""Built-in plugins whose folder was taken away: what uses them is left out of the tests."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[1]
_BUILT_IN = set(
    re.findall(r'"recd-plugin-(\w+)', (_ROOT / "packaging/recd-plugins/pyproject.toml").read_text())
)
PRESENT = {
    path.parent.name.removeprefix("recd_plugin_") for path in _ROOT.glob("plugins/*/pyproject.toml")
}
ABSENT = _BUILT_IN - PRESENT


def uses_what_is_absent(text: str) -> bool:
    """Whether code, a registry file or a page names an absent plugin's package or a part of it."""
    names = "|".join(ABSENT)
    return bool(names) and bool(re.search(rf"\brecd_plugin_({names})\b|\b({names})\.[a-z]", text))


def skip_what_is_absent(text: str) -> None:
    """Skip the test where it does."""
    if uses_what_is_absent(text):
        pytest.skip(f"uses one of {', '.join(sorted(ABSENT))}")
