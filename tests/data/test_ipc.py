"""Objects with tensors, as bytes or in shared memory: the same again, copied once."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins.data import ipc
from recd_plugins.data.ipc import decode, decode_file, encode, encode_to_file
from recd_plugins.data.lower import lower
from recd_plugins.interfaces.batch import Batch, Placement
from recd_plugins.interfaces.ingestion import BatchBlock
from recd_plugins.runtime.errors import SetupError
from recd_plugins.sparse import InverseKeyedJaggedTensor, PartialInverseKeyedJaggedTensor

DTYPES = (torch.int64, torch.int32, torch.float32, torch.float64, torch.bool, torch.int8)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 5), max_size=3))
    made = torch.randint(0, 2, shape).to(dtype)
    return made.t() if made.dim() == 2 and draw(st.booleans()) else made


@settings(max_examples=60, deadline=None)
@given(st.lists(tensors(), max_size=6), st.integers(0, 15), st.booleans(), st.booleans())
def test_what_is_decoded_was_encoded(given_tensors, offset, writable, shared):
    sent = {"tensors": given_tensors, "again": given_tensors[:1], "name": "x"}
    # A buffer lies anywhere in memory, and may be written to or not.
    received = bytearray(offset) + bytearray(encode(sent))
    buffer = memoryview(received if writable else bytes(received))[offset:]
    result = decode_file(*encode_to_file(sent)) if shared else decode(buffer)
    assert result["name"] == "x"
    for before, after in zip(given_tensors, result["tensors"], strict=True):
        assert after.dtype == before.dtype
        assert after.shape == before.shape
        assert torch.equal(after, before)
        assert after.data_ptr() % 8 == 0
    if given_tensors:
        assert result["again"][0] is result["tensors"][0]


def deduplicated_batch() -> Batch:
    """A batch of 50 sessions of 20 equal rows."""
    lists = {"a": [1, 2, 3], "b": [4], "c": list(range(9)), "d": []}
    size = 1000

    def of(*keys: str) -> KeyedJaggedTensor:
        rows = [(lists[key], row // 20) for key in keys for row in range(size)]
        return KeyedJaggedTensor(
            keys=list(keys),
            values=torch.tensor([first + session for ids, session in rows for first in ids]).long(),
            lengths=torch.tensor([len(ids) for ids, _ in rows], dtype=torch.int32),
        )

    return Batch(
        torch.rand(size, 2),
        torch.ones(size),
        of("d"),
        InverseKeyedJaggedTensor.from_kjt(of("a", "b"), [["a", "b"]]),
        (PartialInverseKeyedJaggedTensor.from_kjt(of("c")),),
    )


@pytest.mark.parametrize("of", [bytes, np.asarray])
def test_tensors_are_views_of_the_buffer(of):
    placement = Placement(pooled=("a", "d"), replicated=("b",), sequence=("c",))
    block = BatchBlock(3, [(lower(deduplicated_batch(), placement), {"step": 1})], {"epoch": 1})
    buffer = of(encode(block))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of buffers that are read-only
        result = decode(buffer)
    start = np.frombuffer(buffer, np.uint8).ctypes.data
    end = start + memoryview(buffer).nbytes
    (found, position), expected = result.batches[0], block.batches[0][0]
    assert (result.number, position, result.end) == (3, {"step": 1}, {"epoch": 1})

    def tensors_of(each):
        yield from (each.labels, each.dense_features, each.segments["c"].offsets)
        yield each.sparse_features.inverse_indices()[1]
        for kjt in (each.sparse_features, each.replicated_features, each.sequence_features):
            yield from (kjt.values(), kjt.lengths())

    for tensor, before in zip(tensors_of(found), tensors_of(expected), strict=True):
        assert start <= tensor.data_ptr() <= end
        assert torch.equal(tensor, before)


def test_another_version_is_refused(monkeypatch):
    monkeypatch.setattr(ipc, "_versions", lambda: "recd-plugins 9.9, torch 2.13, torchrec 1.8")
    other = encode(torch.arange(3))
    monkeypatch.undo()
    with pytest.raises(SetupError, match=r"a reader has recd-plugins 9\.9.* install the same"):
        decode(other)
