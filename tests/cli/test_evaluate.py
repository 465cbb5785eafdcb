"""What `recd evaluate` refuses before anything is imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from recd_plugins.cli import main

REGISTRY = """
version: 1
dataset: {{use: recd.session_parquet, options: {{path: train{test}}}}}
converter: {{use: recd.kjt}}
training: {{device: cpu{checkpoint}}}
"""
TEST, KEPT = ", test_path: test", ", checkpoint: {path: kept}"


def refusal(*options: str, test: str = TEST, checkpoint: str = KEPT) -> str:
    Path("r.yaml").write_text(REGISTRY.format(test=test, checkpoint=checkpoint), encoding="utf-8")
    result = CliRunner().invoke(main, ["evaluate", "r.yaml", *options])
    assert result.exit_code == 1, result.output
    return result.stderr


def test_without_a_checkpoint_it_says_how_to_make_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "kept: holds no checkpoint; train first: recd run r.yaml" in refusal()
    assert "training.checkpoint.path is not set" in refusal(checkpoint="")
    assert "nothing: holds no checkpoint" in refusal("--checkpoint", "nothing")


def test_without_a_test_split_there_is_nothing_to_evaluate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "no test split" in refusal(test="")


def test_torch_is_not_imported_for_that(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(REGISTRY.format(test=TEST, checkpoint=KEPT), encoding="utf-8")
    code = (
        "import sys\nfrom recd_plugins.cli import main\n"
        "try: main(['evaluate', 'r.yaml'])\nexcept SystemExit as end: assert end.code == 1\n"
        "print([name for name in ('torch', 'torchrec') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert done.stdout.rstrip() == "[]", done.stderr
