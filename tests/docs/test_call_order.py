"""Plugins are called in the order that docs/plugins/index.md says."""

from __future__ import annotations

import re
from pathlib import Path

from tests.commands import recd
from tests.docs.pages import page
from tests.plugin_files import write_plugins

TABLE = page("plugins/index.md").split("## Order of calls")[1].split("\n## ")[0]
CALLS = [tuple(call.split(".")) for call in re.findall(r"`([A-Z]\w+\.\w+)`", TABLE)]

PLUGINS = '''
"""A plugin of each kind, which notes its calls."""

from functools import wraps

from recd_plugin_recd.ikjt import KjtConverter
from recd_plugin_recd.pooling import MeanPooling
from recd_plugin_recd.session_parquet import SessionParquet
from recd_plugin_torchrec.training import Base
from recd_plugins import api

CALLS = {calls}


def note(text):
    with open("{notes}", "a") as notes:
        print(text, file=notes)


def _noted(plain, name):
    @wraps(plain)
    def call(*arguments, **named):
        found = [a for a in arguments if hasattr(a, "parameters")] if "rewrite" in name else []
        note(" ".join([name, *{{p.device.type for model in found for p in model.parameters()}}]))
        return plain(*arguments, **named)

    return staticmethod(call) if hasattr(plain, "__self__") else call


def noted(kind, base, **body):
    body = {{"__doc__": "Notes its calls.", "name": f"order.{{kind.lower()}}", **body}}
    cls = type(kind, (base,), body)
    for each, method in CALLS:
        if each == kind:
            setattr(cls, method, _noted(getattr(cls, method), f"{{kind}}.{{method}}"))
    return cls


def build(self, features):
    from recd_plugins.config import ModelSpec
    from recd_plugins.interfaces.batch import Placement
    from recd_plugins.model.dlrm import DLRM

    spec = ModelSpec(embedding_dim=4, num_embeddings=100, bottom_mlp=[4], top_mlp=[4])
    placement = Placement(features.pooled, sequence=features.sequence)
    return DLRM(spec, features.num_dense, placement)


def update(self, table):
    from torch.optim import SGD

    return api.RowUpdate(SGD, {{"lr": 0.1}})


Strategy = noted("TableStrategy", api.TableStrategy, follows_optimizers=True)
PLUGINS = [
    noted("Dataset", SessionParquet),
    noted("Converter", KjtConverter),
    noted(
        "Preprocessing",
        api.Preprocessing,
        fit=lambda self, feature, rows: setattr(self, "feature", feature),
        identity=lambda self: {{"feature": self.feature}},
        transform=lambda self, values, offsets: (values % 100, offsets),
    ),
    noted("Pooling", MeanPooling),
    noted("Sharding", api.Sharding, strategy=lambda self, tables, context: Strategy()),
    noted("Cache", api.Cache, check=lambda self, device: None),
    noted("Optimizer", api.Optimizer, update=update),
    noted(
        "Metric",
        api.Metric,
        start=lambda self: 0,
        update=lambda self, state, batch: state + len(batch.labels),
        results=lambda self, states: {{"seen": sum(states)}},
    ),
    noted("Model", api.Model, build=build),
    noted("Pipeline", Base),
    noted("Callback", api.Callback),
]
'''

REGISTRY = """
version: 1
dataset:
  use: order.dataset
  options:
    path: table
    test_path: table
    sparse: [seq_0_0, item_0]
    generate: {rows: 128, row_group_rows: 64}
converter: {use: order.converter}
preprocessing: [{use: order.preprocessing, features: ["*"]}]
pooling: [{use: order.pooling, features: [seq_0_0]}]
sharding: [{use: order.sharding, tables: ["t_*"]}]
cache: [{use: order.cache, tables: [t_item_0]}]
optimizers: [{use: order.optimizer, tables: [t_seq_0_0]}]
metrics: [{use: order.metric}]
pipeline: {use: order.pipeline}
callbacks: [{use: order.callback}]
model: {use: order.model}
training: {batch_size: 32, ranks: 1}
"""


def calls_of(command: str, folder: Path) -> list[str]:
    plugins = write_plugins(folder, PLUGINS.format(calls=CALLS, notes=folder / "notes"), "*PLUGINS")
    (folder / "registry.yaml").write_text(REGISTRY, encoding="utf-8")
    recd("--plugins-dir", plugins, command, "registry.yaml")
    return list(dict.fromkeys((folder / "notes").read_text(encoding="utf-8").splitlines()))


def test_a_run(cwd: Path) -> None:
    found = [call.partition(" ")[0] for call in calls_of("run", cwd)]
    assert found == [".".join(call) for call in CALLS]


def test_a_plan_is_made_on_the_meta_device(cwd: Path) -> None:
    found = calls_of("plan", cwd)
    assert "Sharding.rewrite meta" in found
    assert "Sharding.rewrite cpu" not in found
    of_training = ("Callback", "Pipeline", "TableStrategy.channels")
    assert not any(call.startswith(of_training) for call in found)
