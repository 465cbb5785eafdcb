"""Formats of embeddings and gradients between ranks, as TorchRec's codecs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from fbgemm_gpu.quantize_comm import QuantizedCommCodec
from fbgemm_gpu.split_embedding_configs import SparseType
from torch import Tensor
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs
from torchrec.distributed.types import CommOp, QuantizedCommCodecs

from recd_plugins.distributed.int8 import SCALE_BYTES, Int8, block_of
from recd_plugins.errors import SetupError
from recd_plugins.registry.training_spec import TrainingSpec
from recd_plugins.values.rows import Table

Codecs = dict[str, QuantizedCommCodecs]

_COLLECTIVES = (
    CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL,
    CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER,
    CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL,
)


def scalar_bytes(wire: str, tables: Iterable[Table]) -> float:
    """Bytes of a scalar between ranks."""
    if wire == "int8":
        block = block_of(tables)
        return (block + SCALE_BYTES) / block
    return {"fp32": 4, "fp16": 2, "bf16": 2}[wire]


def wire_codecs(
    training: TrainingSpec, given: Codecs | None, tables: Iterable[Table]
) -> Codecs | None:
    """TorchRec's ``qcomm_codecs_registry`` of ``training.wire``, or what a trainer has given.

    Args:
        training: says the format.
        given: by a trainer.
        tables: all of the model.

    Raises:
        SetupError: both say how numbers are sent, or tables do not suit the format.
    """
    if training.wire == "fp32":
        return with_gradients(given)
    if given:
        raise SetupError(
            f"training.wire is {training.wire}, and the sharders have a qcomm_codecs_registry: "
            "leave one of the two away"
        )
    if training.wire == "int8":
        block = block_of(tables)
        return {each.name: QuantizedCommCodecs(Int8(block), Int8(block)) for each in _COLLECTIVES}
    # Not TorchRec's get_qcomm_codecs_registry, which takes fp16 for bf16 on CPU with a warning,
    # as gloo once had no bf16.
    kind = CommType(training.wire)
    config = QCommsConfig(forward_precision=kind, backward_precision=kind)
    return with_gradients({each.name: get_qcomm_codecs(config) for each in _COLLECTIVES})


def with_gradients(codecs: Codecs | None) -> Codecs | None:
    """The same codecs; those of FBGEMM's for bf16 with a decoder that has a gradient."""
    if codecs is None:
        return None
    return {
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
    return _Bf16(SparseType.BF16, codec._loss_scale)  # private, fbgemm 1.6 to 1.9


class _Bf16(QuantizedCommCodec):
    """FBGEMM's codec, whose decoder has no gradient, which TorchRec's synchronous collectives take
    through it: tables that they serve would silently not learn."""

    def decode(self, input_tensor: Tensor, ctx: Any = None) -> Tensor:  # noqa: ARG002
        """The same numbers in 32 bits."""
        if self._loss_scale is not None:
            input_tensor = input_tensor / self._loss_scale
        return input_tensor.float()
