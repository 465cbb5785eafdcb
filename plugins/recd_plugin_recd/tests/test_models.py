"""``recd init``: a registry file that is valid, complete and never overwritten."""

from __future__ import annotations

import re

import numpy as np
import pytest
from ruamel.yaml import YAML
from tests.commands import recd, refusal

from recd_plugin_recd.models import rm_registry
from recd_plugins import load_registry
from recd_plugins.config.built_in_kinds import KINDS
from recd_plugins.config.schema import registry_spec
from recd_plugins.testing.gloo import run_on_ranks
from recd_plugins.training.trainer import Job, train

MODELS = ("papercal", "rm1", "rm2", "rm3")


@pytest.mark.parametrize("name", MODELS)
def test_the_file_is_valid_and_has_every_section(tmp_path, name):
    path = tmp_path / "new" / "registry.yaml"
    recd("init", name, path)
    recd("validate", path)
    text = path.read_text(encoding="utf-8")
    document = YAML(typ="safe").load(text)
    # Trainers do by themselves what these would.
    optional = ("ingestion", "optimizers", "metrics", "pipeline", "callbacks")
    sections = [name for name in registry_spec(KINDS).model_fields if name not in optional]
    assert list(document) == sections
    for section in ("dataset", "converter", "preprocessing", "pooling", "sharding", "model"):
        assert re.search(rf"^# [^\n]*\n{section}:", text, re.MULTILINE), f"{section}: no comment"
    assert max(map(len, text.splitlines())) <= 100
    assert list(path.parent.iterdir()) == [path]


def test_options_stand_in_the_file(tmp_path):
    path = tmp_path / "registry.yaml"
    sizes = ["--scale", 0.0625, "--rows", 999, "--batch-size", 8, "--ranks", 3]
    recd("init", "rm3", path, *sizes, "--data", tmp_path / "a: b")
    registry = load_registry(path)
    generate = registry.dataset.options.generate
    assert generate.model_dump() | {"files": 1} == {
        "shape": "rm3", "scale": 0.0625, "rows": 999, "layout": "clustered", "seed": 0,
        "row_group_rows": 2048, "files": 1,
    }  # fmt: skip
    assert registry.dataset.options.path.parent == tmp_path / "a: b"
    assert (registry.training.batch_size, registry.training.ranks) == (8, 3)
    assert registry.model.embedding_dim == 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("papercal", "--scale", 0.5), "--scale applies only to rm1"),
        (("rm1", "--scale", 0), "not in the range"),
        (("rm1", "--scale", 2), "not in the range"),
        (("rm1", "--rows", 511), "--rows 511 is too small for one batch"),
        (("rm4",), "rm4"),
    ],
)
def test_a_mistake_is_told_and_writes_nothing(tmp_path, arguments, message):
    name, *options = arguments
    assert message in refusal("init", name, tmp_path / "registry.yaml", *options, code=2)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "arguments", "changes"),
    [
        ("rm1", {}, {}),
        ("rm2", {}, {"pool_rows: unique": "pool_rows: all", "recd.ikjt": "recd.partial_ikjt"}),
        ("rm3", {"layout": "interleaved"}, {"optimizer: rowwise_adagrad": "optimizer: sgd"}),
    ],
)
def test_losses_are_those_of_stock_torchrec(tmp_path, name, arguments, changes):
    path = tmp_path / "registry.yaml"
    text = rm_registry(name, folder=tmp_path, scale=0.03, rows=384, batch_size=32, **arguments)
    for usual, other in {"  ranks: 2": "  ranks: 2\n  steps: 6", **changes}.items():
        assert usual in text
        text = text.replace(usual, other)
    path.write_text(text, encoding="utf-8")
    load_registry(path).dataset.prepare()
    baseline, _ = run_on_ranks(train, 2, Job(path, "baseline"))
    plugins, _ = run_on_ranks(train, 2, Job(path, "plugins"))
    assert len(baseline.losses) == len(plugins.losses) == 6
    assert baseline.losses[-1] < baseline.losses[0] - 0.005, "nothing was learned"
    np.testing.assert_allclose(plugins.losses, baseline.losses, rtol=0, atol=1e-5)
