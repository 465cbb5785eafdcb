"""`recd run` that is asked to end while the data is prepared."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from tests.cli import programs
from tests.small_registry import write_registry

PLUGIN = '''
import os, signal, time
from recd_plugins.api import Dataset, FeatureSchema, hookimpl


class Slow(Dataset):
    """Data that takes long to prepare."""

    name = "acme.slow"

    def prepare(self):
        open("half", "w").close()
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        finally:
            os.remove("half")

    def schema(self):
        return FeatureSchema(("user",), (), "label")

    def reader(self, **arguments): ...


@hookimpl
def register_datasets():
    return [Slow]
'''


def test_sigterm_says_what_it_ended_and_leaves_no_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("plugins").mkdir()
    Path("plugins/acme.py").write_text(PLUGIN, encoding="utf-8")
    training = {"evaluate": False, "checkpoint": {"path": "checkpoints"}}
    write_registry(tmp_path, dataset={"use": "acme.slow"}, training=training)
    done = programs.recd("--plugins-dir", "plugins", "run", "registry.yaml")
    assert done.returncode == 128 + signal.SIGTERM
    assert "a signal ended the run before its first step" in done.stderr
    assert not Path("half").exists()
    assert not list(Path("checkpoints").iterdir())
