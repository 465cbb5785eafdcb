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

    Attributes:
        rows: codec of embeddings.
        gradients: codec of their gradients.

    Raises:
        SetupError: a codec sends other than a number for each number.
    """

    def __init__(self, codecs: dict[str, QuantizedCommCodecs] | None) -> None:
        both = (codecs or {}).get(CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL.name)
        self.rows = Codec(None if both is None else both.forward)
        self.gradients = Codec(None if both is None else both.backward)


class Codec:
    """One of TorchRec's, of 16 or 32 bits; or none."""

    def __init__(self, codec: QuantizedCommCodec[Any] | None) -> None:
        if codec is not None and codec.quantized_dtype not in _FORMATS:
            raise SetupError(
                f"tiers send rows in fp32, fp16 or bf16, and the qcomm_codecs_registry has "
                f"{codec.quantized_dtype} for {CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL.name}: take "
                "one of the three, or leave the tiers away"
            )
        self._codec = codec

    def encode(self, numbers: Tensor) -> Tensor:
        """What travels of float32 numbers."""
        return numbers if self._codec is None else self._codec.encode(numbers)

    def decode(self, numbers: Tensor) -> Tensor:
        """What came, in float32."""
        return numbers if self._codec is None else self._codec.decode(numbers)

    def rounded(self, numbers: Tensor) -> Tensor:
        """Numbers as other ranks get them: where all ranks are to have the same."""
        return self.decode(self.encode(numbers))
