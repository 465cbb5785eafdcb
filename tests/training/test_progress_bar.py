"""What a log file shows of a run that goes on."""

from __future__ import annotations

import pytest
import torch

from recd_plugins.training import progress_bar as module
from recd_plugins.training.progress_bar import progress_bar


def test_lines_of_a_log_file(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    with progress_bar(0, "plugins", 10, 30, samples=64, waiting=lambda: 0.25) as advance:
        for step in range(1, 11):
            now += 3
            advance(torch.tensor(1 / step))
            if step == 5:
                with advance.paused():
                    now += 1000
    lines = capfd.readouterr().err.splitlines()
    assert lines == [
        "plugins: step=14 of=30 loss=0.25 samples_per_second=21 eta_seconds=48 waiting=0.250",
        "plugins: step=18 of=30 loss=0.125 samples_per_second=21 eta_seconds=36 waiting=0.250",
        "plugins: step=20 of=30 loss=0.1 samples_per_second=21 eta_seconds=30 waiting=0.250",
    ]
