"""Runs the contract test suites, and tests the behaviour of both example plugins."""

import pytest
import torch
from recd_plugin_example.drop_repeats import DropRepeats
from recd_plugin_example.recency import Recency
from torchrec import JaggedTensor

from recd_plugins.testing.contracts import PoolingContract, PreprocessingContract


class TestDropRepeats(PreprocessingContract):
    @pytest.fixture
    def plugin(self) -> DropRepeats:
        return DropRepeats(DropRepeats.Options())

    def test_drops_repeats_inside_rows_only(self, plugin: DropRepeats) -> None:
        values = torch.tensor([7, 7, 7, 3, 3, 7, 7, 1])
        values, offsets = plugin.transform(values, torch.tensor([0, 6, 6, 8]))
        assert values.tolist() == [7, 3, 7, 7, 1]
        assert offsets.tolist() == [0, 3, 3, 5]


class TestRecency(PoolingContract):
    @pytest.fixture
    def plugin(self) -> Recency:
        return Recency(Recency.Options(half_life=1))

    def test_newer_items_weigh_more(self, plugin: Recency) -> None:
        embeddings = torch.eye(3)
        pooled = plugin.build(3)(JaggedTensor(values=embeddings, lengths=torch.tensor([3])))
        torch.testing.assert_close(pooled, torch.tensor([[1.0, 2.0, 4.0]]) / 7)
