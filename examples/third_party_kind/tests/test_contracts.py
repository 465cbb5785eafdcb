"""Runs the contract test suite of audits, and tests the plugin ``audit.count_lookups``."""

import json
from pathlib import Path

import pytest
import torch
from recd_plugin_audit.lookups import CountLookups
from recd_plugin_audit.testing import AuditContract

from recd_plugins.api import RunEnd, RunStart


class TestCountLookups(AuditContract):
    @pytest.fixture
    def plugin(self, tmp_path: Path) -> CountLookups:
        return CountLookups(CountLookups.Options(path=tmp_path))

    def test_writes_what_it_counted(
        self, plugin: CountLookups, start: RunStart, tmp_path: Path
    ) -> None:
        plugin.on_start(start)
        plugin.note("t_user", torch.tensor([3, 1, 3]))
        plugin.on_end(RunEnd(0, 1, (0.5,)))
        written = json.loads((tmp_path / "rank0.json").read_text())
        assert written == {"steps": 1, "lookups": {"t_user": 3}}

    def test_fewer_ranks_take_over_all_counts(self, plugin: CountLookups, start: RunStart) -> None:
        plugin.on_start(start)
        plugin.load_state_dict([{"lookups": {"t_user": 3}}, {"lookups": {"t_user": 4}}])
        assert plugin.lookups == {"t_user": 7}
