"""What the benchmark of the wire counts is what is sent."""

from __future__ import annotations

import torch

from recd_plugin_recd.benchmarks import wire
from recd_plugin_recd.benchmarks.batches import BATCH_SIZE, papercal_batches
from recd_plugins.data.wire import encode


def test_figures_are_of_the_bytes_that_are_sent(monkeypatch):
    sizes: list[int] = []

    def counted(value):
        assert torch.get_num_threads() == 1
        buffer = encode(value)
        sizes.append(buffer.nbytes)
        return buffer

    monkeypatch.setattr(wire, "encode", counted)
    monkeypatch.setattr(wire, "papercal_batches", lambda _: papercal_batches(2))
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        figures = {figure.figure: figure.value for figure in wire.run("small")}
    finally:
        torch.set_num_threads(threads)
    # Of each side the batch that warms up, and one that counts.
    kjt, ikjt, partial = sizes[1::2]
    assert figures["wire_bytes_ratio_ikjt"] == kjt / ikjt > 4
    assert figures["wire_bytes_ratio_partial_ikjt"] == kjt / partial > kjt / ikjt
    assert figures["ikjt_bytes_per_row"] == ikjt / BATCH_SIZE
