"""Optimizer entries train tables as TorchRec's own optimizers do, or are refused by name and line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.training import optimizer_cases as cases

from recd_plugins.testing.gloo import run_on_ranks

HEAD = """version: 1
dataset: {use: dlrm.random, options: {rows: 64, sparse: {user: 9, item: 9}}}
converter: {use: recd.kjt}
"""


@pytest.mark.parametrize("use", cases.ENTRIES)
def test_parity(tmp_path: Path, use: str) -> None:
    entries = [
        {"use": use, "tables": [pattern], "options": options}
        for pattern, options in cases.ENTRIES[use]
    ]
    path = tmp_path / "registry.yaml"
    path.write_text(f"{HEAD}optimizers: {json.dumps(entries)}\ntraining: {cases.TRAINING}\n")
    for found in run_on_ranks(cases.run_cases, 2, path, use, ["table_wise", "row_wise"]):
        for difference in found:
            assert max(difference.stock.values()) <= 1e-6
            assert difference.unsharded <= 1e-6
            assert min(difference.moved.values()) > 1e-4
