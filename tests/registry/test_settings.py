"""Values and shardings that a command line sets in a registry file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from recd_plugins import RunConfig, load_registry
from recd_plugins.config.document import read_yaml
from recd_plugins.config.from_file import with_sharding
from recd_plugins.runtime.errors import RegistryError

REGISTRY = Path(__file__).parents[2] / "registry.yaml"


def with_settings(*settings: str) -> RunConfig:
    return load_registry(REGISTRY, settings=settings)


def test_values_of_any_section() -> None:
    registry = with_settings(
        "training.learning_rate=5e-2",
        "training.checkpoint.path=/tmp/there",
        "model.tables.t_*.num_embeddings=7",
        "sharding[0].use=torchrec.row_wise",
        "preprocessing[0].features=[seq_*, usr_0]",
        "ingestion.use=dsi.ray",
    )
    training = registry.training
    assert (training.learning_rate, training.checkpoint.path) == (0.05, "/tmp/there")
    assert training.checkpoint.keep == 2, "its neighbours stay"
    assert registry.model.tables["t_*"].num_embeddings == 7
    assert registry.sharding[0].plugin.name == "torchrec.row_wise"
    assert registry.sharding[0].patterns == ("t_*",)
    assert registry.preprocessing[0].patterns == ("seq_*", "usr_0")
    assert registry.ingestion is not None
    assert load_registry(REGISTRY).training.learning_rate == 0.1


@pytest.mark.parametrize(
    "section", ["ingestion", "model", "training.checkpoint", "training.schedule"]
)
def test_null_leaves_out_an_optional_section(tmp_path: Path, section: str) -> None:
    text = REGISTRY.read_text().replace(
        "  ranks: 2", "  ranks: 2\n  checkpoint: {path: there, every: 5}\n  schedule: {warmup: 5}"
    )
    (tmp_path / "registry.yaml").write_text(text)
    registry = load_registry(tmp_path / "registry.yaml", settings=[f"{section}=null"])
    training = registry.training
    assert (training.checkpoint.path is None) == (section == "training.checkpoint")
    assert (training.schedule is None) == (section == "training.schedule")
    assert registry.with_training({"steps": 3}).training.checkpoint == training.checkpoint


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("training.learning_rate", "this argument is not KEY=VALUE"),
        ("training..seed=3", "this argument is not KEY=VALUE"),
        ("training.lerning_rate=3", "unknown key. Did you mean 'learning_rate'?"),
        ("training.learning_rate=", "input should be a valid number, but the value is empty"),
        ("training.batch_size=[", "is not valid YAML"),
        ("training.checkpoint.path=!!python/name:os.system", "is not allowed. Write a plain value"),
        ("training[0]=3", "training is not a list in the file. Remove [0]"),
        (
            "sharding.use=torchrec.row_wise",
            "sharding is a list in the file. Add an item number, for example sharding[0]",
        ),
        ("sharding[1].use=torchrec.row_wise", "sharding has 1 items in the file"),
        ("model.embedding_dim.x=3", "model.embedding_dim is a single value"),
        ("sharding[0].use=torchrec.rowwise", "Did you mean 'torchrec.row_wise'?"),
    ],
)
def test_what_is_wrong_names_the_setting(setting: Any, message: str) -> None:
    with pytest.raises(RegistryError, match=re.escape(message)) as raised:
        with_settings(setting)
    (problem,) = raised.value.problems
    assert problem.path == str(setting), "a line of the file does not say it"
    assert problem.line == 0


FIRST = {"use": "a.first", "tables": ["t_1", "t_2"], "options": {"x": 1}}
OTHER = {"use": "a.other", "tables": ["t_2", "t_1"], "options": {"y": 2}, "enabled": False}
THIRD = {"use": "a.third", "tables": ["t_3"]}
REST = {"use": "a.chooser"}
NEW = {"use": "a.new", "tables": ["t_1", "t_2"], "options": {}}
ALL = {"use": "acme", "options": {"x": 1}}


@pytest.mark.parametrize(
    ("entries", "name", "expected"),
    [
        # Options are the defaults, or those of an entry for the same tables.
        ([FIRST, THIRD], "a.new", [NEW, THIRD]),
        ([FIRST, OTHER, THIRD], "a.other", [OTHER | {"enabled": True}, THIRD]),
        ([REST, OTHER], "a.new", [NEW | {"tables": ["*"]}]),
        # Choosers need no entry, and take the tables of the first one too.
        ([OTHER], "acme", [{"use": "acme"}]),
        ([FIRST, THIRD, ALL], "acme", [THIRD, ALL | {"tables": ["*"]}]),
        (
            [FIRST, THIRD, ALL | {"tables": ["t_4"]}],
            "acme",
            [THIRD, ALL | {"tables": ["t_1", "t_2", "t_4"]}],
        ),
        ([REST, THIRD, ALL | {"tables": ["t_4"]}], "acme", [THIRD, ALL | {"tables": ["*"]}]),
        ([], "a.other", None),
        ([OTHER], "a.other", None),
    ],
)
def test_the_enabled_entries(
    tmp_path: Path, entries: list[dict[str, Any]], name: str, expected: list[dict[str, Any]] | None
) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(f"version: 1\nsharding: {entries}\n".replace("False", "false"))
    if expected is None:
        with pytest.raises(RegistryError, match=r"that 'a\.other' can replace\. Add an entry"):
            with_sharding(read_yaml(path), name, chooses=False)
        return
    changed = with_sharding(read_yaml(path), name, chooses=name == "acme").data["sharding"]
    enabled = [each for each in changed if each.get("enabled", True)]
    assert [{"enabled": True} | each for each in enabled] == [
        {"enabled": True} | each for each in expected
    ]
