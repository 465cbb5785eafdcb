"""Which shard a row goes to."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from recd_plugin_recd.logs.shard_key import session_shards
from recd_plugins.errors import DataError


def test_the_shard_of_an_id_never_changes():
    assert session_shards(pa.array([0, 1, -1, 2**62]), 1000).tolist() == [535, 465, 936, 75]
    assert session_shards(pa.array(["", "a", "é"]), 1000).tolist() == [756, 928, 963]


def test_the_width_of_the_type_does_not_matter():
    ids = [5, -7, 120]
    expected = session_shards(pa.array(ids, pa.int64()), 97)
    assert session_shards(pa.array(ids, pa.int8()), 97).tolist() == expected.tolist()
    texts = [b"x", b"yz"]
    assert (
        session_shards(pa.array(texts, pa.binary()), 97).tolist()
        == session_shards(pa.array(["x", "yz"], pa.large_string()), 97).tolist()
        == session_shards(pa.array(["x", "yz"]).dictionary_encode(), 97).tolist()
    )


@pytest.mark.parametrize("ids", [np.arange(20_000), [f"u{i}" for i in range(20_000)]])
def test_shards_get_even_shares(ids):
    counts = np.bincount(session_shards(pa.array(ids), 10), minlength=10)
    assert counts.min() > 1800
    assert counts.max() < 2200


def test_ids_that_are_none():
    with pytest.raises(DataError, match=r"row 1 \(from 0\): the session is null"):
        session_shards(pa.array([1, None]), 4)
    with pytest.raises(DataError, match="session ids are of type double"):
        session_shards(pa.array([1.0]), 4)
