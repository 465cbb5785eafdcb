from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from recd_plugins.data import ipc
from recd_plugins.data.ipc import decode, decode_file, encode, encode_to_file
from recd_plugins.runtime.errors import SetupError


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    dtypes = [torch.int64, torch.int32, torch.float32, torch.float64, torch.bool, torch.int8]
    dtype = draw(st.sampled_from(dtypes))
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


def test_tensors_are_views_of_the_buffer():
    buffer = encode(torch.arange(9))
    assert buffer.ctypes.data < decode(buffer).data_ptr() < buffer.ctypes.data + len(buffer)


def test_another_version_is_refused(monkeypatch):
    monkeypatch.setattr(ipc, "_versions", lambda: "recd-plugins 9.9, torch 2.13, torchrec 1.8")
    other = encode(torch.arange(3))
    monkeypatch.undo()
    message = r"a reader process uses recd-plugins 9\.9.* Install the same"
    with pytest.raises(SetupError, match=message):
        decode(other)
