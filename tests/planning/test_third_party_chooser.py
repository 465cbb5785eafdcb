"""A chooser of a plugin is asked once, and replaced by its choice."""

from pathlib import Path
from typing import Any

import pytest
from tests.plugin_files import write_plugins
from tests.small_registry import random_rows, write_registry

from recd_plugins import RunConfig, load_registry
from recd_plugins.planning.study import with_plugins
from recd_plugins.planning.topologies import load_topology
from recd_plugins.runtime.errors import NoPlanError
from recd_plugins.training.session import session
from recd_plugins.training.trainer import Job

#: A chooser of one sharding for all tables, and what it may choose besides.
PLUGINS = '''
from dataclasses import dataclass

@dataclass(frozen=True)
class Alike(Choice):
    name = "alike"  # of the section in reports

    milliseconds: float

    def as_json(self):
        return {"milliseconds": self.milliseconds}

    def shown(self, run):
        return [str(self)]

    def __str__(self):
        uses = ", ".join(str(offer) for offer, _ in self.offered) or "the planner"
        return f"all tables: {uses}, {self.milliseconds:.1f} ms"

class AllAlike(Chooser):
    """Of what is offered for all tables together, what takes the shortest predicted step."""

    name = "acme.alike"

    def choose(self, question):
        names = [table.name for table in question.tables]
        tried = [[], *([(offer, names)] for offer in question.offers(question.tables))]
        best = min(tried, key=lambda offered: question.evaluate(offered).total)
        trial = question.evaluate(best)
        if trial.error is not None:
            raise trial.error
        return Alike(best, 1000 * trial.total)

class Halves(Sharding):
    "Rows in halves."
    name = "acme.halves"

    @classmethod
    def offers(cls, tables, context):
        return [{}]

    def constraints(self, tables):
        from torchrec.distributed.planner.types import ParameterConstraints
        return {t.name: ParameterConstraints(sharding_types=["row_wise"]) for t in tables}
'''


def written(folder: Path, **sharding: Any) -> Path:
    write_plugins(folder, PLUGINS, "AllAlike", "Halves")
    training = {"ranks": 2, "evaluate": False}
    return write_registry(folder, dataset=random_rows(256), sharding=[sharding], training=training)


def asked(folder: Path) -> RunConfig:
    return load_registry(written(folder, use="acme.alike"), plugins_dir=folder / "plugins")


def test_training_is_that_of_the_entries_that_it_chose(tmp_path: Path) -> None:
    losses = []
    for sharding in ({"use": "acme.alike"}, {"use": "acme.halves", "tables": ["*"]}):
        registry = written(tmp_path, **sharding)
        with session(Job(registry, plugins_dir=tmp_path / "plugins")) as trainer:
            losses.append(trainer.train("plugins").losses)
    assert losses[0] == losses[1]


def test_reports_have_what_it_says(tmp_path: Path) -> None:
    topology = load_topology("machine", ranks=2)
    prepared = with_plugins(asked(tmp_path), topology).prepared
    uses = [offer.use for offer, _ in prepared.chosen.offered]
    assert [entry.plugin.name for entry in prepared.registry.sharding] == uses
    assert str(prepared.chosen).startswith("all tables: ")
    assert prepared.chosen.as_json()["milliseconds"] > 0


def test_where_nothing_fits_its_entry_is_named(tmp_path: Path) -> None:
    little = load_topology("machine", ranks=2).model_copy(update={"ddr_bytes": 1_000})
    with pytest.raises(NoPlanError, match=r"sharding\[0\]: 'acme\.alike' found no plan"):
        with_plugins(asked(tmp_path), little)
