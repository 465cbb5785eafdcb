"""Programs of pages run and print what the pages show."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests import forked
from tests.docs.pages import DOCS, blocks

# Pages with one program, and what it prints.
NAMES = (
    "cached.md",
    "cached-storage.md",
    "caching.md",
    "coalescing.md",
    "measuring.md",
    "readers.md",
    "tiered.md",
    "tiered-checkpoints.md",
    "tiers.md",
)


PAGES = [
    path
    for path in sorted([*DOCS.glob("*.md"), *DOCS.parent.glob("plugins/*/docs/*.md")])
    if path.name in NAMES
]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_the_program_prints_what_the_page_shows(page: Path, tmp_path: Path) -> None:
    text = page.read_text(encoding="utf-8")
    (code,), (output,) = blocks(text, "python"), blocks(text, "text")
    (tmp_path / "program.py").write_text(code, encoding="utf-8")
    done = forked.run([sys.executable, "program.py"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == output
