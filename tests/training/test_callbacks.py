from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.plugin_files import write_plugins
from tests.small_registry import random_rows, write_registry
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins import load_registry
from recd_plugins.config import Entry
from recd_plugins.interfaces import Callback, Sharding, Table
from recd_plugins.interfaces.batch import ModelInput
from recd_plugins.interfaces.callback import Quality
from recd_plugins.runtime.errors import RegistryError
from recd_plugins.runtime.generators import generators_kept
from recd_plugins.training.callbacks import Callbacks, Called, callbacks_of
from recd_plugins.training.checkpoint_files import Progress

TABLES = (Table("t_user", ("user",), 100, 4, pooled=True),)


class Notes(Callback):
    """Note what it is called with."""

    name = "test.notes"

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self.seen: list[Any] = []

    def on_start(self, start):
        self.seen.append(start)

    def on_batch(self, batch):
        self.seen.append((batch.step, batch.ids("user").tolist()))

    def on_step(self, step):
        self.seen.append((step.step, step.loss.item(), step.loss.requires_grad))

    def on_evaluate(self, evaluation):
        self.seen.append((evaluation.split, evaluation.quality.auc))

    def on_end(self, end):
        self.seen.append(end)

    def state_dict(self):
        return {"seen": len(self.seen)}

    def load_state_dict(self, states):
        self.seen.append([*states])


class Idle(Callback):
    """Do nothing."""

    name = "test.idle"


class Meddles(Callback):
    """Draw from all generators, and switch gradients off."""

    name = "test.meddles"

    def on_step(self, step):
        torch.manual_seed(random.randrange(9) + np.random.randint(9))
        torch.set_grad_enabled(False)


def called(cls: type[Callback]) -> Called:
    entry = Entry[Callback](cls(cls.Options()), (), "callbacks[0]", 7)
    return Called(entry, cls.name, ())


def callbacks(*of: Called) -> Callbacks:
    return Callbacks(Path("registry.yaml"), of, rank=0, world_size=1)


def batch(*ids: int) -> ModelInput:
    kjt = KeyedJaggedTensor(["user"], torch.tensor(ids), lengths=torch.tensor([len(ids)]))
    return ModelInput(torch.zeros(1, 0), kjt, torch.zeros(1))


def test_what_is_called_with_what() -> None:
    notes = called(Notes)
    calls = callbacks(called(Idle), notes)
    calls.start(Progress(3, callbacks={"test.notes": [{"rank": 0}]}), 5, TABLES)
    batches = map(calls.queued, [batch(1, 2), batch(3)])
    assert [len(each.sparse_features.values()) for each in batches] == [2, 1], "both read ahead"
    loss = torch.tensor(0.5, requires_grad=True)
    for step in (4, 5):
        calls.trained(step, loss)
    assert loss == 0.5
    calls.evaluated(5, "test", (Quality(0.9, 0.6, 10), {}))
    calls.ended(5, [0.5] * 5)
    start, states, *seen, end = notes.entry.plugin.seen
    assert (start.step, start.expected_steps, start.tables) == (3, 5, TABLES)
    assert states == [{"rank": 0}]
    steps = [(4, [1, 2]), (4, 0.5, False), (5, [3]), (5, 0.5, False)]
    assert seen == [*steps, ("test", 0.6)]
    assert end.losses == (0.5,) * 5


def test_one_that_meddles_changes_no_training() -> None:
    def drawn() -> list[float]:
        return [float(torch.rand(())), random.random(), float(np.random.rand())]

    with generators_kept():
        expected = drawn()
    callbacks(called(Meddles)).trained(1, torch.tensor(0.5))
    assert drawn() == expected
    assert torch.is_grad_enabled()


def test_a_state_that_nobody_takes(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(3, callbacks={"test.notes": [{}], "test.gone": [{}]})
    callbacks(called(Notes)).start(progress, 5, TABLES)
    assert capsys.readouterr().err == (
        "The saved state of 'test.gone' is ignored, because the registry file does not use this "
        "callback\n"
    )
    message = r"callbacks\[0\]: callback 'test.idle' cannot load a state"
    with pytest.raises(RegistryError, match=message):
        callbacks(called(Idle)).start(Progress(3, callbacks={"test.idle": [{}]}), 5, TABLES)


PLUGINS = '''
class Watch(Callback):
    """Watch tables."""
    kind, name = "watch", "acme.watch"

class Both(Sharding, Callback):
    """Shard nothing, and look on."""
    name = "acme.both"

class Wraps(DatasetWrapper, Callback):
    """Leave rows as they are, and look on."""
    name = "acme.wraps"
    def reader(self, **options):
        return self.inner.reader(**options)

class Look(Callback):
    """Look on."""
    name = "acme.look"
    class Options(PluginOptions):
        place: str = ""
    def load_state_dict(self, states):
        self.states = states

@hookimpl
def register_kinds():
    return [Kind("watch", Watch, "watch", "by table", "Watchers.")]
'''


@pytest.fixture
def plugins_dir(tmp_path: Path) -> Path:
    return write_plugins(tmp_path, PLUGINS, "Watch", "Both", "Wraps", "Look")


def write(folder: Path, watched: str) -> Path:
    look = {"use": "acme.look"}
    return write_registry(
        folder,
        dataset={**random_rows(), "wrap": [{"use": "acme.wraps"}]},
        sharding=[{"use": "acme.both", "tables": ["t_item"]}],
        callbacks=[look, {**look, "enabled": False}, look],
        watch=[{"use": "acme.watch", "tables": [watched]}],
    )


def test_plugins_of_all_kinds_are_called(tmp_path: Path, plugins_dir: Path) -> None:
    registry = load_registry(write(tmp_path, "t_*"), plugins_dir=plugins_dir)
    tables = [Table(name, (name,), 9, 4, pooled=True) for name in ("t_user", "t_item")]
    found = callbacks_of(registry, tables)
    assert [(each.entry.plugin.name, each.entry.field, each.claimed) for each in found] == [
        ("acme.wraps", "dataset.wrap[0]", ()),
        ("acme.both", "sharding[0]", ("t_item",)),
        ("acme.look", "callbacks[0]", ()),
        ("acme.look", "callbacks[2]", ()),
        ("acme.watch", "watch[0]", ("t_user", "t_item")),
    ]
    assert len({each.key for each in found}) == 5
    assert isinstance(found[1].entry.plugin, Sharding)
    registry = load_registry(write(tmp_path, "t_nobody"), plugins_dir=plugins_dir)
    with pytest.raises(RegistryError, match=r"yaml:8 watch\[0\].tables: 't_nobody' matches no"):
        callbacks_of(registry, tables)


@pytest.mark.parametrize(
    ("before", "now", "taken", "left"),
    [
        ("ab", "ba", {"b": "b", "a": "a"}, False),
        ("a", "ba", {}, True),  # nobody knows whose it was
        ("a", "b", {"b": "a"}, False),  # the one that there is was given other options
    ],
)
def test_an_entry_goes_on_from_the_state_of_its_options(
    before: str,
    now: str,
    taken: dict[str, str],
    left: bool,
    tmp_path: Path,
    plugins_dir: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def called_of(places: str) -> list[Called]:
        looks = [{"use": "acme.look", "options": {"place": place}} for place in places]
        path = write_registry(tmp_path, callbacks=looks)
        return callbacks_of(load_registry(path, plugins_dir=plugins_dir), TABLES)

    saved = {each.key: [{"of": at}] for each, at in zip(called_of(before), before, strict=True)}
    found = called_of(now)
    callbacks(*found).start(Progress(3, callbacks=saved), 5, TABLES)
    plugins: Any = {at: each.entry.plugin for each, at in zip(found, now, strict=True)}
    got = {at: each.states[0]["of"] for at, each in plugins.items() if hasattr(each, "states")}
    assert got == taken
    assert ("The saved state of 'acme.look' is ignored" in capsys.readouterr().err) == left
