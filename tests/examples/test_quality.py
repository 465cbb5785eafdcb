from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests import forked

SCRIPT = Path(__file__).parents[2] / "examples/quality/compare.py"


@pytest.mark.parametrize("table", ["criteo", "requests"])
def test_all_models_score_the_same_rows(table: str, tmp_path: Path) -> None:
    for package in ("lightgbm", "sklearn", "pandas"):
        pytest.importorskip(package, reason=f"needs {package}")
    done = forked.run([sys.executable, SCRIPT, table, "--rows", "4000"], cwd=tmp_path, check=True)
    rows = [line.split() for line in done.stdout.splitlines()[2:]]
    auc = {" ".join(words[:-4]): float(words[-3]) for words in rows}
    assert set(auc) >= {"mean label", "recd init", "LightGBM", "logistic regression"}
    assert auc["mean label"] == 0.5
    assert auc["logistic regression"] > 0.55
