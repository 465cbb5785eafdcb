"""Section 5.2 of the DLRM paper (arXiv 1906.00091): a training step compared to plain PyTorch.

Two programs train the same model in one process from the same weights, in alternating turns.
``ours`` uses DistributedModelParallel in the train pipeline of ``recd run``. ``plain`` uses only
torch.nn, with one sparse-gradient EmbeddingBag per table.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, pairwise
from typing import Any, Literal

import click
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchrec.distributed.sharding_plan import table_wise
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks._measure import (
    DEVICE,
    Device,
    Figure,
    Findings,
    Size,
    check_device,
    higher,
    lower,
    ratios,
)
from benchmarks._ranks import freeze_objects, shard, start_rank
from recd_plugins.api import ExactEmbeddingBagCollectionSharder
from recd_plugins.config import ModelSpec, TrainingSpec
from recd_plugins.interfaces.batch import ModelInput, Placement
from recd_plugins.interfaces.model_tables import table_name
from recd_plugins.model.dlrm import DLRM, CrossInteraction
from recd_plugins.runtime.launch import backend_for, launch
from recd_plugins.sharding.pipeline import build_train_pipeline
from recd_plugins.sharding.sharders import fused_params
from recd_plugins.training.optimizer import build_optimizer
from recd_plugins.training.rank_state import copy_weights

Architecture = Literal["dlrm", "dcn"]
ARCHITECTURES: tuple[Architecture, ...] = ("dlrm", "dcn")
OPTIONS = [
    click.Option(
        ["--only"], type=click.Choice(ARCHITECTURES), help="Measure only this architecture."
    ),
    DEVICE,
]
# The paper's Caffe2 needs 256 s for 1000 batches on a CPU of 2019, and 62 s on a GPU.
_PAPER_MS: dict[Device, float] = {"cpu": 256, "cuda": 62}
_FEATURES = tuple(f"cat_{number}" for number in range(8))
_NUM_DENSE = 512
# Small rates: larger ones amplify rounding errors, and losses are compared.
_TRAINING = TrainingSpec(optimizer="sgd", learning_rate=0.1)


@dataclass(frozen=True)
class Job:
    """Job description that is pickled and sent to the rank.

    The number of ids per lookup is uniform between 1 and ``max_lookups``. Batches are repeated. One
    turn more than ``turns`` warms up.
    """

    rows: int
    batch_size: int
    max_lookups: int
    batches: int
    turns: int
    steps: int


_JOBS: dict[Size, Job] = {
    "tiny": Job(50, 16, 5, batches=3, turns=3, steps=2),
    "small": Job(100_000, 512, 100, batches=4, turns=5, steps=3),
    "reference": Job(1_000_000, 2048, 100, batches=8, turns=11, steps=4),
}


#: Wall seconds and CPU seconds per step, one value per turn, and all losses.
Measured = tuple[list[float], list[float], list[float]]


def run(size: Size, only: Architecture | None = None, device: Device = "cpu") -> Findings:
    check_device(device)
    job, architectures = _JOBS[size], (only,) if only else ARCHITECTURES
    figures: list[Figure] = []
    for architecture in architectures:
        found = launch(measure, 1, job, architecture, device, backend=backend_for(device))[0]
        paper = _PAPER_MS[device] if (size, architecture) == ("reference", "dlrm") else None
        figures += _figures(architecture, found, paper)
    return Findings(
        f"{', '.join(architectures)}: 8 tables of {job.rows:,} rows x 64, 512 dense features, "
        f"batch {job.batch_size}, 1 to {job.max_lookups} uniform ids per lookup, SGD, one rank on "
        f"{device}; {job.batches} batches, created in advance and repeated; {job.turns} turns of "
        f"{job.steps} steps",
        figures,
    )


def _figures(name: str, found: dict[str, Measured], paper: float | None) -> list[Figure]:
    seconds, processor, losses = zip(found["ours"], found["plain"], strict=True)
    difference = max(abs(each - 1) for each in ratios(*losses))
    return [
        higher(f"{name}_samples_per_second_over_plain", ratios(*reversed(seconds)), goal=1),
        lower(f"{name}_processor_time_over_plain", ratios(*processor), goal=1),
        *(
            lower(f"{name}_{side}_ms_a_step", [1e3 * s for s in each[0]], "ms", paper=paper)
            for side, each in found.items()
        ),
        lower(f"{name}_loss_max_rel_diff", difference, goal=1e-6),
    ]


def measure(
    rank: int, world_size: int, job: Job, architecture: Architecture, device_type: Device
) -> dict[str, Measured]:
    """Train ``ours`` and ``plain`` on the same batches. Requires a single rank."""
    start_rank()
    device = torch.device(device_type)
    torch.manual_seed(_TRAINING.seed)
    spec = ModelSpec(
        architecture=architecture,
        embedding_dim=64,
        num_embeddings=job.rows,
        bottom_mlp=[512],
        top_mlp=[1024, 1024, 1024],
    )
    batches = _batches(job)
    model = DLRM(spec, _NUM_DENSE, Placement(_FEATURES))
    # The sharded model copies the tables; the plain model trains the originals.
    plain = PlainModel(spec, model)
    steps = {"ours": _ours(model, batches, device), "plain": _plain(plain, batches, device)}
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    losses: dict[str, list[Tensor]] = {name: [] for name in steps}
    freeze_objects()
    order = list(steps)
    for turn in range(job.turns + 1):
        for name in order:
            wall, processor = time.perf_counter(), time.process_time()
            losses[name] += [steps[name]() for _ in range(job.steps)]
            if device.type == "cuda":
                torch.cuda.synchronize()
            pair = time.perf_counter() - wall, time.process_time() - processor
            if turn:
                spent[name].append((pair[0] / job.steps, pair[1] / job.steps))
        order.reverse()
    found = {}
    for name, pairs in spent.items():
        seconds, processor_seconds = zip(*pairs, strict=True)
        of_steps = torch.stack(losses[name]).double().tolist()
        found[name] = list(seconds), list(processor_seconds), of_steps
    return found


#: Dense features, labels, ids ordered by feature, and lengths.
Batch = tuple[Tensor, Tensor, Tensor, Tensor]


def _batches(job: Job) -> list[Batch]:
    """Draw random ids, dense features and labels. The result is the same each time."""
    draw = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(job.batches):
        lengths = torch.randint(
            1, job.max_lookups + 1, (len(_FEATURES) * job.batch_size,), generator=draw
        )
        dense = torch.rand(job.batch_size, _NUM_DENSE, generator=draw)
        labels = torch.randint(0, 2, (job.batch_size,), generator=draw).float()
        ids = torch.randint(0, job.rows, (int(lengths.sum()),), generator=draw)
        batches.append((dense, labels, ids, lengths))
    return batches


def _ours(model: DLRM, batches: Sequence[Batch], device: torch.device) -> Callable[[], Tensor]:
    """Return a function that runs a step of the model under DistributedModelParallel."""
    weights = {name: weight.detach().clone() for name, weight in model.top.state_dict().items()}
    tables = {name: w.detach() for name, w in model.state_dict().items() if "t_" in name}
    sharder = ExactEmbeddingBagCollectionSharder(fused_params(_TRAINING))
    placed = {table_name(f): table_wise(rank=0, compute_kernel="fused") for f in _FEATURES}
    dmp = shard(model, "bags", placed, sharder, device)
    state = dmp.state_dict()
    copy_weights(state, tables | {f"top.{name}": weight for name, weight in weights.items()})
    dmp.load_state_dict(state)
    dmp.train()
    pipeline = build_train_pipeline(dmp, build_optimizer(dmp, _TRAINING), device)
    around: Any = cycle(
        [
            ModelInput(
                dense_features=dense.to(device),
                labels=labels.to(device),
                sparse_features=KeyedJaggedTensor(list(_FEATURES), ids, lengths=lengths).to(device),
            )
            for dense, labels, ids, lengths in batches
        ]
    )
    return lambda: pipeline.progress(around)[0].detach()


def _plain(
    model: PlainModel, batches: Sequence[Batch], device: torch.device
) -> Callable[[], Tensor]:
    """Return a function that runs a step of the plain model with SGD."""
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=_TRAINING.learning_rate)
    inputs = []
    for dense, labels, ids, lengths in batches:
        by_table = lengths.view(len(_FEATURES), -1)
        tables = [
            each.contiguous().to(device) for each in torch.split(ids, by_table.sum(1).tolist())
        ]
        offsets = list(F.pad(by_table.cumsum(1), (1, 0)).to(device))
        inputs.append((dense.to(device), labels.to(device), tables, offsets))
    around = cycle(inputs)

    def step() -> Tensor:
        dense, labels, ids, offsets = next(around)
        optimizer.zero_grad(set_to_none=True)
        loss = F.binary_cross_entropy_with_logits(model(dense, ids, offsets), labels)
        torch.autograd.backward(loss)
        optimizer.step()
        return loss.detach()

    return step


class PlainModel(nn.Module):
    """DLRM or DCN in plain PyTorch, with one sparse-gradient EmbeddingBag per table.

    Shares the table weights of ``model`` and copies its dense weights.
    """

    def __init__(self, spec: ModelSpec, model: DLRM) -> None:
        super().__init__()
        assert model.bags is not None, "the model has pooled features"
        bags = model.bags.embedding_bags
        self.tables = nn.ModuleList(
            nn.EmbeddingBag.from_pretrained(
                bags[table_name(feature)].weight.detach(),
                freeze=False,
                mode="sum",
                sparse=True,
                include_last_offset=True,
            )
            for feature in _FEATURES
        )
        self.bottom = _mlp([_NUM_DENSE, *spec.bottom_mlp, spec.embedding_dim])
        interaction = model.top.interaction
        self.interaction: nn.Module = interaction
        if isinstance(interaction, CrossInteraction):
            self.interaction = _Cross(interaction.crossnet)
        self.top = _mlp([interaction.out_features, *spec.top_mlp])
        self.last = nn.Linear(spec.top_mlp[-1], 1)
        ours = [module for module in model.top.modules() if isinstance(module, nn.Linear)]
        own = [*self.bottom, *self.top, self.last]
        theirs = [module for module in own if isinstance(module, nn.Linear)]
        for one, other in zip(theirs, ours, strict=True):
            one.load_state_dict(other.state_dict())

    def forward(self, dense: Tensor, ids: list[Tensor], offsets: list[Tensor]) -> Tensor:
        """Return logits ``[B]``, given ids and offsets of each table."""
        vector = self.bottom(dense)
        vectors = [vector, *(t(i, o) for t, i, o in zip(self.tables, ids, offsets, strict=True))]
        stacked = torch.cat(vectors, dim=1).view(len(dense), len(vectors), -1)
        logits: Tensor = self.last(self.top(self.interaction(vector, stacked)))
        return logits.squeeze(1)


class _Cross(nn.Module):
    """Low-rank DCN-v2 cross layers, with weights copied from TorchRec's module."""

    def __init__(self, crossnet: nn.Module) -> None:
        super().__init__()
        weights = {name: p.detach() for name, p in crossnet.named_parameters()}
        layers = range(len([name for name in weights if name.startswith("bias.")]))
        self.down = nn.ModuleList(_linear(weights[f"V_kernels.{n}"]) for n in layers)
        self.up = nn.ModuleList(
            _linear(weights[f"W_kernels.{n}"], weights[f"bias.{n}"]) for n in layers
        )

    def forward(self, dense: Tensor, vectors: Tensor) -> Tensor:
        first = crossed = vectors.flatten(1)
        for down, up in zip(self.down, self.up, strict=True):
            crossed = first * up(down(crossed)) + crossed
        return crossed


def _linear(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    layer.load_state_dict({"weight": weight} | ({} if bias is None else {"bias": bias}))
    return layer


def _mlp(widths: list[int]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers)
