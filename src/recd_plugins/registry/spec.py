"""What the parts of a registry file's shape have in common."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictInt

# Strict: true is no number, and 2.5 is not 2. At most what the words of tensors hold.
Count = Annotated[StrictInt, Field(gt=0, lt=1 << 63)]
# Of processes, and of columns and layers: what is larger is a slip of the pen.
Width = Annotated[StrictInt, Field(gt=0, le=1 << 20)]


def _is_not_0_to_kernels(value: float) -> float:
    if value < 1.2e-38:
        raise ValueError("is 0 as a float32, which kernels compute with")
    return value


# More than that makes infinities in few steps.
Float32 = Annotated[
    float, Field(gt=0, le=1e9, allow_inf_nan=False), AfterValidator(_is_not_0_to_kernels)
]


class Spec(BaseModel):
    """A part of a registry file: every key is known, and nothing changes it."""

    model_config = ConfigDict(extra="forbid", frozen=True)
