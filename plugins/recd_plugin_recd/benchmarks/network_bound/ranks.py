"""What each rank does: steps of three kinds, in turns. Started by torchrun on every node."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from recd_plugins.testing.benchmark import keep_freed_memory

# PAPERCAL as ``recd init`` writes it, with 128 rows a rank.
_ROWS, _FEATURES, _DENSE, _DIM = 128, 40, 13, 16
_TABLE_ROWS = 1_000_000  # of a rank
_FLOAT, _ID = 4, 8


@dataclass(frozen=True)
class Job:
    """What is measured; see the options of the benchmark."""

    row_bytes: int
    gradient_bytes: int
    id_bytes: int
    turns: int
    steps: int


class _Dense(nn.Module):
    """The dense layers of a DLRM on vectors that are looked up already."""

    def __init__(self) -> None:
        super().__init__()
        self.bottom = nn.Sequential(
            nn.Linear(_DENSE, 64), nn.ReLU(), nn.Linear(64, _DIM), nn.ReLU()
        )
        pairs = (_FEATURES + 1) * _FEATURES // 2
        self.top = nn.Sequential(
            *(nn.Linear(pairs + _DIM, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU()),
            nn.Linear(64, 1),
        )
        self.register_buffer("pairs", torch.tril_indices(_FEATURES + 1, _FEATURES + 1, -1))

    def forward(self, dense: Tensor, vectors: Tensor) -> Tensor:
        """Logits ``[rows]`` of dense features ``[rows, 13]`` and vectors ``[rows, 40, 16]``."""
        bottom = self.bottom(dense)
        every = torch.cat([bottom[:, None], vectors], 1)
        one, other = self.get_buffer("pairs")
        dots = torch.bmm(every, every.mT)[:, one, other]
        logits: Tensor = self.top(torch.cat([bottom, dots], 1))
        return logits.squeeze(1)


class Steps:
    """Steps of a rank that send what a step of training sends, with less and less left out.

    Gradients of rows leave when the backward pass has them, those of dense layers beside them, rows
    of the next batch when their gradients were learnt from, and ids in the forward pass.

    Args:
        job: how much is sent.
    """

    def __init__(self, job: Job) -> None:
        ranks = dist.get_world_size()
        to_each, differ = (
            ranks * (sent // (_DIM * _FLOAT) // (ranks - 1))
            for sent in (job.row_bytes, job.gradient_bytes)
        )
        self._to, self._back, self._learnt = (torch.zeros(to_each, _DIM) for _ in range(3))
        self._gradients, self._arrived = (torch.zeros(differ, _DIM) for _ in range(2))
        self._ids, self._asked = (
            torch.zeros(ranks * (job.id_bytes // _ID // (ranks - 1)), dtype=torch.int64)
            for _ in range(2)
        )
        self._groups = [dist.new_group(backend="gloo") for _ in range(3)]
        self._model = _Dense()
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01)
        self._flat = torch.zeros(sum(each.numel() for each in self._model.parameters()))
        self._dense, self._labels = torch.randn(_ROWS, _DENSE), torch.rand(_ROWS).round()
        self._table, self._squares = torch.zeros(_TABLE_ROWS, _DIM), torch.ones(_TABLE_ROWS)
        self._rows = torch.randint(_TABLE_ROWS, (len(self._to),))
        self._bags = torch.randint(_ROWS * _FEATURES, (len(self._to),)).sort().values
        self._numbers = torch.randint(differ, (len(self._to),)).sort().values

    def sends(self) -> None:
        """One that computes nothing."""
        self._step(lambda: None, lambda: None, lambda: None)

    def dense(self) -> None:
        """One with the dense layers, their gradients and optimizer."""
        self._step(
            lambda: self._backward(torch.zeros(_ROWS, _FEATURES, _DIM, requires_grad=True)),
            lambda: None,
            self._learn_dense,
        )

    def rows(self) -> None:
        """One with rows that are pooled, learn by row-wise Adagrad, and are looked up, too."""
        self._step(self._pooled_backward, self._learn_rows, self._learn_dense)

    def _step(
        self,
        backward: Callable[[], None],
        learn_rows: Callable[[], None],
        learn_dense: Callable[[], None],
    ) -> None:
        of_ids, of_rows, of_dense = self._groups
        waits = [_exchange(self._asked, self._ids, of_ids)]
        backward()
        gradients = _exchange(self._arrived, self._gradients, of_rows)
        waits.append(dist.all_reduce(self._flat, group=of_dense, async_op=True))
        gradients.wait()
        learn_rows()
        waits.append(_exchange(self._back, self._to, of_rows))
        for each in waits:
            each.wait()
        learn_dense()

    def _backward(self, vectors: Tensor) -> None:
        logits = self._model(self._dense, vectors)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, self._labels)
        torch.autograd.backward(loss)
        gradients = [
            each.grad.flatten() for each in self._model.parameters() if each.grad is not None
        ]
        torch.cat(gradients, out=self._flat)

    def _pooled_backward(self) -> None:
        pooled = torch.zeros(_ROWS * _FEATURES, _DIM).index_add_(0, self._bags, self._back)
        vectors = pooled.view(_ROWS, _FEATURES, _DIM).requires_grad_()
        self._backward(vectors)
        assert vectors.grad is not None, "the loss depends on them"
        of_bags, first = vectors.grad.view(-1, _DIM), self._bags[: len(self._gradients)]
        torch.index_select(of_bags, 0, first, out=self._gradients)

    def _learn_rows(self) -> None:
        torch.index_select(self._arrived, 0, self._numbers, out=self._learnt)
        self._squares.index_add_(0, self._rows, self._learnt.square().mean(1))
        rates = -0.1 / (self._squares[self._rows].sqrt() + 1e-3)
        self._table.index_add_(0, self._rows, self._learnt * rates[:, None])
        torch.index_select(self._table, 0, self._rows, out=self._to)

    def _learn_dense(self) -> None:
        parameters = list(self._model.parameters())
        parts = torch.split(self._flat, [each.numel() for each in parameters])
        for each, part in zip(parameters, parts, strict=True):
            assert each.grad is not None, "the loss depends on it"
            each.grad.copy_(part.view_as(each)).div_(dist.get_world_size())
        self._optimizer.step()
        self._optimizer.zero_grad()


def _exchange(received: Tensor, sent: Tensor, group: dist.ProcessGroup) -> dist.Work:
    work = dist.all_to_all_single(received, sent, group=group, async_op=True)
    assert work is not None, "async_op"
    return work


def main(job: Job, path: Path) -> None:
    """Measure, and write seconds of a step by kind and turn."""
    dist.init_process_group("gloo")
    keep_freed_memory()
    torch.set_num_threads(1)
    torch.manual_seed(dist.get_rank())
    steps = Steps(job)
    kinds = {"sends": steps.sends, "dense": steps.dense, "rows": steps.rows}
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(job.turns):
        for kind, step in kinds.items():
            step()
            dist.barrier()
            start = time.perf_counter()
            for _ in range(job.steps):
                step()
            dist.barrier()
            found[kind].append((time.perf_counter() - start) / job.steps)
    if dist.get_rank() == 0:
        path.write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Job(**json.loads(sys.argv[1])), Path(sys.argv[2]))
