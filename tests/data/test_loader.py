"""Batches for a CUDA device are pinned as they are handed out, so that copies can overlap."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.fuzz import tables

from recd_plugins import load_registry
from recd_plugins.data.loader import build_dataloader
from recd_plugins.interfaces.batch import ModelInput


@pytest.mark.parametrize(("device", "pinned"), [("cpu", 0), ("cuda", 6)])
def test_batches_are_pinned_for_cuda_only(tmp_path: Path, monkeypatch, device, pinned):
    monkeypatch.chdir(tmp_path)
    tables.write_two()
    tables.write_registry()
    calls = []

    def pin_memory(self):
        calls.append(self)
        return self

    monkeypatch.setattr(ModelInput, "pin_memory", pin_memory)
    loader = build_dataloader(load_registry("registry.yaml"), 0, 1, device=torch.device(device))
    assert len(list(loader)) == 6
    assert len(calls) == pinned
