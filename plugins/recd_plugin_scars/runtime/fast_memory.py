"""The memory that holds the rows in use, and FBGEMM's kernel over it."""

from __future__ import annotations

from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor, nn

from recd_plugins.api import SetupError, require_attributes, use_row_wise_adagrad

# Private, fbgemm 1.6 to 1.9: what a kernel knows of its tables.
_OF_TABLES = (
    "hash_size_cumsum",
    "learning_rate_tensor",
    "momentum1_offsets",
    "optimizer_args",
    "rows_per_table",
    "total_hash_size",
    "total_hash_size_bits",
    "weights_offsets",
)


class FastMemory:
    """Slots for rows and their optimizer state, looked up and updated by FBGEMM.

    To FBGEMM each table has all slots, in the same memory, and the rows of each are in some of
    them. So it does what it does for tables of their own: its faster ways for a table with one
    feature included, by which its sums differ.

    The memory grows in place: a backward pass that began before updates the same memory. What is
    written to it does not count as a change of a tensor that autograd saved, as no row that a
    backward pass needs is written.

    Args:
        tables: FBGEMM's kernel of the backing store, whose optimizer, rate and pooling count.
        arguments: FBGEMM's for both kernels.
        device: of the slots.

    Attributes:
        kernel: FBGEMM's, which looks up slots.
        num_slots: that there is memory for.
        weights: float32 ``[num_slots, dim]``.
        state: float32 ``[num_slots]``; None without optimizer state.
    """

    num_slots: int
    weights: Tensor
    state: Tensor | None

    def __init__(
        self,
        tables: SplitTableBatchedEmbeddingBagsCodegen,
        arguments: dict[str, Any],
        device: torch.device,
    ) -> None:
        on_cuda = device.type == "cuda"
        location = EmbeddingLocation.DEVICE if on_cuda else EmbeddingLocation.HOST
        compute = ComputeDevice.CUDA if on_cuda else ComputeDevice.CPU
        self._tables = tables
        self._memory = "dev" if on_cuda else "host"
        self._width = tables.dims[0]
        self._with_state = tables.optimizer == EmbOptimType.EXACT_ROWWISE_ADAGRAD
        self._device = device
        self._used = torch.cuda.Event() if on_cuda else None  # type: ignore[no-untyped-call]
        self.kernel = SplitTableBatchedEmbeddingBagsCodegen(
            [(1, self._width, location, compute)] * len(tables.dims),
            feature_table_map=tables.feature_table_map,
            pooling_mode=tables.pooling_mode,
            device=device,
            table_names=tables.table_names,
            **arguments,
            bounds_check_mode=BoundsCheckMode.NONE,
        )
        use_row_wise_adagrad(self.kernel)
        require_attributes(self.kernel, *_OF_TABLES, f"weights_{self._memory}")
        self.kernel.weights_offsets.zero_()
        self.kernel.momentum1_offsets.zero_()
        # The environment may say otherwise; slots need no check.
        self.kernel.bounds_check_mode_int = BoundsCheckMode.NONE.value
        self.kernel.learning_rate_tensor = tables.learning_rate_tensor  # which is set in place
        self._nodes: list[Any] = []
        self.kernel.register_forward_hook(lambda _, __, output: self._nodes.append(output.grad_fn))
        self.resize(1)

    def resize(self, num_slots: int) -> None:
        """Make room for more slots; the rows stay where they are.

        Raises:
            SetupError: there is not enough memory on the device.
        """
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # the memory moves, under whatever stream
        try:
            weights = self._longer("weights", num_slots * self._width)
            self.weights = weights.view(num_slots, self._width)
            self.state = self._longer("momentum1", num_slots) if self._with_state else None
        except (torch.OutOfMemoryError, RuntimeError) as error:
            size = num_slots * 4 * (self._width + self._with_state)
            raise SetupError(
                f"the fast memory of {len(self._tables.dims)} tables needs {size:,} bytes for "
                f"{num_slots:,} rows on {self._device}, which has not as much ({error}): lower "
                "load_factor or the batch size"
            ) from error
        # New tensors, as graphs in flight hold the old ones.
        kernel, tables = self.kernel, self._tables.feature_table_map
        num_rows = num_slots * len(self._tables.dims)
        kernel.hash_size_cumsum = kernel.hash_size_cumsum.new_tensor(
            [*(table * num_slots for table in tables), num_rows]
        )
        kernel.rows_per_table = torch.full_like(kernel.rows_per_table, num_slots)
        kernel.total_hash_size = num_slots  # as one table
        kernel.total_hash_size_bits = num_rows.bit_length()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # other streams find them where they are now
        self.num_slots = num_slots

    def follow_optimizer(self) -> None:
        """Take over what was set on the tables' kernel since, such as eps."""
        self.kernel.optimizer_args = self._tables.optimizer_args

    def take_node(self) -> Any:
        """The autograd node of the last lookup, whose backward pass updates the rows; or None."""
        node = self._nodes.pop()
        self._nodes.clear()
        return node

    def read(self, slots: Tensor) -> tuple[Tensor, Tensor | None]:
        """Copies of rows, on the device."""
        self.wait()
        state = None if self.state is None else self.state.index_select(0, slots)
        rows = self.weights.index_select(0, slots), state
        self.record()
        return rows

    def write(self, slots: Tensor, weights: Tensor, state: Tensor | None) -> None:
        """Put rows into slots that no forward or backward pass uses meanwhile."""
        self.wait()
        self.weights.index_copy_(0, slots, weights.to(self._device, non_blocking=True))
        if self.state is not None and state is not None:
            self.state.index_copy_(0, slots, state.to(self._device, non_blocking=True))
        self.record()

    def wait(self) -> None:
        """What follows on the current stream comes after what used the slots before."""
        if self._used is not None:
            torch.cuda.current_stream(self._device).wait_event(self._used)

    def record(self) -> None:
        """The current stream used the slots, after what used them before, on whatever stream."""
        if self._used is not None:
            self.wait()
            self._used.record(torch.cuda.current_stream(self._device))

    def _longer(self, name: str, size: int) -> Tensor:
        """Grow the kernel's memory in place; gives a tensor over it with a version of its own."""
        name = f"{name}_{self._memory}"
        old: Tensor = getattr(self.kernel, name).data
        storage = old.untyped_storage()
        storage.resize_(size * old.element_size())
        new = old.new_empty(0).set_(storage, 0, torch.Size([size]), [1])
        setattr(self.kernel, name, nn.Parameter(new) if self._memory == "host" else new)
        memory: Tensor = getattr(self.kernel, name)
        return memory.data
