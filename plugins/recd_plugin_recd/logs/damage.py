"""What was found damaged in a shard."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Damage:
    """Bytes of a shard that cannot be read, or what is wrong with a file of a log.

    Attributes:
        offset: the byte where they start; None of a whole file.
        records_lost: None where it is not known: no whole block follows.
        resumes_at: the byte where reading goes on, None at the end of the shard.
    """

    shard: Path
    offset: int | None
    cause: str
    records_lost: int | None
    resumes_at: int | None

    def __str__(self) -> str:
        lost = {None: "an unknown number of records", 1: "1 record"}.get(
            self.records_lost, f"{self.records_lost} records"
        )
        if self.offset is None:
            return f"{self.shard}: {self.cause}; {lost} lost"
        then = (
            "nothing can be read after it"
            if self.resumes_at is None
            else f"reading goes on at byte {self.resumes_at}"
        )
        return f"{self.shard}: byte {self.offset}: {self.cause}; {lost} lost, {then}"


Report = Callable[[Damage], None]
