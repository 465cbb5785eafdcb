"""Conversion of batches to the inputs of TorchRec's embedding modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from recd_plugins.data.ipc import decode, encode
from recd_plugins.data.row_pipeline import lower
from recd_plugins.interfaces.batch import Batch, ModelInput, Placement
from recd_plugins.runtime.errors import DataError
from recd_plugins.runtime.launch import launch
from recd_plugins.sparse.ikjt import InverseKeyedJaggedTensor
from recd_plugins.sparse.partial_ikjt import PartialInverseKeyedJaggedTensor
from recd_plugins.testing.fake_cuda import fake_cuda, host_counts

# Rows 0 and 2 are equal in a and b; c differs in every row; d is empty in row 1.
ROWS: dict[str, list[list[int]]] = {
    "a": [[1, 2], [3], [1, 2]],
    "b": [[], [4, 5, 6], []],
    "c": [[7], [8], [9]],
    "d": [[10], [], [10]],
}


def kjt_of(rows: dict[str, list[list[int]]]) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        keys=list(rows),
        values=torch.tensor([i for feature in rows.values() for row in feature for i in row]),
        lengths=torch.tensor([len(row) for feature in rows.values() for row in feature]),
    )


#: How features of the batches below are looked up.
EXACT = Placement(pooled=("c", "a"), replicated=("d",), sequence=("b",))
PARTIAL = Placement(pooled=("c", "m"), replicated=("m",), sequence=("m", "n"))


@pytest.fixture
def batch() -> Batch:
    together, alone = InverseKeyedJaggedTensor.from_kjt(
        kjt_of({name: ROWS[name] for name in "abd"}), [["a", "b"], ["d"]]
    )
    return Batch(torch.zeros(3, 1), torch.zeros(3), kjt_of({"c": ROWS["c"]}), (together, alone))


def lists(jagged: JaggedTensor) -> list[list[int]]:
    return [row.tolist() for row in jagged.to_dense()]


def test_pooled_features_share_one_variable_batch(batch: Batch) -> None:
    kjt = lower(batch, Placement(pooled=("c", "a", "d"))).sparse_features
    assert kjt is not None
    assert kjt.keys() == ["c", "a", "d"]
    assert kjt.stride_per_key() == [3, 2, 2]
    keys, inverse = kjt.inverse_indices()
    assert keys == ["c", "a", "d"]
    for key, row in zip(keys, inverse, strict=True):
        unique = lists(kjt[key])
        assert [unique[i] for i in row.tolist()] == ROWS[key]


def test_replicated_features_have_every_row(batch: Batch) -> None:
    kjt = lower(batch, Placement(replicated=("b", "c", "d"))).replicated_features
    assert kjt is not None
    assert kjt.stride() == 3
    assert {key: lists(kjt[key]) for key in "bcd"} == {name: ROWS[name] for name in "bcd"}


def sequences_of(model_input: ModelInput) -> KeyedJaggedTensor:
    """Return the features, and check the longest row of each."""
    kjt = model_input.sequence_features
    assert kjt is not None
    for name, longest in model_input.longest.items():
        assert longest == model_input.unique_rows(name, kjt[name]).lengths().max()
    assert list(model_input.longest) == list(model_input.num_unique)
    return kjt


def test_sequence_features_have_unique_rows_and_padding_rows(batch: Batch) -> None:
    model_input = lower(batch, Placement(sequence=("a", "b", "c", "d")))
    kjt = sequences_of(model_input)
    assert kjt.stride() == 3  # c has three rows, the others two and an empty one
    assert model_input.num_unique == {"a": 2, "b": 2, "c": 3, "d": 2}
    assert set(model_input.inverse_lookup) == {"a", "b", "d"}
    assert model_input.inverse_lookup["a"] is model_input.inverse_lookup["b"]
    for key in "abd":
        unique = lists(kjt[key])
        assert [unique[i] for i in model_input.inverse_lookup[key].tolist()] == ROWS[key]
        assert unique[2] == []


MOVING = {"m": [[1, 2], [1, 2], [2, 3]], "n": [[4], [], []]}


@pytest.fixture
def partial_batch() -> Batch:
    partial = PartialInverseKeyedJaggedTensor.from_kjt(kjt_of(MOVING))
    plain = kjt_of({"c": [[7], [8], [9]]})
    return Batch(torch.zeros(3, 1), torch.zeros(3), plain, partials=(partial,))


def test_partial_sequence_features_have_stored_ids_and_segments(partial_batch: Batch) -> None:
    model_input = lower(partial_batch, Placement(sequence=("c", "m", "n")))
    kjt = sequences_of(model_input)
    assert lists(kjt["m"]) == [[1, 2, 3], [], []]
    assert lists(kjt["n"]) == [[4], [], []]
    assert model_input.num_unique == {"c": 3, "m": 2, "n": 2}
    assert set(model_input.segments) == {"m", "n"}
    embeddings = kjt.values().float().unsqueeze(1).requires_grad_()
    for name in "mn":
        start = kjt.offset_per_key()[kjt.keys().index(name)]
        count = kjt[name].values().numel()
        stored = JaggedTensor(embeddings[start:][:count], lengths=kjt[name].lengths())
        unique = lists(model_input.unique_rows(name, stored))
        rows = [unique[i] for i in model_input.inverse_lookup[name].tolist()]
        assert rows == [[[i] for i in row] for row in MOVING[name]]
    stored = JaggedTensor(embeddings[3:6], lengths=kjt["m"].lengths())
    model_input.unique_rows("m", stored).values().sum().backward()
    assert embeddings.grad is not None
    assert embeddings.grad[3:6].flatten().tolist() == [1, 2, 1]  # both unique rows have the 2


def test_partial_features_that_are_pooled_become_exact(partial_batch: Batch) -> None:
    placement = Placement(pooled=("m",), replicated=("m", "n"), sequence=("m",))
    model_input = lower(partial_batch, placement)
    pooled, replicated = model_input.sparse_features, model_input.replicated_features
    assert pooled is not None
    assert pooled.stride_per_key() == [2]
    assert lists(pooled["m"]) == [[1, 2], [2, 3]]
    assert pooled.inverse_indices()[1].tolist() == [[0, 0, 1]]
    assert replicated is not None
    assert {key: lists(replicated[key]) for key in "mn"} == MOVING


@pytest.mark.parametrize("form", ["pooled", "sequence"])
def test_weights_come_along_and_none_get_lost(form: str) -> None:
    (ikjt,) = InverseKeyedJaggedTensor.from_kjt(kjt_of({"a": ROWS["a"]}), [["a"]])
    kjt = kjt_of({"c": ROWS["c"]})
    kjt = KeyedJaggedTensor(["c"], kjt.values(), kjt.values() / 10, lengths=kjt.lengths())
    batch = Batch(torch.zeros(3, 1), torch.zeros(3), kjt, (ikjt,))
    model_input = lower(batch, Placement(**{form: ("c",)}))
    placed = model_input.sparse_features if form == "pooled" else model_input.sequence_features
    assert placed is not None
    torch.testing.assert_close(placed.weights(), placed.values() / 10)
    with pytest.raises(DataError, match="features 'c' have weights, but 'a' have none"):
        lower(batch, Placement(**{form: ("a", "c")}))


class Calls(TorchFunctionMode):
    """Which tensors are copied without blocking or kept for a stream; needs no device."""

    def __init__(self) -> None:
        super().__init__()
        self.copied: set[int] = set()
        self.kept: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.to and (kwargs or {}).get("non_blocking"):
            self.copied.add(id(args[0]))
        elif func is torch.Tensor.record_stream:
            self.kept.add(id(args[0]))
        else:
            return func(*args, **(kwargs or {}))
        return args[0]


def tensors_of(found: ModelInput) -> set[int]:
    tensors = [found.dense_features, found.labels, *found.inverse_lookup.values()]
    for kjt in (found.sparse_features, found.replicated_features, found.sequence_features):
        assert kjt is not None
        tensors += [kjt.values(), kjt.lengths()]
        if (inverse_indices := kjt.inverse_indices_or_none()) is not None:
            tensors.append(inverse_indices[1])
    for segments in found.segments.values():
        tensors += [segments.offsets, segments.lengths]
    return {id(tensor) for tensor in tensors}


@pytest.mark.parametrize("form", ["exact", "partial"])
def test_copies_can_overlap(form: str, batch: Batch, partial_batch: Batch) -> None:
    model_input = lower(batch, EXACT) if form == "exact" else lower(partial_batch, PARTIAL)
    assert model_input.sparse_features is not None
    assert model_input.sparse_features.inverse_indices_or_none() is not None
    with Calls() as calls:
        model_input.to(torch.device("cpu"), non_blocking=True)
        model_input.record_stream(torch.Stream(device="cpu"))
    assert calls.copied == calls.kept == tensors_of(model_input)
    moved = model_input.to(torch.device("meta"))
    assert moved.dense_features.is_meta
    assert all(segments.offsets.is_meta for segments in moved.segments.values())


def move_on_fake_cuda(rank: int, world_size: int, batches: list[ModelInput]) -> None:
    with fake_cuda() as device:
        for batch in batches:
            pinned = batch.pin_memory()
            # As reader workers hand over a block of batches.
            data = torch.from_numpy(encode([batch, pinned])).pin_memory()
            for source in (pinned, pinned.pin_memory(), *decode(data.numpy())):
                with host_counts() as counts:
                    moved = source.to(device, non_blocking=True)
                assert counts.by_phase("copy")["all"] == 1
                assert counts.by_phase("sync")["all"] == 0
                assert moved.sparse_features.values().is_cuda
                assert contents(moved) == contents(batch)


def contents(found: ModelInput) -> list[Any]:
    dense = [found.dense_features.tolist(), found.labels.tolist(), found.num_unique]
    for kjt in (found.sparse_features, found.replicated_features, found.sequence_features):
        keys, inverse = kjt.inverse_indices_or_none() or ([], torch.empty(0))
        dense += [kjt.keys(), kjt.stride(), kjt.length_per_key(), keys, inverse.tolist()]
        dense += [kjt.values().tolist(), kjt.lengths().tolist()]
    lookup = {name: each.tolist() for name, each in found.inverse_lookup.items()}
    segments = {name: (each.offsets.tolist(), each.total) for name, each in found.segments.items()}
    return [*dense, lookup, segments]


def test_a_pinned_batch_moves_in_one_copy(batch: Batch, partial_batch: Batch) -> None:
    launch(move_on_fake_cuda, 1, [lower(batch, EXACT), lower(partial_batch, PARTIAL)])


def test_request_rows_are_runs_of_equal_user_features(batch: Batch) -> None:
    dense = torch.tensor([[1.0, 5.0], [1.0, 6.0], [2.0, 7.0]])
    user = Batch(dense, batch.labels, batch.kjt, batch.ikjts, (), ("a", "b"), (0,))
    request = lower(user, Placement(pooled=("c", "a", "b", "d"))).request
    assert request is not None
    assert request.first_rows.tolist() == [0, 1, 2]
    assert request.inverse.tolist() == [0, 1, 2]
    same = Batch(dense[[0, 0, 2]], batch.labels, batch.kjt, (), (), (), (0,))
    request = lower(same, Placement(pooled=("c",))).request
    assert request is not None
    assert request.inverse.tolist() == [0, 0, 1]
    assert request.expand(request.select(dense[[0, 0, 2]]))[:, 0].tolist() == [1.0, 1.0, 2.0]
    assert lower(batch, Placement(pooled=("c",))).request is None
