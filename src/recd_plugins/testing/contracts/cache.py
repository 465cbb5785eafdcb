"""The contract of caches."""

from __future__ import annotations

import contextlib

import pytest
import torch

from recd_plugins.errors import SetupError
from recd_plugins.interfaces import Cache
from recd_plugins.testing.contracts.table_part import TablePartContract


class CacheContract(TablePartContract):
    """Tests of a cache plugin: override the fixture ``plugin``."""

    @pytest.mark.parametrize("device", ["cpu", "cuda"])
    def test_check_returns_or_raises_setup_error(self, plugin: Cache, device: str) -> None:
        if device == "cuda" and not torch.cuda.is_available():
            pytest.skip("no CUDA device")
        with contextlib.suppress(SetupError):
            plugin.check(torch.device(device))
