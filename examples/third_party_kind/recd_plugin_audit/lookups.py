"""Plugin ``audit.count_lookups``: counts the ids looked up in each table."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from recd_plugin_audit.audit import Audit
from recd_plugins.api import PluginOptions, RunEnd, RunStart

if TYPE_CHECKING:
    from torch import Tensor


class CountLookups(Audit):
    """Counts the ids looked up in each table, and writes the counts to one file per rank."""

    name = "audit.count_lookups"
    free_options = frozenset({"path"})

    class Options(PluginOptions):
        path: Path = Field(description="Folder of the output files rank0.json, rank1.json, ...")

    options: Options

    def on_start(self, start: RunStart) -> None:
        super().on_start(start)
        self.rank, self.world_size = start.rank, start.world_size
        self.lookups = dict.fromkeys(self.features, 0)

    def note(self, table: str, ids: Tensor) -> None:
        self.lookups[table] += len(ids)

    def on_end(self, end: RunEnd) -> None:
        self.options.path.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"steps": end.step, "lookups": self.lookups})
        (self.options.path / f"rank{end.rank}.json").write_text(text)

    def state_dict(self) -> dict[str, Any]:
        return {"lookups": dict(self.lookups)}

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Restore this rank's counts. Rank 0 adds the counts of ranks that no longer exist.

        The sum over ranks is therefore correct after a change of the world size.
        """
        gone = states[self.world_size :] if self.rank == 0 else ()
        for state in (*states[self.rank : self.rank + 1], *gone):
            for table in self.lookups.keys() & state["lookups"].keys():
                self.lookups[table] += state["lookups"][table]
