"""A model of a third party, in registry files and in training."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests import commands

from recd_plugins import load_registry
from recd_plugins.planning.study import with_plugins
from recd_plugins.runtime.errors import RankError, RecdError, RegistryError, SetupError
from recd_plugins.testing.gloo import run_on_ranks
from recd_plugins.training.result import Result
from recd_plugins.training.session import session
from recd_plugins.training.trained import unchecked_model
from recd_plugins.training.trainer import Job, train

PLUGINS = Path(__file__).parent / "plugins"
recd = partial(commands.recd, "--plugins-dir", PLUGINS)
REGISTRY = """
version: 1
dataset:
  use: recd.session_parquet
  options:
    path: {folder}/table
    sparse: [seq_0_0, usr_0, item_0]
    generate: {{rows: 1024, row_group_rows: 128}}
converter: {{use: recd.ikjt}}
preprocessing:
  - {{use: recd.sigrid_hash, features: ["*"], options: {{buckets: 100}}}}
pooling:
  - {{use: recd.attention, features: [seq_0_0], options: {{heads: 2}}}}
sharding:
  - {{use: torchrec.row_wise, tables: [ids_of_seq_0_0]}}
  - {{use: torchrec.data_parallel, tables: [ids_of_usr_0]}}
model: {{use: test.tower, options: {{dim: 8}}}}
training: {{batch_size: 32, learning_rate: 0.1, ranks: 2, evaluate: false}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tower")
    load_registry(write(folder), plugins_dir=PLUGINS).dataset.prepare()
    return folder


def write(folder: Path, *changes: tuple[str, str]) -> Path:
    text = REGISTRY.format(folder=folder)
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path = folder / "registry.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def refused(folder: Path, *changes: tuple[str, str]) -> str:
    with pytest.raises(RegistryError) as caught:
        load_registry(write(folder, *changes), plugins_dir=PLUGINS)
    return str(caught.value)


def trained(path: Path, side: Any = "plugins", ranks: int = 2, **overrides: Any) -> Result:
    return run_on_ranks(train, ranks, Job(path, side, PLUGINS, overrides))[0]


MODEL = "model: {use: test.tower, options: {dim: 8}}"


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("{use: test.towr}", "registry.yaml:17 model.use: no model plugin is named 'test.towr"),
        ("{use: test.tower, options: {dm: 8}}", "unknown option of 'test.tower'. Did you mean"),
        ("{use: test.tower, options: {dim: 6}}", "registry.yaml:17 model.options.dim: "),
        ("{use: test.tower, embedding_dim: 4}", "model.embedding_dim: unknown key. Use one of"),
        ("{options: {dim: 8}}", "model.use: this required key is missing"),
        ("{architecture: tower}", "model.architecture: input should be 'dlrm' or 'dcn'"),
        ("{use: recd.ikjt}", "recd.ikjt' is a converter plugin. Move this entry to the section"),
    ],
)
def test_a_wrong_section_is_refused(folder: Path, written: str, message: str) -> None:
    assert message in refused(folder, (MODEL, f"model: {written}"))


def test_commands_show_it(folder: Path) -> None:
    assert "test.tower" in recd("plugins")
    assert "7 entries, ok" in recd("validate", write(folder))
    schema = json.loads(recd("schema"))
    assert "test.tower" in schema["$defs"]["model_entry"]["properties"]["use"]["enum"]
    assert schema["$defs"]["model.test.tower"]["properties"]["dim"]["multipleOf"] == 4
    either = schema["properties"]["model"]["anyOf"]
    assert {"$ref": "#/$defs/ModelSpec"} in either


@pytest.mark.parametrize("options", ["{}", "{one_table: true}"])
def test_managed_collision_as_torchrec_documents_it(
    folder: Path, tmp_path: Path, options: str
) -> None:
    text = REGISTRY.format(folder=folder)
    parts = text[text.index("preprocessing:") : text.index("training:")]
    path = write(
        folder,
        (parts, f"model: {{use: test.zch, options: {options}}}\n"),
        ("recd.ikjt", "recd.kjt"),
        ("evaluate", f"epochs: 6, checkpoint: {{path: {tmp_path}}}, evaluate"),
    )
    losses = trained(path, steps=60).losses
    assert sum(losses[-8:]) < 0.95 * sum(losses[:8])
    resumed = trained(path, steps=70)
    assert resumed.losses[:60] == losses
    assert len(resumed.losses) == 70


def test_it_trains_as_under_stock_torchrec(folder: Path) -> None:
    path = write(folder)
    plugins, stock = trained(path), trained(path, "baseline")
    assert len(plugins.losses) == 16
    assert plugins.losses[-1] != plugins.losses[0]
    assert plugins.losses == pytest.approx(stock.losses, abs=1e-6)


def test_weights_that_differ_by_rank_are_those_of_rank_0(folder: Path) -> None:
    found = trained(write(folder, ("dim: 8", "dim: 8, fault: other_weights")), steps=2)
    assert found.losses == trained(write(folder), steps=2).losses


NOISE = ("dim: 8", "dim: 8, noise: true")


def test_what_it_draws_is_alike_on_both_sides(folder: Path) -> None:
    path = write(folder, NOISE)
    plugins, stock = trained(path), trained(path, "baseline")
    assert plugins.losses == pytest.approx(stock.losses, abs=1e-6)
    assert plugins.losses[:4] != trained(write(folder), steps=4).losses


def test_a_run_that_goes_on_has_what_each_rank_had_of_its_own(folder: Path, tmp_path: Path) -> None:
    table = ("sparse: [", f"test_path: {folder}/table\n    sparse: [")
    path = write(folder, NOISE, table, ("evaluate: false", "validation: {every: 3}"))
    whole = trained(path, steps=8)
    kept = {"path": str(tmp_path), "every": 4}
    assert trained(path, steps=4, checkpoint=kept).losses == whole.losses[:4]
    resumed = trained(path, steps=8, checkpoint=kept)
    assert resumed.first_step == 4
    assert resumed.losses == whole.losses
    assert resumed.test == whole.test
    scored = trained(path, ranks=1, steps=8, checkpoint=kept).test
    assert scored.log_loss == pytest.approx(whole.test.log_loss, abs=1e-6)


@pytest.mark.parametrize(
    "change",
    [
        ("model:", "cache: [{use: scars.cache, tables: ['*item_0'], options: {rows: 10}}]\nmodel:"),
        ("torchrec.row_wise", "flexshard.two_tier"),
    ],
    ids=["caches", "tiers"],
)
def test_its_tables_take_caches_and_tiers(folder: Path, change: tuple[str, str]) -> None:
    plain = trained(write(folder), steps=6)
    assert trained(write(folder, change), steps=6).losses == pytest.approx(plain.losses, abs=1e-6)


def test_a_run_goes_on_with_the_same_model_alone(folder: Path, tmp_path: Path) -> None:
    checkpoint = {"path": str(tmp_path / "checkpoints"), "every": 3}
    whole = trained(write(folder), steps=8)

    def run(path: Path, steps: int, **options: Any) -> Result:
        overrides = {"steps": steps, "checkpoint": checkpoint}
        with session(Job(path, plugins_dir=PLUGINS, overrides=overrides), **options) as trainer:
            return trainer.train("plugins")

    run(write(folder), 5)
    with pytest.raises(RecdError, match=r"model\[0\].options.rows was 100 and is now 200"):
        run(write(folder, ("dim: 8", "dim: 8, rows: 200")), 8, resume=True)
    with pytest.raises(RecdError, match=r"model\[0\]\.use was .test\.tower. and is now not set"):
        run(write(folder, (MODEL, "model: {}"), ("ids_of_", "t_")), 8, resume=True)
    assert run(write(folder), 8, resume=True).losses == whole.losses


def test_it_is_whole_wherever_its_tables_were(folder: Path, tmp_path: Path) -> None:
    trained(write(folder), steps=2, checkpoint={"path": str(tmp_path), "every": 2})
    registry = load_registry(write(folder), plugins_dir=PLUGINS)
    model = unchecked_model(registry, tmp_path / "step-000000002")
    assert "bags.embedding_bags.ids_of_usr_0.weight" in model.state_dict()


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("fails", r"no weights.*test.tower' failed in build \(.*tower.py:\d+"),
        ("no_logits", "the model's logits are NaN in 32 of 32 rows"),
        ("wrong_width", r"mat1 and mat2.*failed in forward \(.*tower.py:\d+"),
        ("extra_state", "the model has extra state 'top._extra_state"),
        ("mixes_copies", "tables 'ids_of_usr_0' are replicated on every rank, but the other"),
    ],
)
def test_a_fault_names_it(folder: Path, fault: str, message: str) -> None:
    with pytest.raises((RecdError, RankError)) as caught:
        trained(write(folder, ("dim: 8", f"dim: 8, fault: {fault}")), ranks=1, steps=1)
    assert re.search(message, str(caught.value), re.DOTALL)


def planned(folder: Path, *changes: tuple[str, str]) -> Any:
    figures = folder / "plan.json"
    recd("plan", write(folder, *changes), "--topology", "zionex-a100-40g", "--json", figures)
    plan = json.loads(figures.read_text())
    names = {table["name"] for table in plan["plugins"]["tables"]}
    assert names == {"ids_of_seq_0_0", "ids_of_usr_0", "ids_of_item_0"}
    return plan


def test_a_plan_counts_it(folder: Path) -> None:
    planned(folder, ("dim: 8", "dim: 8, rows: 400000000"), ("data_parallel", "row_wise"))


def test_a_profile_is_of_its_tables(folder: Path) -> None:
    output, figures = folder / "profile.parquet", folder / "profile.json"
    recd("profile", "registry", write(folder), "--output", output, "--json", figures)
    assert "ids_of_item_0" in figures.read_text()


def test_a_plan_has_tables_by_name(folder: Path) -> None:
    path = write(folder, ("dim: 8", "dim: 8, fault: one_name"))
    message = r"several modules have tables with the same name: 'ids_of_\w+"
    with pytest.raises(SetupError, match=message):
        with_plugins(load_registry(path, plugins_dir=PLUGINS))


def test_a_plan_of_tables_that_torchrecs_own_sharder_takes(folder: Path) -> None:
    plan = planned(
        folder,
        ("dim: 8", "dim: 8, fault: torchrecs_sharder"),
        ("  - {use: torchrec.data_parallel, tables: [ids_of_usr_0]}\n", ""),
    )
    assert plan["plain"] is None, "stock sharders take no such module"
    assert "type FeatureProcessedEmbeddingBagCollection" in plan["plain_problem"]
