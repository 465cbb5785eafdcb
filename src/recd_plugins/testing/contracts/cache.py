"""The contract of caches."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import pytest
import torch
from torchrec.distributed.planner.types import ParameterConstraints

from recd_plugins.errors import SetupError
from recd_plugins.interfaces import Cache, Table
from recd_plugins.testing.contracts.plugin import PluginContract


class CacheContract(PluginContract):
    """Tests of a cache plugin: override the fixture ``plugin``."""

    @pytest.fixture
    def tables(self) -> Sequence[Table]:
        """Tables that the plugin takes; the last has no cache."""
        return (
            Table("t_user", ("user",), 1000, 16, pooled=True),
            Table("t_history", ("history",), 500, 16, pooled=False),
            Table("t_other", ("other",), 200, 16, pooled=True),
        )

    @pytest.mark.parametrize("device", ["cpu", "cuda"])
    def test_check_returns_or_raises_setup_error(self, plugin: Cache, device: str) -> None:
        if device == "cuda" and not torch.cuda.is_available():
            pytest.skip("no CUDA device")
        with contextlib.suppress(SetupError):
            plugin.check(torch.device(device))

    def test_constrains_only_the_tables_it_is_given(
        self, plugin: Cache, tables: Sequence[Table]
    ) -> None:
        constraints = plugin.constraints(tables[:-1])
        assert set(constraints) <= {table.name for table in tables[:-1]}
        assert all(isinstance(value, ParameterConstraints) for value in constraints.values())

    def test_constrains_nothing_without_tables(self, plugin: Cache) -> None:
        assert dict(plugin.constraints([])) == {}
