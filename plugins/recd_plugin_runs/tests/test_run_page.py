"""`recd run --html`: the page at the end of a run."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from recd_plugins.cli import main

REGISTRY = """version: 1
dataset: {use: dlrm.random, options: {rows: 64, sparse: 2, num_ids: 20}}
converter: {use: recd.kjt}
model: {embedding_dim: 4, num_embeddings: 20, bottom_mlp: [4], top_mlp: [4]}
training: {batch_size: 16, ranks: 1, device: cpu, evaluate: false}
"""


def test_the_page_has_the_run_and_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("registry.yaml").write_text(REGISTRY, encoding="utf-8")
    result = CliRunner().invoke(main, ["run", "registry.yaml", "--steps", "2", "--html", "a.html"])
    assert result.exit_code == 0, result.output
    html = Path("a.html").read_text(encoding="utf-8")
    assert "<h2>Losses</h2>" in html
    assert "dlrm.random" in html
