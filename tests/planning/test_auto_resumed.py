"""A run that goes on with ``auto`` takes the entries that it was started with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.small_registry import SPARSE

from recd_plugins import RunConfig
from recd_plugins.interfaces.model_tables import tables_of
from recd_plugins.model.build import build_model
from recd_plugins.training.identity import identity_of, identity_text
from recd_plugins.training.sharded_model import resume_choice

SEQUENCES = ["t_seq_0_0", "t_seq_0_1"]
ROW_WISE = {"use": "torchrec.row_wise", "tables": ["t_usr_0"]}
CHOSEN = [
    {"use": "flexshard.joint", "tables": SEQUENCES, "options": {"coalesce": True}},
    {"use": "torchrec.planner", "tables": ["t_item_0"], "options": {"coalesce": True}},
]


def entries(registry: RunConfig) -> list[Any]:
    names = [table.name for table in tables_of(build_model(registry, registry.dataset.schema()))]
    return [
        (entry.plugin.name, entry.plugin.options, [n for n in names if entry.matches(n)])
        for entry in registry.sharding
    ]


def test_it_takes_what_it_started_with(make_registry, table: Path, tmp_path: Path, capsys) -> None:
    training = {"ranks": 2, "batch_size": 256, "checkpoint": {"path": str(tmp_path / "kept")}}
    started = make_registry(sharding=[ROW_WISE, *CHOSEN], training=training)

    def resume(*entries: Any, **sections: Any) -> RunConfig:
        sharding = [*entries, {"use": "auto"}]
        return resume_choice(make_registry(sharding=sharding, training=training, **sections))

    def searches_again(*entries: Any, **sections: Any) -> None:
        assert resume(*entries, **sections).sharding[-1].plugin.name == "auto"
        told = "'auto' searches again, because tables or plugins differ from those in"
        assert told in capsys.readouterr().err

    unchanged = resume(ROW_WISE)
    assert [entry.plugin.name for entry in unchanged.sharding] == ["torchrec.row_wise", "auto"]
    assert capsys.readouterr().err == "", "nothing to go on from"

    tables = tables_of(build_model(started, started.dataset.schema()))
    for step in (2, 4):
        (tmp_path / "kept" / f"step-{step:09}").mkdir(parents=True)
    whole, damaged = sorted((tmp_path / "kept").iterdir())
    (whole / "identity.json").write_text(identity_text(identity_of(started, tables)))
    (damaged / "identity.json").write_text("{")
    assert entries(resume(ROW_WISE)) == entries(started)
    assert capsys.readouterr().err == (
        f"'auto' reuses the sharding in {whole}: flexshard.joint, torchrec.planner\n"
    )

    text = (whole / "identity.json").read_text()
    missing = text.replace('"use": "torchrec.planner"', '"use": "acme.planner"')
    (whole / "identity.json").write_text(missing)
    searches_again(ROW_WISE)
    (whole / "identity.json").write_text(text)
    fewer = [name for name in SPARSE if name != "item_0"]
    dataset = {"use": "recd.session_parquet", "options": {"path": str(table), "sparse": fewer}}
    # What the checkpoint is not of is told with what it was, and not by a pattern of its entries.
    searches_again(ROW_WISE, dataset=dataset)
    other = {**ROW_WISE, "tables": ["t_usr_1"]}
    searches_again(other)
    searches_again(ROW_WISE, other)
