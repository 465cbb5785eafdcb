"""How good a model was each time that it was validated."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field, FiniteFloat


@dataclass(frozen=True)
class ValidationCurve:
    """The figure that validations go by, one value each.

    Attributes:
        metric: its name.
        mode: whether the least or the most is best.
        steps: optimizer steps done before each.
        values: None where a value was no finite number, which is never the best.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)

    metric: str
    mode: Literal["min", "max"]
    steps: list[Annotated[int, Field(ge=0, le=2**53)]] = field(default_factory=list)
    values: list[FiniteFloat | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        if len(self.steps) != len(self.values):
            raise ValueError(f"has {len(self.steps)} steps and {len(self.values)} values")

    @property
    def best(self) -> int | None:
        """Which is the best, the first of equal ones; None where there is none."""
        sign = 1 if self.mode == "min" else -1
        known = [(sign * value, i) for i, value in enumerate(self.values) if value is not None]
        return min(known)[1] if known else None

    @property
    def best_step(self) -> int | None:
        """Its step."""
        return None if self.best is None else self.steps[self.best]

    @property
    def stale(self) -> int:
        """Validations since the best one; all where there is none."""
        return len(self.values) - (0 if self.best is None else self.best + 1)

    def with_value(self, step: int, value: float | None) -> ValidationCurve:
        """The same with one more."""
        return replace(self, steps=[*self.steps, step], values=[*self.values, value])
