"""What a model computes apart from its lookups, and keeps for backward, counted on a few rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins.config import RunConfig
from recd_plugins.data.plain import PlainConverter
from recd_plugins.data.prepared import first_rows, placement_of, smallest_batch, wrapped_dataset
from recd_plugins.data.row_pipeline import RowPipeline, Transforms, fit_converter
from recd_plugins.interfaces import Origin, Rows
from recd_plugins.interfaces.batch import ModelInput, Placement
from recd_plugins.interfaces.step_cost import stage_of
from recd_plugins.model.build import build_model, model_code
from recd_plugins.model.made_collections import one_row_tables
from recd_plugins.model.sequence_pooling import SequencePooling, put_poolings
from recd_plugins.runtime.errors import RecdError

# Rows to look at, and rows to count on, spread over them: neighbours are of one session.
_ROWS, _COUNTED = 256, 64
# Operators of Adagrad for one parameter.
_OPTIMIZER_OPERATORS = 6


@dataclass(frozen=True)
class Operations:
    """Operations of forward and backward; the fields are those of ``StepCost``."""

    matmul_flops: float = 0.0
    attention_flops: float = 0.0
    element_bytes: float = 0.0

    def __sub__(self, other: Operations) -> Operations:
        """Return what is left without ``other``."""
        left = {name: getattr(self, name) - getattr(other, name) for name in vars(self)}
        return Operations(**left)

    def __truediv__(self, count: float) -> Operations:
        """Return the operations of one of ``count``."""
        return Operations(**{name: value / count for name, value in vars(self).items()})


@dataclass(frozen=True, kw_only=True)
class KeptActivations:
    """Bytes that a forward pass keeps for the backward pass, apart from lookups.

    Attributes:
        pooling_saved_bytes: of poolings, for a row that they see.
        rest_saved_bytes: of all else, for a row of the batch.
        pools_all_rows: whether poolings see duplicates too, ``pool_rows: all``.
    """

    pooling_saved_bytes: float = 0.0
    rest_saved_bytes: float = 0.0
    pools_all_rows: bool = False


@dataclass(frozen=True)
class Compute(KeptActivations):
    """What a model computes and keeps, apart from its lookups.

    Attributes:
        pooling: for each row that sequence poolings see.
        rest: for each row of the batch.
        parameter_bytes: of its dense parameters, whose gradients are reduced.
        operators: of a step, whatever its rows, with those of the dense optimizer.
    """

    pooling: Operations
    rest: Operations
    parameter_bytes: int
    operators: int = 0


NO_COMPUTE = Compute(Operations(), Operations(), 0)


def measure_compute(registry: RunConfig) -> Compute:
    """Count one forward and backward pass of the registry's model on the first rows, on CPU.

    Raises:
        RecdError: the registry has no model, or it does not fit the data.
        DataError: the data is missing or wrong.
    """
    model, batch = _model_and_batch(registry)
    with model_code(registry, model):
        return count_operations(model, batch)


def measure_kept(registry: RunConfig) -> KeptActivations:
    """Count the activations of ``measure_compute`` alone, by forward passes.

    Raises:
        RecdError: the registry has no model, or it does not fit the data.
        DataError: the data is missing or wrong.
    """
    model, batch = _model_and_batch(registry)
    with model_code(registry, model):
        pools_all_rows = _pools_all_rows(model)
        with _counting_saved(model.parameters()) as saved:
            calls = _pooling_calls(model, batch)
        with _counting_saved(model.parameters()) as by_pooling:
            # Kept alive: memory is told apart by address.
            kept = [module(*args).sum() for module, args in calls]
        del kept
    return _kept(saved, by_pooling, batch.labels.shape[0], pools_all_rows)


def count_operations(model: nn.Module, batch: ModelInput) -> Compute:
    """Count what an unsharded model that returns ``(loss, ...)`` does with ``batch``.

    Args:
        model: on CPU, with its poolings.
        batch: plain, so that poolings see all rows.

    Raises:
        RecdError: some of its SequencePoolings see all rows, and some do not.
    """
    pools_all_rows, num_rows = _pools_all_rows(model), batch.labels.shape[0]
    with _Counter() as whole, _counting_saved(model.parameters()) as saved:
        model(batch)[0].backward()
    calls = _pooling_calls(model, batch)
    with _Counter() as pooling, _counting_saved(model.parameters()) as by_pooling:
        for module, args in calls:
            module(*args).sum().backward()
    tables = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, EmbeddingBagCollection | EmbeddingCollection)
        for parameter in module.parameters()
    }
    # Rows that are pooled as bags are looked up in no table.
    pooled_bytes = pooling.operations.element_bytes + pooling.lookup_bytes
    dense = [p for p in model.parameters() if id(p) not in tables]
    return Compute(
        pooling=replace(pooling.operations, element_bytes=pooled_bytes) / num_rows,
        rest=(whole.operations - pooling.operations) / num_rows,
        parameter_bytes=sum(p.numel() * p.element_size() for p in dense),
        operators=whole.operators + _OPTIMIZER_OPERATORS * len(dense),
        **vars(_kept(saved, by_pooling, num_rows, pools_all_rows)),
    )


class _Saved:
    num_bytes = 0


@contextmanager
def _counting_saved(parameters: Iterable[Tensor]) -> Iterator[_Saved]:
    """Count bytes that autograd saves in this context, each storage once, without parameters."""
    saved = _Saved()
    seen = {parameter.untyped_storage().data_ptr() for parameter in parameters}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            saved.num_bytes += storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved


def _kept(saved: _Saved, by_pooling: _Saved, num_rows: int, all_rows: bool) -> KeptActivations:
    return KeptActivations(
        pooling_saved_bytes=by_pooling.num_bytes / num_rows,
        rest_saved_bytes=max(0, saved.num_bytes - by_pooling.num_bytes) / num_rows,
        pools_all_rows=all_rows,
    )


def _pools_all_rows(model: nn.Module) -> bool:
    seen = {module.pool_rows for module in model.modules() if isinstance(module, SequencePooling)}
    if len(seen) > 1:
        raise RecdError(
            f"{type(model).__name__} has SequencePoolings with pool_rows unique and with all, "
            "which are not counted apart; give all of them one"
        )
    return seen == {"all"}


def _pooling_calls(model: nn.Module, batch: ModelInput) -> list[tuple[nn.Module, Any]]:
    """The calls of sequence poolings in a forward pass."""
    calls: list[tuple[nn.Module, Any]] = []
    handles = [
        module.register_forward_pre_hook(lambda module, args: calls.append((module, args)))
        for module in model.modules()
        if isinstance(module, SequencePooling)
    ]
    model(batch)
    for handle in handles:
        handle.remove()
    return calls


def _model_and_batch(registry: RunConfig) -> tuple[nn.Module, ModelInput]:
    """The model with tables of one row, and some of the first rows."""
    if not registry.has_model:
        raise RecdError(f"{registry.path}: no model: section, so there is nothing to count")
    together = smallest_batch(wrapped_dataset(registry))
    size = min(registry.training.batch_size, max(together, _ROWS - _ROWS % together))
    plain = PlainConverter(PlainConverter.Options())
    small = registry.with_training({"batch_size": size})
    small = replace(small, converter=plain, sharding=(), cache=())
    with one_row_tables():
        model = build_model(small, small.dataset.schema())
    put_poolings(small, model)
    return model, _sample(small, placement_of(model, {}))


def _sample(registry: RunConfig, placement: Placement) -> ModelInput:
    """Some of the first rows; every id is the only one that the model's tables have."""
    rows = first_rows(registry)
    places = list(range(0, len(rows), -(-len(rows) // _COUNTED)))
    origins = tuple(Origin(*rows.origin_of(place), num_rows=1) for place in places)
    rows = Rows(rows.data.take(places), origins)
    fit_converter(registry, rows)
    counted = registry.with_training({"batch_size": len(rows)})
    batch = next(RowPipeline(counted, Transforms.of(registry, placement)).read([rows]))
    return replace(
        batch,
        sparse_features=_first_id(batch.sparse_features),
        sequence_features=_first_id(batch.sequence_features),
    )


def _first_id(kjt: KeyedJaggedTensor | None) -> KeyedJaggedTensor | None:
    if kjt is None:
        return None
    zeros = torch.zeros_like(kjt.values())
    weights, lengths = kjt.weights_or_none(), kjt.lengths()
    return KeyedJaggedTensor(kjt.keys(), zeros, weights=weights, lengths=lengths)


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the operations of what runs in it, but for lookups."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._totals = dict.fromkeys(vars(Operations()), 0.0)
        self.operators, self.lookup_bytes = 0, 0

    @property
    def operations(self) -> Operations:
        return Operations(**self._totals)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        stage, is_attention = stage_of(name), "attention" in name
        self.operators += stage != "lookup" and (stage != "gemm" or is_attention)
        if stage == "gemm":
            kind = "attention_flops" if is_attention else "matmul_flops"
            self._totals[kind] += _flops(func, args, kwargs or {}, result)
        elif stage == "lookup":
            self.lookup_bytes += _bytes((args, kwargs, result))
        elif stage is None and not _is_view(func):
            self._totals["element_bytes"] += _bytes((args, kwargs, result))
        return result


def _flops(func: Any, args: Any, kwargs: Mapping[str, Any], result: Any) -> float:
    packet = func.overloadpacket
    if packet in _ATTENTION_ON_CPU:
        return float(_ATTENTION_ON_CPU[packet](*args))
    if packet in flop_registry:
        return float(flop_registry[packet](*args, **kwargs, out_val=result))
    # A product that torch does not count, as of FBGEMM: two for each pair of factors.
    return 2.0 * max((t.numel() for t in _tensors((args, result))), default=0)


def _is_view(func: Any) -> bool:
    """Whether an operator returns another view of an argument, and moves nothing."""
    returned = (value.alias_info for value in func._schema.returns)
    return any(alias is not None and not alias.is_write for alias in returned)


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _bytes(value: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(value))


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> int:
    batch, heads, queries, dim = query.shape
    return 2 * batch * heads * queries * key.shape[2] * (dim + value.shape[3])


def _attention_backward(_: Tensor, query: Tensor, key: Tensor, value: Tensor, *__: Any) -> int:
    # The scores once more, then gradients of them, of query and key, and of value.
    batch, heads, queries, dim = query.shape
    return 2 * batch * heads * queries * key.shape[2] * (3 * dim + 2 * value.shape[3])


# torch counts those of CUDA.
_ATTENTION_ON_CPU: dict[Any, Any] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
