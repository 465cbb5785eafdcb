"""Every test that docs/trust.md names is there."""

from __future__ import annotations

import re

import pytest
from tests.absent import ABSENT
from tests.docs.test_links import DOCS, ROOT

pytestmark = pytest.mark.skipif(bool(ABSENT), reason="tests of plugins are missing")
PAGE = (DOCS / "trust.md").read_text()


@pytest.mark.parametrize(
    "name", sorted(set(re.findall(r"`([\w/]*(?:test_\w+\.py|tests/[\w/]+))`", PAGE)))
)
def test_it_is_there(name: str) -> None:
    path = ROOT / name
    assert (
        path.exists()
        if "/" in name
        else [*(ROOT / "tests").rglob(name), *ROOT.glob(f"plugins/*/tests/**/{name}")]
    ), name


def test_every_promise_says_what_holds_it() -> None:
    promises = [
        line for line in PAGE.splitlines() if line.startswith("| ") and "| held by |" not in line
    ]
    assert len(promises) > 20
    for line in promises:
        assert "test" in line.split("|")[2], line
