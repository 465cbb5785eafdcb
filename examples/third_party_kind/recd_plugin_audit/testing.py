"""The contract of audits, for plugins of the kind in whatever package."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from recd_plugin_audit.audit import Audit
from recd_plugins.api import RunStart
from recd_plugins.testing.contracts import CallbackContract


class AuditContract(CallbackContract):
    """Tests of an audit: override the fixture ``plugin``. Those of callbacks are among them."""

    @pytest.fixture
    def claimed(self) -> Sequence[str]:
        return ("t_user",)

    def test_sees_the_tables_of_its_entry_alone(self, plugin: Audit, start: RunStart) -> None:
        plugin.on_start(start)
        assert plugin.features == {"t_user": ("user",)}

    def test_leaves_ids_as_they_are(self, plugin: Audit, start: RunStart) -> None:
        plugin.on_start(start)
        ids = torch.tensor([3, 1, 3])
        plugin.note("t_user", ids)
        plugin.note("t_user", ids[:0])
        assert ids.tolist() == [3, 1, 3]
