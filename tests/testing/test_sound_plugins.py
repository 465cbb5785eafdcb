"""The contract suites pass plugins that are right, though no built-in one is like them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from recd_plugins.interfaces import Callback, PluginOptions, Preprocessing, RunStep
from recd_plugins.runtime.errors import DataError
from recd_plugins.testing.contracts import CallbackContract, PreprocessingContract


class Scaled(Preprocessing):
    """Divide by the largest difference, which one row has not."""

    name = "test.scaled"
    takes = ("numbers",)

    def fit(self, feature: str, rows: Iterator[tuple[Tensor, Tensor]]) -> None:
        values = torch.cat([values for values, _ in rows])
        self.span = int(values.max() - values.min())
        if not self.span:
            raise DataError(f"{feature} is the same in all rows: leave it out")

    def identity(self) -> dict[str, Any]:
        return {"span": self.span}

    def transform(self, values: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        return values / self.span, offsets


def test_a_preprocessing_that_refuses_to_learn_of_one_row() -> None:
    contract, plugin = PreprocessingContract(), Scaled(PluginOptions())
    rows = contract._rows_of("numbers")
    values = torch.tensor([value for (value,) in rows])
    plugin.fit("number", iter([(values, torch.arange(len(rows) + 1))]))
    contract.test_identity_tells_what_was_fitted(plugin, rows)


class MeanLoss(Callback):
    """The mean loss of all ranks."""

    name = "test.mean_loss"

    def on_step(self, step: RunStep) -> None:
        loss = step.loss.clone()
        dist.all_reduce(loss)
        self.mean = loss.item() / dist.get_world_size()


class TestCallbackWithCollectiveCalls(CallbackContract):
    test_module_imports_without_torch = None  # type: ignore[assignment]

    @pytest.fixture
    def plugin(self) -> Callback:
        return MeanLoss(MeanLoss.Options())
