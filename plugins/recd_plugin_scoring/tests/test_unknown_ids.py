"""Ids that training has not numbered are counted by vocabulary, not by feature."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from recd_plugin_scoring.unknown_ids import UnknownIds


def test_features_of_one_vocabulary_have_one_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of one of them would say of another one what it has not."""
    shared, own, hashed = (SimpleNamespace(num_ids=of, unknown_ids=None) for of in (5, 5, None))
    steps = {"item": [shared], "hist": [shared], "user": [hashed, own], "hour": [hashed]}
    monkeypatch.setattr("recd_plugin_scoring.unknown_ids.fitted_steps", lambda *_: steps)
    registry: Any = SimpleNamespace(dataset=SimpleNamespace(schema=lambda: None))
    unknown = UnknownIds(registry)
    assert list(unknown._features) == ["item and hist together", "user"]
    assert unknown._features["user"] is own.unknown_ids
