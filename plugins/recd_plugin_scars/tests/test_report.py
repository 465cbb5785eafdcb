"""What is said of caches: counted next to predicted."""

from __future__ import annotations

import json
from io import StringIO

import pytest
from rich.console import Console

from recd_plugin_scars.report import (
    CachedTableReport,
    CacheReport,
    StepTraffic,
    merged,
)

SEEN = StepTraffic(100.0, 50.0, 30.0, 20.0, 1200.0, 800.0)
EXPECTED = StepTraffic(100.0, 50.0, 25.0, 25.0, 1250.0, 1250.0)


def shown(report: CacheReport) -> str:
    text = StringIO()
    Console(file=text, width=80).print(*report.shown("mine"))
    return text.getvalue()


def test_ranks_add_up_by_table() -> None:
    found = merged([{"a": SEEN}, {"a": SEEN, "b": EXPECTED}, {}])
    assert found == {"a": StepTraffic(200.0, 100.0, 60.0, 40.0, 2400.0, 1600.0), "b": EXPECTED}


def test_all_tables() -> None:
    report = CacheReport(
        (
            CachedTableReport("a", "static", 1000, 50, SEEN, EXPECTED),
            CachedTableReport("b", "lru", 10, 10, EXPECTED, EXPECTED),
        )
    )
    assert (report.observed_bytes, report.predicted_bytes) == (4500.0, 5000.0)
    text = shown(report)
    for words in ("mine, caches", "50 (5.00%)", "2 KB", "0.800", "0.900", "policy lru, static"):
        assert words in text
    found = json.loads(json.dumps(report.as_json()))
    assert found["backing_store_bytes"] == {"observed": 4500.0, "predicted": 5000.0}
    assert found["tables"]["a"]["observed"]["misses"] == 20
    assert found["tables"]["a"]["backing_store_ratio"] == pytest.approx(0.8)


def test_what_is_not_known_is_left_out() -> None:
    report = CacheReport((CachedTableReport("a", "static", 1000, 0, None, None),))
    assert report.observed_bytes is report.predicted_bytes is None
    assert report.tables[0].ratio is None
    assert "0 (0.00%)" in shown(report)
    nothing = StepTraffic(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    assert CachedTableReport("a", "lfu", 9, 9, nothing, nothing).ratio is None
