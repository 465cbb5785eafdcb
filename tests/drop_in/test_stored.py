"""Features of a batch stored at once, as each by itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins.drop_in.batches import Stored
from recd_plugins.sparse.deduplicated_kjt import repeat_rows, unique_rows

KEYS = ["a", "b", "c", "d"]


def kjt(seed: int, dtype: torch.dtype, num_rows: int = 40) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(seed)
    values, lengths = [], []
    for repeats in (1, 5, 5, 1):
        distinct = torch.randint(0, 4, (9,), generator=generator)
        rows = torch.randint(9, (num_rows // repeats,), generator=generator)
        for row in rows.repeat_interleave(repeats).tolist():
            lengths.append(int(distinct[row]))
            values += [row + 9 * seed] * lengths[-1]
    return KeyedJaggedTensor(
        KEYS, torch.tensor(values).to(dtype), lengths=torch.tensor(lengths, dtype=torch.int32)
    )


@pytest.mark.parametrize("chosen", ["abcd", "bc", "d"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_chosen_features_are_stored_once(chosen: str, dtype: torch.dtype) -> None:
    stored = Stored({"batch": chosen})
    for seed in range(4):  # from the second on it knows how much to expect
        batch = kjt(seed, dtype)
        found = unique_rows(stored("batch", batch))
        assert found.keys() == KEYS
        for key, rows in zip(KEYS, found.stride_per_key(), strict=True):
            every = [tuple(row.tolist()) for row in batch[key].to_dense()]
            assert rows == (len(set(every)) if key in chosen else len(every))
        repeated = repeat_rows(found)
        for part in ("values", "lengths", "offsets"):
            assert torch.equal(getattr(repeated, part)(), getattr(batch, part)()), part
            assert getattr(repeated, part)().dtype == getattr(batch, part)().dtype


def test_another_place_stays_and_rows_may_be_missing() -> None:
    stored = Stored({"batch": "abcd"})
    batch = kjt(0, torch.int64)
    assert stored("elsewhere", batch) is batch
    none = KeyedJaggedTensor(KEYS, torch.zeros(0).long(), lengths=torch.zeros(0).int(), stride=0)
    assert unique_rows(stored("batch", none)).stride_per_key() == [0, 0, 0, 0]


def test_a_changed_batch_has_no_unique_rows() -> None:
    stored = Stored({"batch": "abcd"})

    def changed(change: Callable[[KeyedJaggedTensor], object], weighted: bool = False) -> bool:
        plain = kjt(0, torch.int64)
        if weighted:
            weights = torch.ones(plain.values().numel())
            plain = KeyedJaggedTensor(KEYS, plain.values(), weights, plain.lengths())
        batch = stored("batch", plain)
        change(batch)
        return unique_rows(batch) is batch

    assert not changed(lambda batch: batch.offsets())
    assert changed(lambda batch: batch.values().add_(1))
    assert changed(lambda batch: setattr(batch, "_keys", ["d", "c", "b", "a"]))
    assert changed(lambda batch: batch.weights().requires_grad_(), weighted=True)
    with torch.inference_mode():
        assert changed(lambda batch: None)
    with torch.inference_mode():
        plain = kjt(0, torch.int64)
    inference = stored("batch", plain)
    assert unique_rows(inference) is inference


@pytest.mark.parametrize("chosen", ["abcd", "bc"])
def test_what_is_deduplicated_already_stays_and_can_be_freed_once_sent(chosen: str) -> None:
    stored = Stored({"batch": chosen})
    once = stored("batch", kjt(0, torch.int64))
    assert stored("batch", once) is once
    for part in (unique_rows(once).values(), unique_rows(once).lengths()):
        part.untyped_storage().resize_(0)
