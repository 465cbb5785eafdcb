"""Writes the versions of a model that ``runs.publish`` publishes."""

from __future__ import annotations

import shutil
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from recd_plugin_runs.export import (
    PlainBags,
    PlainSequences,
    ServingModel,
    export_model,
    serving_model,
)
from recd_plugin_runs.row_files import RowFiles, dense_file, digest
from recd_plugins.api import ChangedRows, RunStart, common_name, file_utils, rank_agreement


class Publisher:
    """Publishes the model of a run, on each rank. ``recd_plugins.serving`` describes the files.

    The constructor writes the programs, and a base with the current weights.

    Args:
        options: options of ``runs.publish``.
        start: the start of the run.
    """

    def __init__(self, options: Any, start: RunStart) -> None:
        self.options = options
        self._model: Any = start.model
        self._rank, self._world_size = start.rank, start.world_size
        self._consumer = f"runs.publish: {options.folder}"
        self._changed = ChangedRows.of(self._model, self._consumer)
        begun: Any = self._on_rank_0(partial(self._begin, start.config))
        self._sequence, self._program, self._layout = begun
        indices = {name: each["index"] for name, each in self._layout["tables"].items()}
        self._files = RowFiles(
            {name: index and index["state"] for name, index in indices.items()}, self._rank
        )
        self._bases: list[dict[str, Any]] = []
        self._deltas: list[dict[str, Any]] = []
        self._previous: str | None = None  # digest of the newest version
        self._since_base = 0
        self._publish(start.step, "base")
        self._checked, self._next_check = (start.step, self._published), start.step + 1

    def is_due(self, step: int) -> bool:
        """Return whether to publish after this step. All ranks must call this."""
        due, seconds = step % self.options.every == 0, self.options.seconds
        if seconds is not None and step >= self._next_check:
            now = time.monotonic()
            rate = (step - self._checked[0]) / (now - self._checked[1])
            # Several ranks agree ten times per interval, because they would wait for each other in
            # each step. The rate of a stream changes, so they agree at least every 10 steps.
            steps = 1 if self._world_size == 1 else max(1, min(10, int(rate * seconds / 10)))
            is_late, steps = rank_agreement.from_rank_0((now - self._published >= seconds, steps))
            self._checked, self._next_check = (step, now), step + steps
            due = due or is_late
        return due

    def publish_delta(self, step: int) -> None:
        """Write the changes up to a step, unless they are published. All ranks must call this."""
        if step == self._step:
            return
        self._since_base += 1
        is_base = self._since_base == self.options.base_every
        self._publish(step, "delta", *(["base"] if is_base else []))

    def _on_rank_0(self, function: Any) -> Any:
        """Return the result of rank 0 on all ranks, which all fail if rank 0 fails."""
        return rank_agreement.together(lambda: function() if self._rank == 0 else None)[0]

    def _publish(self, step: int, *kinds: str) -> None:
        """Write a version as a delta, a base or both."""
        self._published, self._step = time.monotonic(), step
        self._sequence += 1
        trained_at = time.time()
        state = {common_name(name): each for name, each in self._model.state_dict().items()}
        changed = self._changed.take(self._consumer)
        for kind in kinds:
            folder = self.options.folder / f"{kind}-{self._sequence:08d}"
            write = partial(self._files.write, folder, state, changed if kind == "delta" else None)
            tables: dict[str, list[dict[str, Any]]] = {}
            for of_rank in rank_agreement.together(write):
                for name, files in of_rank.items():
                    tables.setdefault(name, []).extend(files)
            manifest = {
                "sequence": self._sequence,
                "step": step,
                "time": trained_at,
                "previous": self._previous if kind == "delta" else None,
                "delta": self._deltas[-1]["sha256"] if kind != kinds[0] else None,
                "tables": tables,
            }
            entry = self._on_rank_0(partial(self._finish, folder, state, manifest))
            (self._bases if kind == "base" else self._deltas).append(entry)
            if kind == "base":
                self._since_base = 0
        self._previous = (self._deltas if "delta" in kinds else self._bases)[-1]["sha256"]
        self._files.published(state)
        self._bases = self._bases[-self.options.keep :]
        oldest = self._bases[0]["sequence"]
        self._deltas = [one for one in self._deltas if one["sequence"] > oldest]
        self._on_rank_0(self._point)

    def _begin(self, config: Any) -> tuple[int, dict[str, str], dict[str, Any]]:
        """Write the programs. Return the newest version, the program's entry and its layout."""
        folder = self.options.folder
        newest = max((_sequence(path) for path in folder.glob("*-*")), default=0)
        target = folder / f"program-{newest + 1:08d}"
        model = serving_model(config, None)
        layout = _layout(model)
        with warnings.catch_warnings():  # of torch, because all elements share their memory
            warnings.filterwarnings("ignore", message="No complete tensor found|.*non-contiguous")
            export_model(config, model, target)
        files = {path.name: digest(path) for path in sorted(target.iterdir())}
        layout["files"] = files
        file_utils.write_json(target / "program.json", layout)
        entry = {"folder": target.name, "sha256": digest(target / "program.json")}
        return newest, entry, layout

    def _finish(self, folder: Path, state: Any, manifest: dict[str, Any]) -> dict[str, Any]:
        """Write the dense weights and the manifest. Return the entry of ``current.json``."""
        tables = self._layout["tables"]
        names = [
            *self._layout["dense"],
            *(name for name in tables if name not in manifest["tables"]),
        ]
        manifest["dense"] = dense_file(folder / "dense.npz", state, iter(names))
        file_utils.write_json(folder / "manifest.json", manifest)
        sha256 = digest(folder / "manifest.json")
        return {"sequence": self._sequence, "folder": folder.name, "sha256": sha256}

    def _point(self) -> None:
        """Replace ``current.json``, then remove what it and older bases do not need."""
        folder = self.options.folder
        current = {"program": self._program, "base": self._bases[-1], "deltas": self._deltas}
        file_utils.write_note(folder / "current.json", current)
        kept = {one["folder"] for one in (self._program, *self._bases, *self._deltas)}
        for path in folder.glob("*-*"):
            if _sequence(path) and path.name not in kept:
                shutil.rmtree(path, ignore_errors=True)


def _sequence(path: Path) -> int:
    """Return the number of a published folder; 0 for other folders."""
    kind, _, number = path.name.partition("-")
    return int(number) if kind in ("program", "base", "delta") and number.isdigit() else 0


def _layout(model: ServingModel) -> dict[str, Any]:
    """Map the names of a training state dict to names in the programs.

    Tables and indices lose their values, because bases and deltas contain them.
    """
    tables: dict[str, Any] = {}
    of_tables: list[str] = []
    for path, module in model.named_modules():
        if not isinstance(module, PlainSequences):
            continue
        prefix = f"{path}.".removeprefix("model.")
        kind = "embedding_bags" if isinstance(module, PlainBags) else "embeddings"
        of_tables.append(f"{path}.tables.")
        for number, config in enumerate(module.configs):
            table: Any = module.tables[number]
            place, index = f"{path}.tables.{number}", None
            if isinstance(table, nn.Sequential):
                rows_of_ids: Any = table[0]
                if next(rows_of_ids.buffers(), None) is not None:
                    index = {
                        "state": f"{prefix}row_state.{config.name}.ids",
                        "ids": f"{place}.0._sorted",
                        "rows": f"{place}.0._order",
                        "size": rows_of_ids.ids.numel(),
                    }
                    for buffer, values in list(rows_of_ids.named_buffers()):
                        setattr(rows_of_ids, buffer, values.new_zeros(()).expand(values.shape))
                place = f"{place}.1"
            name = f"{prefix}{kind}.{config.name}.weight"
            tables[name] = {"weights": f"{place}.weight", "index": index}
    dense = {
        name.removeprefix("model."): name
        for name in model.state_dict()
        if not name.startswith(tuple(of_tables))
    }
    return {"tables": tables, "dense": dense}
