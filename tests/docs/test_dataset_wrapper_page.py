"""docs/plugins/dataset-wrapper.md: its wrapper keeps the contract, in the page's registry file."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs" / "plugins" / "dataset-wrapper.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)


def test_the_wrapper_passes_its_test(tmp_path: Path) -> None:
    plugin, test = blocks("python")
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / "acme_reversed.py").write_text(plugin)
    (tmp_path / "test_acme_reversed.py").write_text(test)
    (tmp_path / "registry.yaml").write_text(blocks("yaml")[0])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "."],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": "plugins"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
