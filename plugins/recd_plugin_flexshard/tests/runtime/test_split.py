"""Every id of a batch goes to one tier, and comes back to its place."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugin_flexshard.runtime import RowTiers
from recd_plugin_flexshard.runtime.split import Places, TierIndex
from recd_plugins.runtime.errors import DataError

FEATURES = {"t": ["a", "b"], "u": ["c"], "v": ["d"]}
ROWS = {"t": 13, "u": 6, "v": 8}
CPU = torch.device("cpu")


def config(name: str, rows: int, features: list[str]) -> EmbeddingConfig:
    sizes = {"embedding_dim": 4, "num_embeddings": rows}
    return EmbeddingConfig(name=name, feature_names=features, **sizes)


@st.composite
def row_tiers(draw: st.DrawFn, num_rows: int) -> RowTiers:
    rows = draw(st.permutations(range(num_rows)))
    hot = draw(st.integers(0, num_rows))
    return RowTiers(rows[:hot], rows[hot : draw(st.integers(hot, num_rows))])


@settings(max_examples=150, deadline=None)
@given(
    data=st.data(),
    ranks_per_node=st.integers(1, 4),
    dtype=st.sampled_from([torch.int32, torch.int64]),
    stride=st.integers(1, 3),
)
def test_split(data: st.DataObject, ranks_per_node: int, dtype: torch.dtype, stride: int) -> None:
    tables = data.draw(st.sets(st.sampled_from(sorted(ROWS)), min_size=1))
    tiers = {name: data.draw(row_tiers(ROWS[name])) for name in ROWS if name in tables}
    configs = [config(name, ROWS[name], FEATURES[name]) for name in ROWS]
    index = TierIndex(configs, tiers, ranks_per_node, CPU)
    table_of = {name: table for table, names in FEATURES.items() for name in names}
    # In any order, and with a feature of another module.
    keys = data.draw(st.permutations([*table_of, "other"]))
    lists = {
        key: [
            data.draw(st.lists(st.integers(0, ROWS.get(table_of.get(key, ""), 1) - 1), max_size=9))
            for _ in range(stride)
        ]
        for key in keys
    }
    split = index.split(
        KeyedJaggedTensor(
            keys=keys,
            values=torch.tensor([id for key in keys for row in lists[key] for id in row]).to(dtype),
            lengths=torch.tensor([len(row) for key in keys for row in lists[key]]),
        )
    )

    # What each tier has to look up is, merged, the (table, row) of each id.
    flex_rows = [_pairs(index.flex_rows(rank)) for rank in range(ranks_per_node)]
    hot_rows = _pairs(index.hot_rows())
    merged: list[tuple[str, int]] = []
    chosen = {(table, int(row)) for table, rows in tiers.items() for row in (*rows.hot, *rows.flex)}
    for feature in index.features:
        cold = split.cold[feature]
        table = table_of[feature]
        pairs = [(table, id) for id in cold.values().tolist()]
        assert not chosen.intersection(pairs)
        merged += pairs
        sizes = [sum((table, id) not in chosen for id in row) for row in lists[feature]]
        assert cold.lengths().tolist() == sizes
    merged += [hot_rows[position] for position in split.hot.tolist()]
    positions = split.flex.tolist()
    for rows, sizes in zip(flex_rows, split.flex_sizes.tolist(), strict=True):
        for feature, size in zip(index.features, sizes, strict=True):
            taken, positions = positions[:size], positions[size:]
            merged += [rows[position] for position in taken]
            assert {rows[position][0] for position in taken} <= {table_of[feature]}
    assert not positions
    expected = [
        (table_of[name], id) for name in index.features for row in lists[name] for id in row
    ]
    source = torch.cat([split.cold_source, split.hot_source, split.flex_source]).tolist()
    assert sorted(source) == list(range(len(expected)))
    assert [expected[place] for place in source] == merged
    for feature in table_of.keys() - set(index.features):
        assert split.cold[feature].values().tolist() == [id for row in lists[feature] for id in row]
    assert set(split.cold.keys()) == table_of.keys()


def index_of(*tiers: RowTiers) -> TierIndex:
    configs = [config(name, 9, [name]) for name in "tu"]
    return TierIndex(configs, dict(zip("tu", tiers, strict=True)), 2, CPU)


def test_flex_rows_are_dealt_out_in_turns() -> None:
    index = index_of(RowTiers([], [5, 1, 7]), RowTiers([], [8, 0]))
    assert _pairs(index.flex_rows(0)) == [("t", 5), ("t", 7), ("u", 0)]
    assert _pairs(index.flex_rows(1)) == [("t", 1), ("u", 8)]


@pytest.mark.parametrize("bad", [-1, 9])
def test_ids_outside_their_table_are_refused(bad: int) -> None:
    index = index_of(RowTiers([5]), RowTiers([8]))
    ids = KeyedJaggedTensor(["t", "u"], torch.tensor([3, 4, bad]), lengths=torch.tensor([1, 2]))
    with pytest.raises(DataError, match=f"feature 'u' has the id {bad}, .* rows 0 to 8"):
        index.split(ids)


def _pairs(rows: dict[str, torch.Tensor]) -> list[tuple[str, int]]:
    return [(table, row) for table, each in rows.items() for row in each.tolist()]


KEYS = st.integers(-2, 40) | st.integers(-1, 2**62)


@given(st.lists(KEYS, unique=True, max_size=60), st.lists(KEYS, max_size=60))
def test_keys_are_found_at_their_places_and_others_nowhere(
    keys: list[int], others: list[int]
) -> None:
    places = Places(np.array(keys, dtype=np.int64), CPU)
    wanted = keys + others
    expected = [keys.index(key) if key in keys else -1 for key in wanted]
    assert places.find(torch.tensor(wanted, dtype=torch.int64)).tolist() == expected


@pytest.mark.parametrize("step", [1, 2, 64, 4096, 2**20, 1_000_003])
def test_regular_keys_have_few_in_a_bucket(step: int) -> None:
    keys = np.arange(100_000, dtype=np.int64) * step
    places = Places(keys, CPU)
    assert places._most <= 16
    assert torch.equal(places.find(torch.from_numpy(keys)), torch.arange(len(keys)))
