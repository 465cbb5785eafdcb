from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.cli.programs import run_with_plugins
from tests.plugin_files import write_plugins
from tests.small_registry import random_rows, write_registry

PLUGIN = '''
import json
from pathlib import Path
from recd_plugins.runtime import activity

class Notes(Callback):
    """Note what is seen."""
    name = "acme.notes"

    class Options(PluginOptions):
        path: Path
        fail_at: int = 0

    free_options = frozenset({"fail_at", "path"})

    def on_start(self, start):
        at = activity.current().step  # as a message about a lost rank would have it
        self.rank, self.seen, self.loss = start.rank, [["start", start.step, at]], 0.0
        with self.options.path.open("a") as file:
            file.write(f"{self.rank}\\n")

    def on_batch(self, batch):
        self.seen.append([batch.step, int(batch.ids("item").sum())])

    def on_step(self, step):
        if step.step == self.options.fail_at:
            raise ValueError("enough")
        self.loss += step.loss.item()

    def on_evaluate(self, evaluation):
        self.seen.append([evaluation.split, evaluation.quality.num_samples])

    def on_end(self, end):
        self.seen.append(["end", end.step, *end.losses])
        path = self.options.path.with_suffix(f".{self.rank}")
        path.write_text(json.dumps({"seen": self.seen, "loss": self.loss}))

    def state_dict(self):
        return {"loss": self.loss}

    def load_state_dict(self, states):
        self.loss = states[self.rank]["loss"]
'''


def write(folder: Path, **options: Any) -> Path:
    write_plugins(folder, PLUGIN, "Notes")
    checkpoint = {"path": f"{folder}/checkpoints", "every": 4}
    return write_registry(
        folder,
        dataset=random_rows(256, test_rows=64),
        callbacks=[{"use": "acme.notes", "options": {"path": f"{folder}/notes", **options}}],
        training={"ranks": 2, "device": "auto", "checkpoint": checkpoint},
    )


def notes(folder: Path) -> list[Any]:
    return [json.loads((folder / f"notes.{rank}").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    run_with_plugins(write(folder, fail_at=0))
    return folder


def test_they_are_called_in_order(whole: Path) -> None:
    first, second = notes(whole)
    for rank in (first, second):
        start, *batches, test, end = rank["seen"]
        assert start == ["start", 0, 0]
        assert [step for step, _ in batches] == list(range(1, 9))
        assert test == ["test", 64]
        assert end[:2] == ["end", 8]
    assert first["seen"] != second["seen"], "each sees its own batches"
    assert first["seen"][-1] == second["seen"][-1], "losses are the mean over ranks"
    assert sum(first["seen"][-1][2:]) == pytest.approx((first["loss"] + second["loss"]) / 2)


def test_a_run_that_is_resumed_ends_with_the_same_state(whole: Path, tmp_path: Path) -> None:
    said = run_with_plugins(write(tmp_path, fail_at=6), expect=70).stderr
    assert "plugin 'acme.notes' failed in on_step (" in said
    assert "acme.py:31): ValueError: enough" in said
    run_with_plugins(write(tmp_path, fail_at=0), "--resume")
    for resumed, straight in zip(notes(tmp_path), notes(whole), strict=True):
        assert resumed["loss"] == straight["loss"]
        assert resumed["seen"][0] == ["start", 4, 4]
        assert resumed["seen"][1:] == straight["seen"][5:]
    last = Path("checkpoints", "step-000000008", "progress.json")
    assert (tmp_path / last).read_bytes() == (whole / last).read_bytes()
