"""Embeddings and gradients between ranks in 8 bits, by FBGEMM's codec."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import gcd
from typing import Any

import torch
from fbgemm_gpu.quantize_comm import QuantizationContext, QuantizedCommCodec
from fbgemm_gpu.split_embedding_configs import SparseType
from torch import Tensor
from torchrec.distributed.types import (
    CommOp,
    EnumerableShardingSpec,
    ParameterSharding,
    ShardingType,
)

from recd_plugins.errors import SetupError
from recd_plugins.interfaces import Choice
from recd_plugins.values.rows import Table
from recd_plugins.words import shortened

#: Sums of bags of these are added up on their way.
ADDED_ON_THE_WAY = (
    ShardingType.ROW_WISE.value,
    ShardingType.TABLE_ROW_WISE.value,
    ShardingType.GRID_SHARD.value,
)

#: Scalars that share a scale and an offset, of FBGEMM's codec of int8 as TorchRec makes it.
_LARGEST_BLOCK = 32
#: Of 8 and fewer int8 sends no fewer bytes than fp16.
_SMALLEST_BLOCK = 16
_IN_BLOCKS = {SparseType.INT8, SparseType.MX4}
#: Of a block, its scale and its offset.
SCALE_BYTES = 8


def block_of(tables: Iterable[Table]) -> int:
    """Scalars that share a scale and an offset, so that every row of every table has whole ones.

    Raises:
        SetupError: of int8, there are too few for it to save anything.
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


class Int8(QuantizedCommCodec):
    """FBGEMM's codec of 8 bits, of which every rank gets and sends whole blocks.

    TorchRec takes blocks of 32, and fails where what goes to a rank is no multiple of it. A block
    that has a NaN comes as NaN: FBGEMM makes some number of it.
    """

    #: FBGEMM adds 1e-8 to the range of a block, and gradients may be less.
    _SCALE = 2.0**40

    def __init__(self, block: int) -> None:
        super().__init__(SparseType.INT8)
        self.block = block

    def create_context(self) -> QuantizationContext:
        """Of one collective."""
        return QuantizationContext(row_dim=self.block)

    def encode(self, input_tensor: Tensor, ctx: QuantizationContext | None = None) -> Tensor:
        """Blocks of bytes, and a scale and an offset behind each.

        Raises:
            SetupError: numbers are to be added on their way, or a gradient would be lost.
        """
        if ctx is None:
            raise SetupError(
                "numbers that are added up on their way cannot be int8: take fp16 or bf16 for "
                "training.wire, or shard pooled tables otherwise than by rows"
            )
        if torch.is_grad_enabled() and input_tensor.requires_grad:
            raise SetupError(
                "int8 has no gradient under TorchRec's synchronous collectives: leave "
                "torchrec_use_sync_collectives() alone, or take fp16 or bf16 for training.wire"
            )
        encoded = super().encode(input_tensor * self._SCALE, ctx)
        blocks = encoded.view(-1, self.block + SCALE_BYTES)
        offsets = blocks[:, -4:].view(torch.float32)
        offsets.masked_fill_(input_tensor.reshape(-1, self.block).isnan().any(1, True), torch.nan)
        return encoded

    def decode(self, input_tensor: Tensor, ctx: QuantizationContext | None = None) -> Tensor:
        """The numbers, each within a 510th of the range of its block."""
        decoded: Tensor = super().decode(input_tensor, ctx)
        return decoded.div_(self._SCALE)


def check_int8(
    codecs: Mapping[str, Any] | None, shardings: Mapping[str, ParameterSharding], *, pooled: bool
) -> None:
    """Refuse tables of a module that cannot be sent in 8 bits.

    Args:
        codecs: of the module.
        shardings: of its tables.
        pooled: whether it sends sums.

    Raises:
        SetupError: sums of a table are added up on their way, or its columns are cut in blocks.
    """
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
    """Why batches of bags have to be plain, by what they are sent with; empty where they need not.

    FBGEMM's codecs cut what goes to a rank into blocks, and fail where it is no whole number of
    them (1.6 to 1.9): as it happens with plain batches, and hardly ever with others.

    Args:
        codecs: of the module.
    """
    for operation in (CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL, CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER):
        both = (codecs or {}).get(operation.name)
        for codec in (getattr(both, "forward", None), getattr(both, "backward", None)):
            precision: SparseType | None = getattr(codec, "_comm_precision", None)
            if precision and precision in _IN_BLOCKS and not isinstance(codec, Int8):
                return f"as codecs of {precision.name} send whole blocks of 32 numbers alone"
    return ""


def check_chosen(
    chosen: Choice | None, bags: Sequence[str], codecs: Mapping[str, Any] | None
) -> None:
    """Refuse codecs beside what a chooser chose, which is done before a trainer says its codecs.

    Args:
        chosen: what it came to; None without one.
        bags: pooled tables that are coalesced, by name.
        codecs: of bags.

    Raises:
        SetupError: their batches would have to be plain.
    """
    why = why_plain_codecs(codecs)
    if chosen is not None and bags and why:
        raise SetupError(
            f"{chosen.name} chose to coalesce bags of {shortened(bags)}, and knew of no "
            f"qcomm_codecs_registry: their batches have to be plain, {why}: in place of "
            f"{chosen.name} name shardings that do not coalesce them, or send FP16 or BF16"
        )


def int8_of(codecs: Mapping[str, Any] | None) -> Int8 | None:
    """The codec of ``training.wire: int8``; None of other formats."""
    both = (codecs or {}).get(CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL.name)
    codec = getattr(both, "forward", None)
    return codec if isinstance(codec, Int8) else None
