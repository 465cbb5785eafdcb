"""Contract test suite for plugins of the kind ``audit``."""

from __future__ import annotations

import pytest
import torch

from recd_plugin_audit.audit import Audit
from recd_plugins.api import RunStart, Table
from recd_plugins.testing.contracts import PluginContract


class AuditContract(PluginContract):
    """Contract tests of an audit plugin. Subclass it and override the fixture ``plugin``."""

    @pytest.fixture
    def start(self) -> RunStart:
        tables = (
            Table("t_user", ("user",), 1000, 16, pooled=True),
            Table("t_item", ("item",), 1000, 16, pooled=True),
        )
        return RunStart(0, 1, 0, 4, tables, ("t_user",))

    def test_sees_the_tables_of_its_entry_alone(self, plugin: Audit, start: RunStart) -> None:
        plugin.on_start(start)
        assert plugin.features == {"t_user": ("user",)}

    def test_leaves_ids_as_they_are(self, plugin: Audit, start: RunStart) -> None:
        plugin.on_start(start)
        ids = torch.tensor([3, 1, 3])
        plugin.note("t_user", ids)
        plugin.note("t_user", ids[:0])
        assert ids.tolist() == [3, 1, 3]
