"""What exports are written through: a full disk ends in an error of Python's."""

from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from recd_plugin_runs.export import _detach_empty, _Writer


class _Known(nn.Module):
    """Whether ids are of a vocabulary that holds none."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.isin(ids, torch.from_numpy(np.empty(0, np.int64)))


def _program() -> torch.export.ExportedProgram:
    return torch.export.export(nn.Linear(3, 2), (torch.zeros(1, 3),))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_told_of_and_ends_no_process() -> None:
    with Path("/dev/full").open("wb", buffering=0) as file:
        writer = _Writer(file)  # type: ignore[arg-type]
        torch.export.save(_program(), writer)
    assert writer.error is not None
    assert writer.error.errno == errno.ENOSPC


def test_what_is_written_is_a_program(tmp_path: Path) -> None:
    path = tmp_path / "model.pt2"
    with path.open("wb") as file:
        torch.export.save(_program(), _Writer(file))
    assert torch.export.load(path).module()(torch.zeros(1, 3)).shape == (1, 2)


def test_a_vocabulary_of_no_values_can_be_written(tmp_path: Path) -> None:
    program = torch.export.export(_Known(), (torch.arange(3),))
    _detach_empty(program)
    with (tmp_path / "model.pt2").open("wb") as file:
        torch.export.save(program, _Writer(file))
    assert not torch.export.load(tmp_path / "model.pt2").module()(torch.arange(3)).any()
