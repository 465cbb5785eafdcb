"""Numbers as they travel: encoded by the codecs of the tables' collectives."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchrec.distributed.types import CommOp, QuantizedCommCodec, QuantizedCommCodecs

from recd_plugins.api import SetupError

_FORMATS = (torch.float32, torch.float16, torch.bfloat16)


class Wire:
    """How rows and gradients of copies travel: as TorchRec's collectives of sequences send theirs.

    Args:
        codecs: TorchRec's ``qcomm_codecs_registry``; None leaves all as it is.
        embedding_dim: of the rows.

    Attributes:
        rows: codec of embeddings.
        gradients: codec of their gradients.

    Raises:
        SetupError: a codec sends several rows as one.
    """

    def __init__(self, codecs: dict[str, QuantizedCommCodecs] | None, embedding_dim: int) -> None:
        both = (codecs or {}).get(CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL.name)
        self.rows = Codec(None if both is None else both.forward, embedding_dim)
        self.gradients = Codec(None if both is None else both.backward, embedding_dim)


class Codec:
    """One of TorchRec's, for rows of ``embedding_dim`` scalars; or none."""

    def __init__(self, codec: QuantizedCommCodec[Any] | None, embedding_dim: int) -> None:
        self._codec = codec
        self._in_blocks = codec is not None and codec.quantized_dtype not in _FORMATS
        self._widths = embedding_dim, embedding_dim
        if codec is not None and self._in_blocks:
            context: Any = codec.create_context()
            if context.row_dim <= 0 or embedding_dim % context.row_dim:
                raise SetupError(
                    f"rows of tiers have {embedding_dim} scalars, and the qcomm_codecs_registry "
                    f"has {codec.quantized_dtype} for "
                    f"{CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL.name} in blocks of "
                    f"{context.row_dim}: take training.wire, fp32, fp16 or bf16, or leave the "
                    "tiers away"
                )
            self._widths = embedding_dim, codec.calc_quantized_size(embedding_dim, context)

    def encode(self, rows: Tensor) -> Tensor:
        """What travels of float32 rows: as many rows."""
        if self._codec is None:
            return rows
        if not self._in_blocks:
            return self._codec.encode(rows)
        context = self._codec.create_context()
        return self._codec.encode(rows.reshape(-1), context).view(len(rows), self._widths[1])

    def decode(self, rows: Tensor) -> Tensor:
        """What came, in float32."""
        if self._codec is None:
            return rows
        if not self._in_blocks:
            return self._codec.decode(rows)
        context: Any = self._codec.create_context()
        context.row_dim_quant = self._codec.calc_quantized_size(context.row_dim, context)
        return self._codec.decode(rows.reshape(-1), context).view(len(rows), self._widths[0])
