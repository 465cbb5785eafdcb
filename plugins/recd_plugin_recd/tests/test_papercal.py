"""The generated table has the statistics that the project's goals are set on."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from recd_plugin_recd import papercal

# Sessions are long-tailed: 2^17 rows hold about 8,000 of them, which leaves 1 % of noise.
ROWS = 1 << 17


def keys_of(rows: int, layout: papercal.Layout, seed: int = 0) -> papercal.RowKeys:
    return papercal.RowKeys.concat(list(papercal.row_keys(rows, seed, layout)))


def auc(scores: np.ndarray, labels: np.ndarray) -> float:
    """How often a positive row's score is above a negative one's."""
    ranks = np.argsort(np.argsort(scores)) + 1
    positive = labels == 1
    num_positive, num_negative = positive.sum(), (~positive).sum()
    above = ranks[positive].sum() - num_positive * (num_positive + 1) / 2
    return float(above / (num_positive * num_negative))


@pytest.fixture(scope="module")
def clustered() -> pa.RecordBatch:
    """4096 rows of whole sessions."""
    return papercal.make_rows(keys_of(4096, "clustered"))


def test_sessions_have_the_mean_and_the_tail_of_the_paper():
    _, lengths = np.unique(keys_of(1 << 20, "clustered").sessions, return_counts=True)
    assert lengths.mean() == pytest.approx(16.5, rel=0.03)
    assert lengths.max() > 1000


def test_duplicates_are_those_of_the_paper():
    """Bytes of lists by whether the session's previous row has the list, or all but its tail."""
    total = exact = partial = 0
    for keys in papercal.chunks(papercal.row_keys(ROWS, 0, "clustered"), 1 << 14):
        versions = papercal.list_versions(
            keys.sessions, keys.positions, papercal.KEEP, papercal.REPLACE_SHARE
        )
        for feature in papercal.FEATURES:
            offsets = papercal.list_offsets(keys.sessions, feature.clock, feature.mean_length)
            lengths = np.diff(offsets).astype(np.int64)
            moved = np.diff(versions[feature.clock], prepend=0)
            moved[keys.positions == 0] = lengths[keys.positions == 0]
            total += lengths.sum()
            exact += lengths[moved == 0].sum()
            partial += np.maximum(0, lengths - moved).sum()
    assert total / ROWS == pytest.approx(1583, rel=0.02)
    assert exact / total == pytest.approx(0.815, abs=0.01)
    assert partial / total == pytest.approx(0.897, abs=0.01)
    assert total / (total - exact) == pytest.approx(5.4, rel=0.05)
    assert total / (total - partial) == pytest.approx(9.7, rel=0.05)


def test_layouts_by_session_and_by_time_hold_the_same_rows():
    by_session, by_time = keys_of(50_000, "clustered"), keys_of(50_000, "interleaved")
    assert (np.diff(by_time.times) >= 0).all()
    order = np.lexsort((by_time.positions, by_time.sessions))
    expected = by_session[np.lexsort((by_session.positions, by_session.sessions))]
    for name in ("sessions", "positions", "times"):
        assert (getattr(by_time[order], name) == getattr(expected, name)).all()


@pytest.mark.parametrize("layout", ["clustered", "interleaved", "stream"])
def test_a_row_is_the_same_whatever_the_chunks(layout):
    keys = papercal.RowKeys.concat(list(papercal.row_keys(600, 5, layout)))
    whole = papercal.make_rows(keys)
    parts = [
        papercal.make_rows(chunk)
        for chunk in papercal.chunks(papercal.row_keys(600, 5, layout), 127)
    ]
    assert [len(part) for part in parts] == [127, 127, 127, 127, 92]
    assert pa.Table.from_batches(parts).combine_chunks() == pa.table(whole)


def test_ids_are_63_bit_and_skewed(clustered):
    ids, counts = np.unique(
        papercal.make_rows(keys_of(8192, "stream")).column("item_0").values, return_counts=True
    )
    assert ids.min() >= 0
    assert ids.max() > 1 << 61
    # The first of a million Zipf(1) ranks has about ln 2 / ln 10^6 = 5 % of the draws.
    assert counts.max() / counts.sum() == pytest.approx(0.05, abs=0.01)


def test_the_label_can_be_learned_from_dense_features_and_from_ids():
    rows = papercal.make_rows(keys_of(1 << 15, "stream"))
    label = np.asarray(rows["label"])
    assert label.mean() == pytest.approx(0.25, abs=0.02)
    dense = np.stack([rows[f"dense_{i}"] for i in range(papercal.NUM_DENSE)], axis=1)
    top, counts = np.unique(rows["item_0"].values, return_counts=True)
    top = top[np.argsort(-counts)[:50]]
    one_hot = np.asarray(rows["item_0"].values)[:, None] == top[None, :]
    half = len(label) // 2
    aucs = []
    for features in (dense, np.hstack([dense, one_hot])):
        with_bias = np.hstack([features, np.ones((len(label), 1))])
        weights, *_ = np.linalg.lstsq(with_bias[:half], label[:half], rcond=None)
        aucs.append(auc(with_bias[half:] @ weights, label[half:]))
    assert aucs[0] > 0.6
    assert aucs[1] > aucs[0] + 0.02
