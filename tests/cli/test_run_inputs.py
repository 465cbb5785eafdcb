"""What `recd run` refuses, it refuses before torch is imported: at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("before", "after", "report", "message"),
    [
        ("recd.ikjt", "recd.ikjtt", "report.json", "did you mean recd.ikjt?"),
        ("recd.ikjt", "recd.ikjt", "registry.yaml/report.json", "cannot be written"),
    ],
    ids=["typo", "report"],
)
def test_refused_at_once(
    tmp_path: Path, before: str, after: str, report: str, message: str
) -> None:
    text = (ROOT / "registry.yaml").read_text(encoding="utf-8")
    assert before in text
    path = tmp_path / "registry.yaml"
    path.write_text(text.replace(before, after), encoding="utf-8")
    code = (
        "import sys\nfrom recd_plugins.cli import main\n"
        "try: main(['run', *sys.argv[1:]])\nexcept SystemExit as end: print(end.code)\n"
        "print('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, str(path), "--json", str(tmp_path / report)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert message in done.stderr
    assert done.stdout.split() == ["1", "False"]
    assert not (tmp_path / ".data").exists()
