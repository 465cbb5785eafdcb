"""Steps as FBGEMM's kernels count lookups on CUDA: its Adam and LAMB learn by them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor, nn

from recd_plugins.errors import SetupError
from recd_plugins.model_tables import outermost_sharded


def counting(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Those of modules that are kernels which count (fbgemm 1.6 to 1.9)."""
    return [each for each in modules if hasattr(each, "iter_cpu") or hasattr(each, "iter")]


def step_counts(kernels: Iterable[nn.Module]) -> list[Tensor]:
    """Of each kernel the count that it learns by, and that of its state."""
    found = (getattr(each, name, None) for each in kernels for name in ("iter_cpu", "iter"))
    return [each for each in found if isinstance(each, Tensor)]


@contextmanager
def steps_kept(model: nn.Module) -> Iterator[None]:
    """A context whose lookups are no steps; FBGEMM counts those of an evaluation, too."""
    kernels = counting(nn.ModuleList(_lookups_of(model)).modules())
    before = [count.clone() for count in step_counts(kernels)]
    try:
        yield
    finally:
        for count, then in zip(step_counts(kernels), before, strict=True):
            count.copy_(then)


def steps_of_tables(model: nn.Module) -> dict[str, Tensor]:
    """Steps of the tables of this rank that learn by them, by path of the module and name.

    The names are the same wherever tables live. They are copies.
    """
    return {
        name: kernel.iter.to("cpu", copy=True)
        for names, kernel in _learning_by_steps(model)
        for name in names
    }


def set_steps_of_tables(model: nn.Module, steps: Mapping[str, Tensor], otherwise: int) -> None:
    """Have tables learn on as from their steps."""
    found = []
    for names, kernel in _learning_by_steps(model):
        of_tables = {name: int(steps.get(name, otherwise)) for name in names}
        if len(set(of_tables.values())) > 1:
            told = ", ".join(f"{name} {step}" for name, step in of_tables.items())
            raise SetupError(
                f"tables of one kernel have learned in different numbers of steps ({told}), and "
                "it counts for all of them: plan them as in the run that trained them"
            )
        found.append((kernel, of_tables[names[0]]))
    for kernel, step in found:
        for count in step_counts([kernel]):
            count.fill_(step)


def _learning_by_steps(model: nn.Module) -> Iterator[tuple[list[str], Any]]:
    for path, outermost in outermost_sharded(model):
        each: Any
        for each in nn.ModuleList(_lookups_of(outermost)).modules():
            kernel = getattr(each, "emb_module", None)
            if (
                isinstance(kernel, SplitTableBatchedEmbeddingBagsCodegen)
                # By this FBGEMM says whether the count belongs to the state.
                and "iter" not in kernel._non_persistent_buffers_set
            ):
                tables = each.config.embedding_tables
                yield [f"{path}.{table.name}" for table in tables], kernel


def _lookups_of(model: nn.Module) -> Iterator[nn.Module]:
    for part in model.modules():
        # A private list (torchrec 1.6 to 1.9), which modules() does not go through.
        yield from getattr(part, "_lookups", ())
