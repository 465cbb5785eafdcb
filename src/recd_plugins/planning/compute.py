"""Counts the operations and saved activations of a model's dense part on CPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins.config import RunConfig
from recd_plugins.data.plain import PlainConverter
from recd_plugins.data.prepared import (
    placement_of,
    read_first_rows,
    smallest_batch,
    wrapped_dataset,
)
from recd_plugins.data.row_pipeline import RowPipeline, fit_converter
from recd_plugins.interfaces import Origin, Rows
from recd_plugins.interfaces.batch import ModelInput, Placement
from recd_plugins.interfaces.model_tables import embedding_modules
from recd_plugins.interfaces.step_cost import stage_of
from recd_plugins.model.build import build_model, model_code
from recd_plugins.model.deferred_tables import one_row_tables
from recd_plugins.model.sequence_pooling import SequencePooling, put_poolings
from recd_plugins.planning.step_cost import Compute, Operations
from recd_plugins.runtime.errors import RecdError

# Number of rows to read, and number of rows to count on, spread over several sessions.
_ROWS, _COUNTED = 256, 64
# Number of Adagrad's operators per parameter.
_OPTIMIZER_OPERATORS = 6


def measure_compute(registry: RunConfig) -> Compute:
    """Run the model forward and backward on the first rows on CPU, and count its operations.

    Raises:
        RecdError: the run config has no model, or the model does not fit the data.
        DataError: the data is missing or invalid.
    """
    if not registry.has_model:
        raise RecdError(
            f"{registry.path}: the registry has no model: section, so the operations of a model "
            "cannot be counted. Add a model: section."
        )
    together = smallest_batch(wrapped_dataset(registry))
    size = min(registry.training.batch_size, max(together, _ROWS - _ROWS % together))
    plain = PlainConverter(PlainConverter.Options())
    small = registry.with_training({"batch_size": size})
    small = replace(small, converter=plain, sharding=(), cache=())
    with one_row_tables():
        model = build_model(small, small.dataset.schema())
    put_poolings(small, model)
    batch = _sample(small, placement_of(embedding_modules(model), {}))
    with model_code(registry, model):
        return count_operations(model, batch)


def count_operations(model: nn.Module, batch: ModelInput) -> Compute:
    """Count the operations of a forward and backward pass of an unsharded model on CPU.

    The model returns ``(loss, ...)``. The batch is not deduplicated, so sequence poolings process
    all rows.
    """
    num_rows = batch.labels.shape[0]
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
    # Lookups inside of a pooling count as its own operations.
    pooled_bytes = pooling.operations.element_bytes + pooling.lookup_bytes
    dense = [p for p in model.parameters() if id(p) not in tables]
    poolings = [module for module in model.modules() if isinstance(module, SequencePooling)]
    return Compute(
        pooling=replace(pooling.operations, element_bytes=pooled_bytes) / num_rows,
        rest=(whole.operations - pooling.operations) / num_rows,
        parameter_bytes=sum(p.numel() * p.element_size() for p in dense),
        operators=whole.operators + _OPTIMIZER_OPERATORS * len(dense),
        pooling_saved_bytes=by_pooling.num_bytes / num_rows,
        rest_saved_bytes=max(0, saved.num_bytes - by_pooling.num_bytes) / num_rows,
        pools_all_rows=any(module.pool_rows == "all" for module in poolings),
    )


class _Saved:
    num_bytes = 0


@contextmanager
def _counting_saved(parameters: Iterable[Tensor]) -> Iterator[_Saved]:
    """Count the bytes of tensors that autograd saves in this context, except parameters."""
    saved = _Saved()
    # Parameters and counted storages; both live as long as the graph.
    seen = {parameter.untyped_storage().data_ptr() for parameter in parameters}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            saved.num_bytes += storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved


def _pooling_calls(model: nn.Module, batch: ModelInput) -> list[tuple[nn.Module, Any]]:
    """Run a forward pass, and return each SequencePooling with the arguments of its call."""
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


def _sample(registry: RunConfig, placement: Placement) -> ModelInput:
    """Return a batch of 64 rows at most, from the first rows of the data, with all ids 0."""
    rows = read_first_rows(registry).rows
    places = list(range(0, len(rows), -(-len(rows) // _COUNTED)))
    origins = tuple(Origin(*rows.origin_of(place), num_rows=1) for place in places)
    rows = Rows(rows.data.take(places), origins)
    fit_converter(registry, rows)
    (batch,) = RowPipeline(registry, placement).read([rows])
    return replace(
        batch,
        sparse_features=_first_id(batch.sparse_features),
        sequence_features=_first_id(batch.sequence_features),
    )


def _first_id(kjt: KeyedJaggedTensor | None) -> KeyedJaggedTensor | None:
    if kjt is None:
        return None
    zeros = torch.zeros_like(kjt.values())
    return KeyedJaggedTensor(kjt.keys(), zeros, kjt.weights_or_none(), kjt.lengths())


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations in this context, except embedding lookups."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._flops = self._element_bytes = 0.0
        self.operators, self.lookup_bytes = 0, 0

    @property
    def operations(self) -> Operations:
        return Operations(self._flops, self._element_bytes)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        stage = stage_of(name)
        self.operators += stage != "lookup" and (stage != "gemm" or "attention" in name)
        if stage == "gemm":
            self._flops += _flops(func, args, kwargs or {}, result)
        elif stage == "lookup":
            self.lookup_bytes += _bytes((args, kwargs, result))
        elif stage is None and not func.is_view:
            self._element_bytes += _bytes((args, kwargs, result))
        return result


def _flops(func: Any, args: Any, kwargs: Mapping[str, Any], result: Any) -> float:
    packet = func.overloadpacket
    if packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:
        return float(sdpa_flop_count(*_shapes(args[:3])))  # type: ignore[no-untyped-call]
    if packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward:
        return float(sdpa_backward_flop_count(*_shapes(args[:4])))  # type: ignore[no-untyped-call]
    if packet in flop_registry:
        return float(flop_registry[packet](*args, **kwargs, out_val=result))
    # A matrix product that torch does not count, such as FBGEMM's: 2 operations per pair of
    # factors.
    return 2.0 * max((t.numel() for t in _tensors((args, result))), default=0)


def _shapes(tensors: Iterable[Tensor]) -> list[torch.Size]:
    return [tensor.shape for tensor in tensors]


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _bytes(value: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(value))
