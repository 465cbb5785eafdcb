"""Ids that training has not numbered are counted by vocabulary, not by feature."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from recd_plugin_runs.evaluate import UnknownIds
from recd_plugins.api import PluginOptions, Preprocessing


class Hashed(Preprocessing):
    name = "test.hashed"

    def transform(self, values: Any, offsets: Any) -> Any:
        return values, offsets


class Fitted(Hashed):
    name = "test.fitted"

    def fit(self, feature: str, rows: Any) -> None:
        pass


def test_features_of_one_vocabulary_have_one_count(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed, *fitted = (cls(PluginOptions()) for cls in (Hashed, *[Fitted] * 4))
    shared, own, behind, numbers = fitted
    steps = {"item": [shared], "hist": [shared], "user": [hashed, own, behind], "hour": [hashed]}
    monkeypatch.setattr("recd_plugins.data.preprocess.fitted_steps", lambda *_: steps)
    schema = SimpleNamespace(sparse=tuple(steps))
    steps["price"] = [numbers]
    registry: Any = SimpleNamespace(dataset=SimpleNamespace(schema=lambda: schema))
    unknown = UnknownIds(registry)
    assert [names for names, _ in unknown._counted.values()] == [
        ["item", "hist"],
        ["user"],
        ["user"],
    ]
    for (_, found), step in zip(unknown._counted.values(), fitted, strict=False):
        assert found is step.unknown_ids
    assert hashed.unknown_ids is None
    assert numbers.unknown_ids is None, "of numbers no id is unknown"
