"""Formats of embeddings and gradients between ranks, as TorchRec's codecs."""

from __future__ import annotations

from typing import Any

from fbgemm_gpu.quantize_comm import QuantizedCommCodec
from fbgemm_gpu.split_embedding_configs import SparseType
from torch import Tensor
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs
from torchrec.distributed.types import CommOp, QuantizedCommCodecs

from recd_plugins.errors import SetupError
from recd_plugins.registry.training_spec import TrainingSpec

Codecs = dict[str, QuantizedCommCodecs]

_COLLECTIVES = (
    CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL,
    CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER,
    CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL,
)


def wire_codecs(training: TrainingSpec, given: Codecs | None) -> Codecs | None:
    """TorchRec's ``qcomm_codecs_registry`` of ``training.wire``, or what a trainer has given.

    Raises:
        SetupError: both say how numbers are sent.
    """
    if training.wire == "fp32":
        return given
    if given:
        raise SetupError(
            f"training.wire is {training.wire}, and the sharders have a qcomm_codecs_registry: "
            "leave one of the two away"
        )
    # Not TorchRec's get_qcomm_codecs_registry, which takes fp16 for bf16 on CPU with a warning,
    # as gloo once had no bf16.
    kind = CommType(training.wire)
    config = QCommsConfig(forward_precision=kind, backward_precision=kind)
    found = {each.name: get_qcomm_codecs(config) for each in _COLLECTIVES}
    if kind is CommType.BF16:
        for both in found.values():
            both.forward, both.backward = _Bf16(SparseType.BF16), _Bf16(SparseType.BF16)
    return found


class _Bf16(QuantizedCommCodec):
    """FBGEMM's codec, whose decoder has no gradient, which TorchRec's synchronous collectives take
    through it: tables that they serve would silently not learn."""

    def decode(self, input_tensor: Tensor, ctx: Any = None) -> Tensor:  # noqa: ARG002
        """The same numbers in 32 bits."""
        return input_tensor.float()
