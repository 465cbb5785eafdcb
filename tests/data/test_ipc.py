"""Objects with tensors, as bytes or in shared memory: the same again, copied once."""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins.data import ipc
from recd_plugins.data.ipc import decode, encode, pack, unpack
from recd_plugins.data.lower import lower
from recd_plugins.interfaces.batch import Batch, ModelInput, Placement
from recd_plugins.interfaces.ingestion import BatchBlock
from recd_plugins.runtime.errors import SetupError
from recd_plugins.sparse import InverseKeyedJaggedTensor, PartialInverseKeyedJaggedTensor

DTYPES = (torch.int64, torch.int32, torch.float32, torch.float64, torch.bool, torch.int8)


def kjt(num_sessions: int, rows_a_session: int, **features: list[int]) -> KeyedJaggedTensor:
    """Each feature has the same list in all rows of a session."""
    rows = [(features[name], session) for name in features for session in range(num_sessions)]
    ids = [[first + session for first in row] for row, session in rows]
    repeated = [row for row in ids for _ in range(rows_a_session)]
    return KeyedJaggedTensor(
        keys=list(features),
        values=torch.tensor([value for row in repeated for value in row], dtype=torch.int64),
        lengths=torch.tensor([len(row) for row in repeated], dtype=torch.int32),
    )


def session_batch(num_sessions: int = 8, rows_a_session: int = 6) -> tuple[Batch, Batch]:
    """A batch without duplicates and the same batch plain."""
    all_rows = kjt(num_sessions, rows_a_session, a=[1, 2, 3], b=[4], c=list(range(9)), d=[])
    parts = {key: all_rows.to_dict()[key] for key in all_rows.keys()}  # noqa: SIM118
    size = num_sessions * rows_a_session

    def of(*keys: str) -> KeyedJaggedTensor:
        return KeyedJaggedTensor(
            keys=list(keys),
            values=torch.cat([parts[key].values() for key in keys]),
            lengths=torch.cat([parts[key].lengths() for key in keys]),
        )

    plain = Batch(torch.rand(size, 2), torch.ones(size), kjt=of("a", "b", "c", "d"))
    deduplicated = replace(
        plain,
        kjt=of("d"),
        ikjts=InverseKeyedJaggedTensor.from_kjt(of("a", "b"), [["a", "b"]]),
        partials=(PartialInverseKeyedJaggedTensor.from_kjt(of("c"), ["c"]),),
    )
    return deduplicated, plain


PLACEMENT = Placement(pooled=("a", "d"), replicated=("b",), sequence=("c",))


def tensors_of(model_input: ModelInput) -> dict[str, Tensor]:
    """Every tensor of a model input."""
    found = {"dense": model_input.dense_features, "labels": model_input.labels}
    for name in ("sparse_features", "replicated_features", "sequence_features"):
        features: KeyedJaggedTensor = getattr(model_input, name)
        found |= {f"{name} values": features.values(), f"{name} lengths": features.lengths()}
        if (inverse := features.inverse_indices_or_none()) is not None:
            found[f"{name} inverse"] = inverse[1]
    return found | {f"inverse of {name}": each for name, each in model_input.inverse_lookup.items()}


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 5), max_size=3))
    made = torch.randint(0, 2, shape).to(dtype)
    return made.t() if made.dim() == 2 and draw(st.booleans()) else made


@settings(max_examples=60, deadline=None)
@given(st.lists(tensors(), max_size=6), st.integers(0, 15), st.booleans())
def test_what_is_decoded_was_encoded(given_tensors, offset, writable):
    """Wherever the buffer lies in memory, in bytes that may be written to or not."""
    sent = encode({"tensors": given_tensors, "again": given_tensors[:1], "name": "x"})
    received = bytearray(offset) + bytearray(sent)
    buffer = memoryview(received if writable else bytes(received))[offset:]
    result = decode(buffer)
    assert result["name"] == "x"
    for before, after in zip(given_tensors, result["tensors"], strict=True):
        assert after.dtype == before.dtype
        assert after.shape == before.shape
        assert torch.equal(after, before)
        assert after.data_ptr() % 8 == 0, "of a buffer at any place"
    if given_tensors:
        assert result["again"][0] is result["tensors"][0]


@pytest.mark.parametrize("of", [bytes, bytearray, memoryview, np.asarray])
def test_tensors_are_views_of_the_buffer(of):
    block = BatchBlock(3, [(lower(session_batch()[0], PLACEMENT), {"step": 1})], {"epoch": 1})
    buffer = of(encode(block))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of buffers that are read-only
        result = decode(buffer)
    start = np.frombuffer(buffer, np.uint8).ctypes.data
    end = start + memoryview(buffer).nbytes
    (model_input, position), expected = result.batches[0], block.batches[0][0]
    assert (result.number, position, result.end) == (3, {"step": 1}, {"epoch": 1})
    for name, tensor in tensors_of(model_input).items():
        assert start <= tensor.data_ptr() <= end, f"{name} was copied"
        assert (tensor.data_ptr() - start) % 64 == 0 or not tensor.numel()
        assert torch.equal(tensor, tensors_of(expected)[name])
    segments = model_input.segments["c"]
    embeddings = torch.rand(model_input.sequence_features.values().numel(), 4)
    gathered = segments.gather(embeddings)
    assert torch.equal(gathered.values(), expected.segments["c"].gather(embeddings).values())


@pytest.mark.parametrize("form", ["batch", "model input"])
def test_deduplicated_features_travel_once(form):
    """Against the same batch without deduplication; the header and structure are in it."""
    deduplicated, plain = session_batch(num_sessions=50, rows_a_session=20)
    if form == "model input":
        placement = Placement(sequence=("a", "b", "c", "d"))
        deduplicated, plain = (lower(batch, placement) for batch in (deduplicated, plain))
    sizes = [encode(batch).nbytes for batch in (deduplicated, plain)]
    # 13 ids of 8 bytes and 4 lengths of 4 in every row, or in every session.
    rows, sessions = 1000 * (13 * 8 + 4 * 4), 50 * (13 * 8 + 4 * 4)
    assert rows < sizes[1] < rows + 1000 * 12 + 4000
    # Labels, dense features, the lengths of d, and inverse lookups of two groups or partials.
    assert sizes[0] < sessions + 1000 * (12 + 4 + 3 * 8) + 6000


def test_another_version_is_refused(monkeypatch):
    sent = encode(torch.arange(3))
    with monkeypatch.context() as patched:
        patched.setattr(ipc, "_versions", lambda: "recd-plugins 9.9, torch 2.13, torchrec 1.8")
        other = encode(torch.arange(3))
    with pytest.raises(SetupError, match=r"a reader has recd-plugins 9\.9.* install the same"):
        decode(other)
    with monkeypatch.context() as patched:
        patched.setattr(ipc, "WIRE_VERSION", ipc.WIRE_VERSION + 1)
        with pytest.raises(SetupError, match=r"version 1; .* version 2"):
            decode(sent)


def test_tensors_keep_type_shape_and_values():
    tensors = [
        torch.arange(7),
        torch.rand(3, 5),
        torch.rand(4, 6).t()[1:3],
        torch.tensor([True, False, True]),
        torch.zeros(0, dtype=torch.int32),
        torch.tensor(2.5, dtype=torch.float64),
    ]
    packed = pack({"tensors": tensors, "name": "x"})
    assert packed.data.is_shared()
    result = unpack(packed)
    assert result["name"] == "x"
    for before, after in zip(tensors, result["tensors"], strict=True):
        assert after.dtype == before.dtype
        assert after.shape == before.shape
        assert torch.equal(after, before)
        assert after.data_ptr() % 64 == 0 or not after.numel()
