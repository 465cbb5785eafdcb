"""Odd input of coalesced tables is as without coalescing, or refused."""

from __future__ import annotations

import torch
from tests.distributed.coalesced import odd_cases

from recd_plugins.testing.gloo import run_on_ranks


def test_outputs_are_those_without() -> None:
    (found,) = run_on_ranks(odd_cases.outputs, 1)
    for name, coalesced, plain in found:
        assert coalesced.dtype == plain.dtype, name
        tolerance = 1e-6 if plain.dtype == torch.float32 else 2e-3
        torch.testing.assert_close(coalesced, plain, rtol=tolerance, atol=tolerance, msg=name)


def test_refusals() -> None:
    (found,) = run_on_ranks(odd_cases.refusals, 1)
    expected = [
        "inverse indices of feature a are from 0 to 3, and it has 3 rows",
        "inverse indices of feature b are from -1 to 2, and it has 3 rows",
        "without inverse indices of features a, b",
        "got a batch without weights",
        "feature a looks up tables t_a, t_a",
    ]
    for words, message in zip(expected, found, strict=True):
        assert words in message


def test_a_warning_of_weights_is_of_those_that_came() -> None:
    assert run_on_ranks(odd_cases.warnings_of_weights, 1) == [[0, 1]]
