"""TorchRec codecs that compress embeddings and gradients between ranks (``training.wire``)."""

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

#: Sharding types that reduce partial sums of bags between ranks.
ADDED_ON_THE_WAY = (
    ShardingType.ROW_WISE.value,
    ShardingType.TABLE_ROW_WISE.value,
    ShardingType.GRID_SHARD.value,
)
#: Bytes of a block's scale and offset together.
SCALE_BYTES = 8

_POOLED = (CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL, CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER)
_COLLECTIVES = (*_POOLED, CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL)
# Number of scalars that share a scale and an offset in FBGEMM's int8 codec, as TorchRec sets it.
_LARGEST_BLOCK = 32
# With 8 or fewer, int8 sends at least as many bytes as fp16.
_SMALLEST_BLOCK = 16


def scalar_bytes(wire: str, tables: Iterable[Table]) -> float:
    """Return the bytes per scalar sent between ranks with the format ``wire``."""
    if wire == "int8":
        block = block_of(tables)
        return (block + SCALE_BYTES) / block
    return {"fp32": 4, "fp16": 2, "bf16": 2}[wire]


def block_of(tables: Iterable[Table]) -> int:
    """Return the int8 block size: a row of each table consists of full blocks of this size.

    Raises:
        SetupError: the blocks are too small for int8 to save bytes.
    """
    block = _LARGEST_BLOCK
    for table in tables:
        block = gcd(block, table.embedding_dim)
        if block < _SMALLEST_BLOCK:
            raise SetupError(
                f"table {table.name!r}: embedding_dim {table.embedding_dim} does not fit "
                f"training.wire: int8, which sends blocks of {_SMALLEST_BLOCK} or {_LARGEST_BLOCK} "
                f"scalars. Use a multiple of {_SMALLEST_BLOCK}, or set training.wire: fp16."
            )
    return block


def wire_codecs(
    training: TrainingSpec, given: Codecs | None, tables: Iterable[Table]
) -> Codecs | None:
    """Return the ``qcomm_codecs_registry`` for ``training.wire``, or the user's ``given`` codecs.

    Raises:
        SetupError: both are set, or the format does not suit the tables.
    """
    if training.wire == "fp32":
        return _with_gradients(given)
    if given:
        raise SetupError(
            f"training.wire is {training.wire!r}, but the sharders also have a "
            "qcomm_codecs_registry. Remove one of these two settings."
        )
    if training.wire == "int8":
        block = block_of(tables)
        return {each.name: QuantizedCommCodecs(Int8(block), Int8(block)) for each in _COLLECTIVES}
    # Not TorchRec's get_qcomm_codecs_registry, which replaces bf16 by fp16 on CPU with a warning.
    kind = CommType(training.wire)
    config = QCommsConfig(forward_precision=kind, backward_precision=kind)
    return _with_gradients({each.name: get_qcomm_codecs(config) for each in _COLLECTIVES})


def _with_gradients(codecs: Codecs | None) -> Codecs | None:
    """Return the codecs, with a differentiable decoder for bf16."""
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
    """FBGEMM's bf16 codec with a differentiable decoder.

    TorchRec's synchronous collectives backpropagate through the decoder. FBGEMM's decoder has no
    gradient, so tables behind it would silently not be trained.
    """

    def decode(self, input_tensor: Tensor, ctx: Any = None) -> Tensor:  # noqa: ARG002
        """Return the decoded numbers in float32."""
        if self._loss_scale is not None:
            input_tensor = input_tensor / self._loss_scale
        return input_tensor.float()


class Int8(QuantizedCommCodec):
    """FBGEMM's int8 codec, restricted to full blocks.

    TorchRec uses blocks of 32 and fails if the data for a rank is not a multiple of 32. Here, a
    block that contains a NaN is decoded to NaN; FBGEMM would decode it to arbitrary numbers.
    """

    #: FBGEMM adds 1e-8 to the range of a block, but gradients may be smaller than that.
    _SCALE = 2.0**40

    def __init__(self, block: int) -> None:
        super().__init__(SparseType.INT8)
        self.block = block

    def create_context(self) -> QuantizationContext:
        """Return the quantization context of one collective."""
        return QuantizationContext(row_dim=self.block)

    def encode(self, input_tensor: Tensor, ctx: QuantizationContext | None = None) -> Tensor:
        """Quantize to uint8 blocks, each followed by its scale and offset."""
        if ctx is None or (torch.is_grad_enabled() and input_tensor.requires_grad):
            raise SetupError(
                "training.wire: int8 does not support TorchRec's synchronous collectives or "
                "collectives that add numbers. Set training.wire to fp16 or bf16."
            )
        encoded = super().encode(input_tensor * self._SCALE, ctx)
        blocks = encoded.view(-1, self.block + SCALE_BYTES)
        offsets = blocks[:, -4:].view(torch.float32)
        offsets.masked_fill_(input_tensor.reshape(-1, self.block).isnan().any(1, True), torch.nan)
        return encoded

    def decode(self, input_tensor: Tensor, ctx: QuantizationContext | None = None) -> Tensor:
        """Return the decoded numbers; the error is at most 1/510 of the block's value range."""
        decoded: Tensor = super().decode(input_tensor, ctx)
        return decoded.div_(self._SCALE)


def check_int8(
    codecs: Mapping[str, Any] | None, shardings: Mapping[str, ParameterSharding], *, pooled: bool
) -> None:
    """Raise SetupError if a collective would add int8 values, or a shard would split a block."""
    if (codec := int8_of(codecs)) is None:
        return
    for table, sharding in shardings.items():
        if pooled and sharding.sharding_type in ADDED_ON_THE_WAY:
            raise SetupError(
                f"table {table!r} is pooled and sharded {sharding.sharding_type!r}, so ranks would "
                "have to add int8 values, which is not supported. Set training.wire to fp16 or "
                "bf16, or use another sharding type for the table."
            )
        spec = sharding.sharding_spec
        for shard in spec.shards if isinstance(spec, EnumerableShardingSpec) else ():
            if (columns := shard.shard_sizes[1]) % codec.block:
                raise SetupError(
                    f"table {table!r} has a shard of {columns} columns, but training.wire: int8 "
                    f"sends blocks of {codec.block} scalars. Set min_partition to a multiple of "
                    f"{codec.block} for the table."
                )


def why_plain_codecs(codecs: Mapping[str, Any] | None) -> str:
    """Return the reason why the codecs do not support deduplicated batches; "" if they do.

    FBGEMM's block codecs (1.6 to 1.9) fail unless each rank gets full blocks. Only plain batches
    guarantee that.
    """
    for operation in _POOLED:
        both = (codecs or {}).get(operation.name)
        for codec in (getattr(both, "forward", None), getattr(both, "backward", None)):
            precision: SparseType | None = getattr(codec, "_comm_precision", None)
            in_blocks = precision in (SparseType.INT8, SparseType.MX4)
            if precision and in_blocks and not isinstance(codec, Int8):
                return f"because {precision.name} codecs send only full blocks of 32 numbers"
    return ""


def int8_of(codecs: Mapping[str, Any] | None) -> Int8 | None:
    """Return the codec for ``training.wire: int8``; None for other formats."""
    both = (codecs or {}).get(CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL.name)
    codec = getattr(both, "forward", None)
    return codec if isinstance(codec, Int8) else None
