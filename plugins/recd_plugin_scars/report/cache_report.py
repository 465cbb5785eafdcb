"""What cached tables moved, next to what their plan predicts (SCARS)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from rich.console import RenderableType
from rich.table import Table

from recd_plugins.api import Section
from recd_plugins.api.files import bytes_text


@dataclass(frozen=True)
class StepTraffic:
    """One table in one step of all ranks; a row counts once for each column shard.

    Attributes:
        lookups: ids.
        unique_rows: distinct rows that they are.
        hits: of those rows, the ones that were in the fast memory.
        misses: the others, which are read from the backing store.
        bytes_read: of the backing store: weights and optimizer state.
        bytes_written: to it, likewise.
    """

    lookups: float
    unique_rows: float
    hits: float
    misses: float
    bytes_read: float
    bytes_written: float

    @property
    def bytes(self) -> float:
        """Read and written."""
        return self.bytes_read + self.bytes_written

    @property
    def hit_rate(self) -> float | None:
        """Hits over distinct rows; None where nothing was looked up."""
        return self.hits / self.unique_rows if self.unique_rows else None


@dataclass(frozen=True)
class CachedTableReport:
    """The cache of one table.

    Attributes:
        name: of the table.
        policy: which rows stay.
        num_embeddings: rows of the table.
        cached_rows: that stay in the fast memory.
        observed: counted where rows move; None of a run that trained no step.
        predicted: by the plan; None where there is none.
    """

    name: str
    policy: str
    num_embeddings: int
    cached_rows: int
    observed: StepTraffic | None
    predicted: StepTraffic | None

    @property
    def share(self) -> float:
        """Cached rows over all rows."""
        return self.cached_rows / self.num_embeddings

    @property
    def ratio(self) -> float | None:
        """Bytes of the backing store, observed over predicted."""
        if self.observed is None or self.predicted is None or not self.predicted.bytes:
            return None
        return self.observed.bytes / self.predicted.bytes


@dataclass(frozen=True)
class CacheReport(Section):
    """All cached tables of a run.

    Attributes:
        tables: in the order of the model.
    """

    name: ClassVar[str] = "caches"

    tables: tuple[CachedTableReport, ...]

    @property
    def observed_bytes(self) -> float | None:
        """Bytes of the backing store in a step, of all tables; None of a run without steps."""
        return _sum([table.observed for table in self.tables])

    @property
    def predicted_bytes(self) -> float | None:
        """The same by the plans; None where a table has none."""
        return _sum([table.predicted for table in self.tables])

    def as_json(self) -> dict[str, Any]:
        """JSON values, by table; figures are those of all ranks in one step."""
        tables = {
            table.name: {
                **{key: value for key, value in asdict(table).items() if key != "name"},
                "share": table.share,
                "backing_store_ratio": table.ratio,
            }
            for table in self.tables
        }
        return {
            "tables": tables,
            "backing_store_bytes": {
                "observed": self.observed_bytes,
                "predicted": self.predicted_bytes,
            },
        }

    def shown(self, run: str) -> Sequence[RenderableType]:
        """The table."""
        return [self.table(run)]

    def table(self, name: str = "") -> Table:
        """A row for each table, and their sum; ``name`` tells the run."""
        title = "caches: a step of all ranks"
        table = Table(title=f"{name}, {title}" if name else title)
        table.add_column("table")
        for heading in ("rows cached", "hits", "misses", "row bytes", "predicted", "ratio"):
            table.add_column(heading, justify="right")
        for cached in self.tables:
            seen, expected = cached.observed, cached.predicted
            table.add_row(
                cached.name,
                f"{cached.cached_rows:,} ({cached.share:.2%})",
                *((_number(seen.hits), _number(seen.misses)) if seen else ("-", "-")),
                bytes_text(None if seen is None else seen.bytes),
                bytes_text(None if expected is None else expected.bytes),
                _ratio(cached.ratio),
            )
        observed, predicted = self.observed_bytes, self.predicted_bytes
        if len(self.tables) > 1:
            ratio = observed / predicted if observed is not None and predicted else None
            table.add_section()
            table.add_row(
                "all", "", "", "", bytes_text(observed), bytes_text(predicted), _ratio(ratio)
            )
        policies = sorted({cached.policy for cached in self.tables})
        table.caption = f"distinct rows; bytes read and written\npolicy {', '.join(policies)}"
        return table


def _sum(parts: Sequence[StepTraffic | None]) -> float | None:
    known = [part.bytes for part in parts if part is not None]
    return sum(known) if len(known) == len(parts) else None


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or not value else f"{value:.2g}"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def merged(ranks: Sequence[Mapping[str, StepTraffic]]) -> dict[str, StepTraffic]:
    """What ranks counted, added up by table."""
    found: dict[str, StepTraffic] = {}
    for rank in ranks:
        for name, part in rank.items():
            before = found.get(name)
            if before is not None:
                sums = {key: value + getattr(before, key) for key, value in asdict(part).items()}
                part = StepTraffic(**sums)
            found[name] = part
    return found
