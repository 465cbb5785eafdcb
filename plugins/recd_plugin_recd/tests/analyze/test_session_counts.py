"""Sessions counted in bounded memory: exactly where they are few, else as a sample."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recd_plugin_recd.analyze import samples
from recd_plugin_recd.analyze.samples import SessionCounts

RANDOM = np.random.default_rng(0)


def counted(hashes, cuts=(), max_sessions=1 << 16):
    counts = SessionCounts(max_sessions)
    for part in np.split(np.asarray(hashes, np.uint64), cuts):
        counts.add(part)
    return counts.result()


def some_hashes(number: int) -> np.ndarray:
    return RANDOM.integers(0, 1 << 64, number, np.uint64)


@given(
    st.lists(st.sampled_from([0, 5, 7, 2**64 - 1]), min_size=1, max_size=30),
    st.lists(st.integers(0, 30), max_size=3),
)
def test_counts_all_sessions_where_they_are_few(sessions, cuts):
    found = counted(sessions, sorted(cuts))
    rows = {session: sessions.count(session) for session in sessions}
    runs = [row for row, each in enumerate(sessions) if not row or each != sessions[row - 1]]
    again = [row for row in runs if sessions[row] in sessions[:row]]
    assert (found.sessions, found.rate, found.standard_error) == (len(rows), 1, 0)
    assert found.samples_per_session == pytest.approx(len(sessions) / len(rows))
    assert found.longest == max(rows.values())
    assert found.first_break == (min(again) if again else None)
    torn = {sessions[row] for row in again}
    assert found.broken == pytest.approx(len(torn) / len(rows))
    assert sum(found.histogram.values()) == len(rows)


def test_a_sample_of_many_sessions_has_their_mean_within_its_error(monkeypatch):
    monkeypatch.setattr(samples, "_MAX_WAITING", 5000)
    sizes = RANDOM.geometric(0.1, 20_000)
    hashes = np.repeat(some_hashes(20_000), sizes)
    RANDOM.shuffle(hashes)
    found = counted(hashes, range(1000, len(hashes), 1000), max_sessions=1000)
    assert found.counted <= 1000
    assert 0 < found.standard_error < 0.6
    error = abs(found.samples_per_session - sizes.mean())
    assert error < 4 * found.standard_error
    assert found.sessions == pytest.approx(20_000, rel=0.2)
    assert not found.clustered
    assert sum(found.histogram.values()) == pytest.approx(found.sessions, rel=0.01)


def test_counts_of_sampled_sessions_are_complete(monkeypatch):
    """Halving the bound never leaves a session that was counted from its middle."""
    monkeypatch.setattr(samples, "_MAX_WAITING", 50)
    hashes = np.tile(some_hashes(500), 6)
    found = counted(hashes, range(37, len(hashes), 37), max_sessions=40)
    assert found.counted <= 40
    assert (found.samples_per_session, found.median, found.longest) == (6, 6, 6)


def test_a_clustered_table_of_many_sessions_is_clustered(monkeypatch):
    monkeypatch.setattr(samples, "_MAX_WAITING", 100)
    hashes = np.repeat(some_hashes(1000), 3)
    found = counted(hashes, range(50, 3000, 50), max_sessions=100)
    assert found.clustered
    assert (found.samples_per_session, found.broken) == (3, 0)
