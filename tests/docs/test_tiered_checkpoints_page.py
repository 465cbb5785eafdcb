"""The example of docs/tiered-checkpoints.md prints what the page says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs" / "tiered-checkpoints.md").read_text()


def block(language: str) -> str:
    (text,) = re.findall(rf"^```{language}\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)
    return text


def test_the_example_prints_what_the_page_says(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(block("python"))
    done = subprocess.run(
        [sys.executable, "job.py"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout == block("text")
