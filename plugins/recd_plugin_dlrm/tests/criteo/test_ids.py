"""How ids become rows of tables."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recd_plugin_dlrm.criteo.dataset import CountedRows, IdCounts
from recd_plugin_dlrm.criteo.days import SPARSE
from recd_plugin_dlrm.tests.criteo.criteo_cases import make, sample_rows, write_day
from recd_plugins.runtime.errors import DataError


def ids_of(dataset, split: str = "train") -> dict[str, list[int]]:
    found: dict[str, list[int]] = {name: [] for name in SPARSE}
    for rows in dataset.reader(rank=0, world_size=1, batch_size=1, split=split):
        for name in SPARSE:
            found[name] += rows.data[name].to_pylist()
    return found


def reference(raw: dict[str, list[int]], threshold: int, most: int | None):
    numbers = {}
    for name, ids in raw.items():
        counts = Counter(value for value in ids if value)
        order = sorted(counts, key=lambda value: (-counts[value], value))
        frequent = [value for value in order if counts[value] >= threshold]
        if most is not None:
            frequent = frequent[: most - 2]
        numbers[name] = {0: 0, **{value: 2 + place for place, value in enumerate(frequent)}}
    return numbers


@pytest.mark.parametrize(("threshold", "most"), [(1, None), (3, None), (2, 5), (1000, None)])
@pytest.mark.parametrize("kaggle", [False, True])
def test_the_dictionary_is_of_the_training_days(write_days, kaggle, threshold, most):
    folder = write_days("tsv", *((200,) if kaggle else (90, 40, 60)), kaggle=kaggle)
    raw, raw_test = (ids_of(make(folder, categorical="raw"), split) for split in ("train", "test"))
    numbers = reference(raw, threshold, most)
    dataset = make(folder, categorical="dictionary", threshold=threshold, max_ids=most)
    dataset.prepare()
    for split, expected in (("train", raw), ("test", raw_test)):
        coded = {n: [numbers[n].get(value, 1) for value in expected[n]] for n in SPARSE}
        assert ids_of(dataset, split) == coded


@settings(deadline=None, max_examples=50)
@given(st.lists(st.lists(st.integers(0, 20), max_size=30), max_size=8), st.integers(1, 40))
def test_counting_in_parts_is_counting(parts, waiting):
    counts = IdCounts()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("recd_plugin_dlrm.criteo.dataset._FEWEST_WAITING", waiting)
        for part in parts:
            counts.add(*np.unique(np.array(part, np.int64), return_counts=True))
        counts.flush()
    expected = Counter(value for part in parts for value in part)
    assert dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True)) == expected
    assert counts.ids.tolist() == sorted(expected)


def test_the_dictionary_is_made_once(write_days, monkeypatch):
    folder = write_days("tsv", 60, 30, 30)
    cache = folder / ".recd-criteo"

    def made() -> int:
        return len(list(cache.glob("dictionary-*")))

    options = {"categorical": "dictionary", "threshold": 1}
    make(folder, **options).prepare()
    expected = ids_of(make(folder, **options))
    with monkeypatch.context() as patch:
        patch.setattr(CountedRows, "count", None)
        assert ids_of(make(folder, **options)) == expected
        # Evaluation reads other rows of the last day, which is none of training's.
        assert ids_of(make(folder, evaluate="validation", **options)) == expected
    assert made() == 1
    make(folder, categorical="dictionary", threshold=2).prepare()
    make(folder, evaluate="nothing", **options).prepare()
    assert made() == 3
    write_day(folder, "day_0", "tsv", sample_rows(60, seed=9))
    assert ids_of(make(folder, **options)) != expected
    assert made() == 4


def test_buckets_by_pattern(write_days):
    folder = write_days("tsv", 40, 30)
    raw = ids_of(make(folder, categorical="raw"))
    hashed = ids_of(make(folder, buckets={"cat_1": 7, "cat_1?": 11, "*": 13}))
    sizes = dict.fromkeys(SPARSE, 13) | {f"cat_1{n}": 11 for n in range(10)} | {"cat_1": 7}
    assert hashed == {name: [value % sizes[name] for value in raw[name]] for name in SPARSE}


@pytest.mark.parametrize(
    ("buckets", "message"),
    [
        ({"cat_1": 7}, "option 'buckets': feature 'cat_0' is missing"),
        ({"*": 7, "cat_26": 7}, "option 'buckets': 'cat_26' matches no feature"),
    ],
)
def test_buckets_that_are_refused(write_days, buckets, message):
    with pytest.raises(DataError, match=message):
        make(write_days("tsv", 40, 30), buckets=buckets).prepare()


def test_a_state_of_another_coding_is_refused(write_days):
    folder = write_days("tsv", 40, 30)
    ten, eleven = (
        make(folder, buckets=buckets).reader(rank=0, world_size=1, batch_size=4, split="train")
        for buckets in (10, 11)
    )
    with pytest.raises(DataError, match="'encoding' was"):
        eleven.load_state_dict(ten.state_dict())
