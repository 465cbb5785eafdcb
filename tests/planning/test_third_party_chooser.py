"""A chooser of a plugin is asked once, and replaced by its choice."""

from __future__ import annotations

from pathlib import Path

import pytest

from recd_plugins import RunConfig, load_registry
from recd_plugins.planning.study import with_plugins
from recd_plugins.planning.topologies import load_topology
from recd_plugins.runtime.errors import NoPlanError, PluginError, RegistryError
from recd_plugins.training.session import session

REGISTRY = """
version: 1
dataset: {use: dlrm.random, options: {rows: 256, sparse: {user: 90, item: 90}}}
converter: {use: recd.kjt}
sharding: SHARDING
model: {embedding_dim: 4, num_embeddings: 100, bottom_mlp: [4], top_mlp: [4]}
training: {batch_size: 16, ranks: 2, device: cpu, evaluate: false}
"""
#: A chooser of one sharding for all tables.
ALIKE = '''
"""acme.alike: one sharding for all tables."""

from __future__ import annotations

from dataclasses import dataclass

from recd_plugins.api import Chooser, choosing, hookimpl


@dataclass(frozen=True)
class Alike(choosing.Choice):
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


@hookimpl
def register_shardings():
    return [AllAlike]
'''
#: What it may choose, besides.
OTHERS = """
from recd_plugins.api import Chooser, SetupError, Sharding, hookimpl

class Halves(Sharding):
    "Rows in halves."
    name = "acme.halves"

    @classmethod
    def offers(cls, tables, context):
        return [{}]

    def constraints(self, tables):
        from torchrec.distributed.planner.types import ParameterConstraints
        return {t.name: ParameterConstraints(sharding_types=["row_wise"]) for t in tables}

@hookimpl
def register_shardings():
    return [Halves]
"""
#: What a chooser does wrong, and how that is told.
WRONG = {
    "return 5": (PluginError, r"acme\.alike: choose returned 5; expected a Choice"),
    "return Alike(5, 1.0)": (PluginError, r"acme\.alike: chose 5; expected pairs of an Candidate"),
    "return Alike([(Candidate('acme.half', {}), ['t_user'])], 1.0)": (
        PluginError,
        r"acme\.alike: chose acme\.half, which offers nothing",
    ),
    "return Alike([(Candidate('acme.halves', {'x': 1}), ['t_user'])], 1.0)": (
        PluginError,
        r"chose acme\.halves with \{'x': 1\}, which are no options of it: x: unknown option",
    ),
    "return Alike([(Candidate('acme.halves', {}), [])], 1.0)": (
        PluginError,
        r"acme\.alike: chose acme\.halves for no table",
    ),
    "return Alike([(Candidate('acme.halves', {}), ['t_usr'])], 1.0)": (
        PluginError,
        r"for t_usr, which is none of its tables; did you mean t_user\?",
    ),
    "return Alike([(Candidate('acme.halves', {}), ['t_user', 't_user'])], 1.0)": (
        PluginError,
        r"acme\.alike: chose twice for table t_user",
    ),
    "question.tables.clear()": (PluginError, r"choose failed at .*alike\.py:\d+: AttributeError"),
    "return question.offers(['t_user'])": (
        PluginError,
        r"choose failed at .*alike\.py:\d+: TypeError: offers takes Tables",
    ),
    "class Own(Alike): pass\n        return Own([], 1.0)": (
        PluginError,
        r"acme\.alike: Own, which choose returned, cannot be sent to other ranks",
    ),
    "return question.evaluate([(Candidate('acme.halves', {}), ['t_usr'])])": (
        PluginError,
        r"acme\.alike: tried acme\.halves for t_usr, which is none of its tables; did you mean",
    ),
    "return question.evaluate([]).without(['t_usr'])": (
        PluginError,
        r"acme\.alike: asked for the step without t_usr, which is none of its tables; did you",
    ),
    "return question.evaluate([]).without('t_user')": (
        PluginError,
        r"acme\.alike: asked for the step without 't_user'; expected names of tables, as \['t_user",
    ),
    "return question.evaluate([]).without([5])": (
        PluginError,
        r"acme\.alike: asked for the step without \[5\]; expected names of tables",
    ),
    "raise DataError('not today')": (RegistryError, r"registry\.yaml:5 sharding\[0\]: not today"),
    "1 / 0": (PluginError, r"acme\.alike: choose failed at .*alike\.py:\d+: ZeroDivisionError"),
}


def written(folder: Path, sharding: str, body: str | None = None) -> Path:
    code = ALIKE
    if body is not None:
        start, rest = code.split("    def choose(self, question):\n")
        end = rest.partition("\n\n\n")[2]
        code = f"{start}    def choose(self, question):\n        {body}\n\n\n{end}"
        code = code.replace("import Choice,", "import Choice, DataError, Candidate,")
    (folder / "acme_alike.py").write_text(code, encoding="utf-8")
    (folder / "acme_halves.py").write_text(OTHERS, encoding="utf-8")
    registry = folder / "registry.yaml"
    registry.write_text(REGISTRY.replace("SHARDING", sharding), encoding="utf-8")
    return registry


def asked(folder: Path, body: str | None = None) -> RunConfig:
    return load_registry(written(folder, "[{use: acme.alike}]", body), plugins_dir=folder)


def test_training_is_that_of_the_entries_that_it_chose(tmp_path: Path) -> None:
    losses = []
    for sharding in ("[{use: acme.alike}]", "[{use: acme.halves, tables: ['*']}]"):
        registry = written(tmp_path, sharding)
        with session(registry, plugins_dir=tmp_path, overrides={}) as trainer:
            losses.append(trainer.train("plugins").losses)
    assert losses[0] == losses[1]


def test_reports_have_what_it_says(tmp_path: Path) -> None:
    topology = load_topology("machine", ranks=2)
    prepared = with_plugins(asked(tmp_path), topology).prepared
    assert prepared.chosen is not None
    uses = [offer.use for offer, _ in prepared.chosen.offered]
    assert [entry.plugin.name for entry in prepared.registry.sharding] == uses
    assert str(prepared.chosen).startswith("all tables: ")
    assert prepared.chosen.as_json()["milliseconds"] > 0


#: What is wrong with its report: what stands in place of a method, and how that is told.
WRONG_REPORTS = {
    "as_json": ("return {1, 2}", r"as_json of section alike returned \{1, 2\}; expected JSON"),
    "shown": ("1 / 0", r"shown of section alike failed at .*alike\.py:\d+: ZeroDivisionError"),
    "shown ": ("return [3]", r"shown of section alike returned \[3\]; expected a sequence of"),
    "__str__": ("return 5", "__str__ of section alike returned 5; expected a line"),
    "with_compute": ("return 5", "with_compute of section alike returned 5; expected a Choice"),
}


def test_where_nothing_fits_its_entry_is_named(tmp_path: Path) -> None:
    little = load_topology("machine", ranks=2).model_copy(update={"ddr_bytes": 1_000})
    with pytest.raises(NoPlanError, match=r"sharding\[0\]: acme\.alike finds no candidate"):
        with_plugins(asked(tmp_path), little)
