"""The models of docs/how-to/your_model.md, on ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchrec.distributed import DistributedModelParallel

from recd_plugins import load_registry, prepare
from recd_plugins.training.optimizer import build_optimizer
from recd_plugins.training.rank_state import copy_weights

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "your_model.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def models() -> dict[str, Any]:
    """What the page defines before it checks anything."""
    names: dict[str, Any] = {}
    exec(compile("\n".join(blocks("python")[:-1]), "your_model.md", "exec"), names)
    return names


def losses_of(rank: int, world_size: int, path: Path, model_name: str) -> list[float]:
    """Training sharded and pipelined, as docs/trainer.md does."""
    device = torch.device("cpu")
    registry = load_registry(path)
    torch.manual_seed(0)
    prepared = prepare(registry, models()[model_name]())
    model, sharders = prepared.model, prepared.sharders()
    weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    dmp = DistributedModelParallel(
        model,
        device=device,
        plan=prepared.planner(device=device).collective_plan(model, sharders),
        sharders=sharders,
    )
    copy_weights(dmp.state_dict(), weights)
    pipeline = prepared.train_pipeline(dmp, build_optimizer(dmp, registry.training), device)
    batches = iter(prepared.dataloader(rank, world_size))
    return [float(loss) for loss, _, _ in _outputs(pipeline, batches)]


def _outputs(pipeline: Any, batches: Iterator[Any]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    while True:
        try:
            yield pipeline.progress(batches)
        except StopIteration:
            return
