"""The batch of docs/batch.md goes through every stage with the numbers that the page shows.

It uses recd.session_parquet and torchrec.table_wise.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests import forked
from tests.docs.pages import blocks, page, run_console


def test_the_page_runs_as_one_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = page("batch.md")
    log, *stages = blocks(text, "python")
    exec(compile(log, "batch.md", "exec"), {})
    run_console(text)
    Path("registry.yaml").write_text(blocks(text, "yaml")[0], encoding="utf-8")
    Path("program.py").write_text("\n".join(stages), encoding="utf-8")
    done = forked.run([sys.executable, "program.py"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == blocks(text, "text")[0]
