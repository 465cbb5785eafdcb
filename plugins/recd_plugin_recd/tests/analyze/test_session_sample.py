"""A sample of whole sessions in bounded memory."""

import numpy as np
import pyarrow as pa
import pytest

from recd_plugin_recd.analyze.samples import NUM_PARTS, SessionSample
from recd_plugins.interfaces import SessionKeys

KEYS = SessionKeys("session_id", "ts")


def table(rows: int, sessions: int, seed: int = 0) -> tuple[np.ndarray, pa.RecordBatch]:
    """Rows of sessions in a random order, and their hashes."""
    random = np.random.default_rng(seed)
    session = random.integers(0, sessions, rows)
    hashes = random.integers(0, 1 << 64, sessions, np.uint64)[session]
    times = random.integers(0, 100, rows)
    batch = pa.record_batch({"session_id": session, "ts": times, "row": np.arange(rows)})
    return hashes, batch


def sample(hashes, batch, max_bytes, size=100) -> SessionSample:
    held = SessionSample(KEYS, max_bytes)
    for start in range(0, len(hashes), size):
        held.add(batch.slice(start, size), hashes[start : start + size])
    return held


@pytest.mark.parametrize("size", [7, 100, 5000])
def test_a_table_that_fits_is_held_whole_by_session_and_time(size):
    hashes, batch = table(5000, 300)
    held = sample(hashes, batch, 10**9, size)
    assert (held.rate, held.num_rows) == (1, 5000)
    parts = list(held.by_session())
    assert len(parts) == NUM_PARTS
    found = pa.Table.from_batches([part for _, part in parts])
    assert sorted(found["row"].to_pylist()) == list(range(5000))
    seen = set()
    for part_hashes, part in parts:
        rows = part["row"].to_numpy()
        assert (part_hashes == hashes[rows]).all()
        order = list(zip(part_hashes, part["ts"].to_numpy(), rows, strict=True))
        assert order == sorted(order), "by session, time and place"
        assert not seen & set(part_hashes.tolist()), "a session is in one part"
        seen |= set(part_hashes.tolist())
    assert list(held.by_session()) == parts, "again"


def test_sessions_are_held_whole_or_not_at_all():
    hashes, batch = table(20_000, 1000)
    held = sample(hashes, batch, 100_000)
    assert held.num_rows * 24 <= 100_000
    assert held.num_rows > 1000
    found = np.concatenate([part_hashes for part_hashes, _ in held.by_session()])
    sessions, counts = np.unique(found, return_counts=True)
    expected = dict(zip(*np.unique(hashes, return_counts=True), strict=True))
    assert all(expected[session] == count for session, count in zip(sessions, counts, strict=True))
    assert len(sessions) / 1000 == pytest.approx(held.rate, rel=0.3)


def test_one_session_that_does_not_fit_is_cut_off():
    hashes, batch = table(20_000, 1)
    held = sample(hashes, batch, 10_000)
    assert 0 < held.num_rows < 1000
