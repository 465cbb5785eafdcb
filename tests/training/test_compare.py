"""What a comparison says of two runs."""

from __future__ import annotations

import json
import math
from pathlib import Path

from recd_plugins.files import write_json
from recd_plugins.training.compare import Comparison
from recd_plugins.training.quality import Quality
from recd_plugins.training.trainer import Result


def result(losses: list[float], samples_per_second: float = 100.0) -> Result:
    return Result(
        samples_per_second=samples_per_second,
        step_seconds=0.5,
        collective_bytes={"all_to_all": 1000.0, "all_reduce": 500.0},
        ids_looked_up=10.0,
        peak_memory_bytes=10**9,
        losses=losses,
        train=Quality(0.9, 0.7, 64),
        test=None,
    )


def test_figures() -> None:
    comparison = Comparison(result([0.5, 0.25]), result([0.5, 0.75], 400.0))
    assert comparison.loss_max_abs_diff == 0.5
    report = comparison.as_json()
    assert report["ratios"]["samples_per_second"] == 4.0
    assert report["ratios"]["collective_bytes"] == 1.0
    assert report["baseline"]["losses"] == [0.5, 0.25]


def test_nan_is_not_agreement(tmp_path: Path) -> None:
    comparison = Comparison(result([0.5, 0.4]), result([0.5, math.nan]))
    assert math.isnan(comparison.loss_max_abs_diff)
    write_json(tmp_path / "report.json", comparison.as_json())
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert report["loss_max_abs_diff"] is None
