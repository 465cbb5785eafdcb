"""Jagged index select against the detour over padding, on the embeddings of a history.

The rows are PAPERCAL's: unique histories are repeated for the rows of the batch, forward and
backward. The detour is what a trainer without the operator does: pad the unique rows to the longest
one, select among equally long rows, and cut the padding off again.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from recd_plugin_recd.benchmarks.batches import BATCH_SIZE, papercal_batches
from recd_plugins.api.batches import InverseKeyedJaggedTensor, jagged_index_select, offsets_of
from recd_plugins.testing.benchmark import Figure, Size, in_turn, keep_freed_memory

SUMMARY = "jagged index select of embeddings against padding: time and peak memory"

_FEATURE = "seq_0_0"
_WIDTHS = (16, 128)
_TURNS = 5

Select = Callable[[JaggedTensor, Tensor], Tensor]


def _num_rows(size: Size) -> int:
    return {"tiny": 64, "small": 512, "reference": BATCH_SIZE}[size]


def workload(size: Size) -> str:
    """The input in words."""
    return (
        f"embeddings of {_FEATURE} of PAPERCAL clustered by session, {_num_rows(size)} rows, "
        f"widths {' and '.join(map(str, _WIDTHS))}, forward and backward, processor time"
    )


def run(size: Size) -> list[Figure]:
    """Measure: speed-up over padding, and peak memory over padding's and the result's."""
    keep_freed_memory()
    lengths, rows = _history(_num_rows(size))
    figures = []
    for width in _WIDTHS:
        values = torch.randn(int(lengths.sum()), width)
        jagged = JaggedTensor(values, lengths=lengths)
        output = _selected(jagged, rows)
        assert torch.equal(output, _padded(jagged, rows)), "both give the same rows"
        pairs = in_turn(
            lambda jagged: _train(_selected, jagged, rows),
            lambda jagged: _train(_padded, jagged, rows),
            [jagged],
            _TURNS,
        )
        peak, padded_peak = (_peak_bytes(way, jagged, rows) for way in (_selected, _padded))
        figures += [
            Figure.of(
                f"speedup_over_padding_width_{width}",
                [padded / selected for selected, padded in pairs],
                unit="ratio",
                better="higher",
            ),
            Figure.of(
                f"peak_memory_over_padding_width_{width}",
                [peak / padded_peak],
                unit="ratio",
                better="lower",
            ),
            Figure.of(
                f"peak_memory_over_result_width_{width}",
                [peak / output.nbytes],
                unit="ratio",
                better="lower",
            ),
        ]
    return figures


def _history(num_rows: int) -> tuple[Tensor, Tensor]:
    """Lengths of the unique rows, and the unique row of each row."""
    column = papercal_batches(1)[0].data[_FEATURE][:num_rows]
    kjt = KeyedJaggedTensor(
        keys=[_FEATURE],
        values=torch.from_numpy(column.flatten().to_numpy()),
        lengths=torch.from_numpy(column.value_lengths().to_numpy()).long(),
    )
    (ikjt,) = InverseKeyedJaggedTensor.from_kjt(kjt, [[_FEATURE]])
    return ikjt.lengths(), ikjt.inverse_lookup()


def _selected(jagged: JaggedTensor, rows: Tensor) -> Tensor:
    return jagged_index_select(jagged, rows).values()


def _padded(jagged: JaggedTensor, rows: Tensor) -> Tensor:
    lengths = jagged.lengths()
    dense = jagged.to_padded_dense(int(lengths.max())).index_select(0, rows)
    offsets = offsets_of(lengths.index_select(0, rows))
    values: Tensor = torch.ops.fbgemm.dense_to_jagged(dense, [offsets], int(offsets[-1]))[0]
    return values


def _train(select: Select, jagged: JaggedTensor, rows: Tensor) -> None:
    values = jagged.values().detach().requires_grad_()
    output = select(JaggedTensor(values, lengths=jagged.lengths()), rows)
    torch.autograd.backward(output, output.detach())


def _peak_bytes(select: Select, jagged: JaggedTensor, rows: Tensor) -> int:
    """The most memory that a forward and backward pass holds beyond its input."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        _train(select, jagged, rows)
    results: Any = profiled.profiler
    changes = [e.nbytes() for e in results.kineto_results.events() if e.name() == "[memory]"]
    return max(accumulate(changes))
