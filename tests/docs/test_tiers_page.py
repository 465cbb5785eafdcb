"""The example of docs/tiers.md prints what the page says; the page names every option."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

from recd_plugins.planning.tiers import CostOptions

PAGE = (Path(__file__).parents[2] / "docs" / "tiers.md").read_text()


def block(language: str) -> str:
    (text,) = re.findall(rf"^```{language}\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)
    return text


def test_the_example_prints_what_the_page_says() -> None:
    done = subprocess.run(
        [sys.executable, "-c", block("python")], capture_output=True, text=True, check=True
    )
    assert done.stdout == block("text")


def test_the_page_names_every_option() -> None:
    assert all(f"`{option.name}`" in PAGE for option in fields(CostOptions))
