"""Formats of embeddings and gradients between ranks (``training.wire``), as TorchRec's codecs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import gcd
from typing import Any

import torch
from fbgemm_gpu.quantize_comm import QuantizationContext, QuantizedCommCodec
from fbgemm_gpu.split_embedding_configs import SparseType
from torch import Tensor
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs
from torchrec.distributed.types import (
    CommOp,
    EnumerableShardingSpec,
    ParameterSharding,
    QuantizedCommCodecs,
    ShardingType,
)

from recd_plugins.config.schema import TrainingSpec
from recd_plugins.interfaces.rows import Table
from recd_plugins.runtime.errors import SetupError

Codecs = dict[str, QuantizedCommCodecs]

#: Shardings that add up sums of bags on their way.
ADDED_ON_THE_WAY = (
    ShardingType.ROW_WISE.value,
    ShardingType.TABLE_ROW_WISE.value,
    ShardingType.GRID_SHARD.value,
)
#: Bytes of the scale and the offset of a block.
SCALE_BYTES = 8

_POOLED = (CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL, CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER)
_COLLECTIVES = (*_POOLED, CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL)
# Scalars that share a scale and an offset, in FBGEMM's codec of int8 as TorchRec makes it.
_LARGEST_BLOCK = 32
# With 8 and fewer, int8 sends no fewer bytes than fp16.
_SMALLEST_BLOCK = 16


def scalar_bytes(wire: str, tables: Iterable[Table]) -> float:
    """Return the bytes of a scalar between ranks."""
    if wire == "int8":
        block = block_of(tables)
        return (block + SCALE_BYTES) / block
    return {"fp32": 4, "fp16": 2, "bf16": 2}[wire]


def block_of(tables: Iterable[Table]) -> int:
    """Return how many scalars share a scale in int8: every row of every table has whole blocks.

    Raises:
        SetupError: there are too few for int8 to save anything.
    """
    block = _LARGEST_BLOCK
    for table in tables:
        block = gcd(block, table.embedding_dim)
        if block < _SMALLEST_BLOCK:
            raise SetupError(
                f"training.wire is int8, which sends scalars in blocks of {_SMALLEST_BLOCK} or "
                f"{_LARGEST_BLOCK}, and table {table.name} has an embedding_dim of "
                f"{table.embedding_dim}: make it a multiple of {_SMALLEST_BLOCK}, or take fp16"
            )
    return block


def wire_codecs(
    training: TrainingSpec, given: Codecs | None, tables: Iterable[Table]
) -> Codecs | None:
    """Return TorchRec's ``qcomm_codecs_registry`` of ``training.wire``, or a trainer's.

    Raises:
        SetupError: both are given, or tables do not suit the format.
    """
    if training.wire == "fp32":
        return _with_gradients(given)
    if given:
        raise SetupError(
            f"training.wire is {training.wire}, and the sharders have a qcomm_codecs_registry: "
            "leave one of the two away"
        )
    if training.wire == "int8":
        block = block_of(tables)
        return {each.name: QuantizedCommCodecs(Int8(block), Int8(block)) for each in _COLLECTIVES}
    # Not TorchRec's get_qcomm_codecs_registry, which takes fp16 for bf16 on CPU with a warning.
    kind = CommType(training.wire)
    config = QCommsConfig(forward_precision=kind, backward_precision=kind)
    return _with_gradients({each.name: get_qcomm_codecs(config) for each in _COLLECTIVES})


def _with_gradients(codecs: Codecs | None) -> Codecs | None:
    """Return the codecs with a differentiable decoder for bf16."""
    return codecs and {
        name: replace(
            both, forward=_with_gradient(both.forward), backward=_with_gradient(both.backward)
        )
        if isinstance(both, QuantizedCommCodecs)
        else both
        for name, both in codecs.items()
    }


def _with_gradient(codec: Any) -> Any:
    if type(codec) is not QuantizedCommCodec or codec.quantized_dtype is not torch.bfloat16:
        return codec
    return _Bf16(SparseType.BF16, codec._loss_scale)


class _Bf16(QuantizedCommCodec):
    """FBGEMM's codec with a differentiable decoder.

    TorchRec's synchronous collectives take the gradient through it, and FBGEMM's has none: tables
    that they serve would silently not learn.
    """

    def decode(self, input_tensor: Tensor, ctx: Any = None) -> Tensor:  # noqa: ARG002
        """Return the same numbers in 32 bits."""
        if self._loss_scale is not None:
            input_tensor = input_tensor / self._loss_scale
        return input_tensor.float()


class Int8(QuantizedCommCodec):
    """FBGEMM's codec of 8 bits, in whole blocks.

    TorchRec takes blocks of 32, and fails if what goes to a rank is no multiple of it. A block that
    has a NaN arrives as NaN; FBGEMM makes some number of it.
    """

    #: FBGEMM adds 1e-8 to the range of a block, and gradients may be less.
    _SCALE = 2.0**40

    def __init__(self, block: int) -> None:
        super().__init__(SparseType.INT8)
        self.block = block

    def create_context(self) -> QuantizationContext:
        """Return the context of one collective."""
        return QuantizationContext(row_dim=self.block)

    def encode(self, input_tensor: Tensor, ctx: QuantizationContext | None = None) -> Tensor:
        """Return blocks of bytes, each followed by a scale and an offset."""
        if ctx is None or (torch.is_grad_enabled() and input_tensor.requires_grad):
            raise SetupError(
                "int8 has no gradient under TorchRec's synchronous collectives, and its numbers "
                "cannot be added up on their way: take fp16 or bf16 for training.wire"
            )
        encoded = super().encode(input_tensor * self._SCALE, ctx)
        blocks = encoded.view(-1, self.block + SCALE_BYTES)
        offsets = blocks[:, -4:].view(torch.float32)
        offsets.masked_fill_(input_tensor.reshape(-1, self.block).isnan().any(1, True), torch.nan)
        return encoded

    def decode(self, input_tensor: Tensor, ctx: QuantizationContext | None = None) -> Tensor:
        """Return the numbers, each within a 510th of the range of its block."""
        decoded: Tensor = super().decode(input_tensor, ctx)
        return decoded.div_(self._SCALE)


def check_int8(
    codecs: Mapping[str, Any] | None, shardings: Mapping[str, ParameterSharding], *, pooled: bool
) -> None:
    """Raise SetupError if sums of a table are added up on their way, or a shard cuts a block."""
    if (codec := int8_of(codecs)) is None:
        return
    for table, sharding in shardings.items():
        if pooled and sharding.sharding_type in ADDED_ON_THE_WAY:
            raise SetupError(
                f"table {table} is pooled and {sharding.sharding_type}: its sums are added up on "
                "their way, which int8 cannot: take fp16 or bf16 for training.wire, or another "
                "sharding"
            )
        spec = sharding.sharding_spec
        for shard in spec.shards if isinstance(spec, EnumerableShardingSpec) else ():
            if (columns := shard.shard_sizes[1]) % codec.block:
                raise SetupError(
                    f"table {table} has a shard of {columns} columns, and training.wire int8 sends "
                    f"blocks of {codec.block} scalars: give its shards a multiple (min_partition)"
                )


def why_plain_codecs(codecs: Mapping[str, Any] | None) -> str:
    """Return why batches of bags have to be plain by their codecs; empty if they need not be.

    FBGEMM's codecs of blocks (1.6 to 1.9) fail unless each rank gets whole ones, as it does of
    plain batches alone.
    """
    for operation in _POOLED:
        both = (codecs or {}).get(operation.name)
        for codec in (getattr(both, "forward", None), getattr(both, "backward", None)):
            precision: SparseType | None = getattr(codec, "_comm_precision", None)
            in_blocks = precision in (SparseType.INT8, SparseType.MX4)
            if precision and in_blocks and not isinstance(codec, Int8):
                return f"as codecs of {precision.name} send whole blocks of 32 numbers alone"
    return ""


def int8_of(codecs: Mapping[str, Any] | None) -> Int8 | None:
    """Return the codec of ``training.wire: int8``; None of other formats."""
    both = (codecs or {}).get(CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL.name)
    codec = getattr(both, "forward", None)
    return codec if isinstance(codec, Int8) else None
