"""``recd convert-layout``: the same table in another layout, whole or not at all."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tests.commands import recd, refusal

from recd_plugin_recd.papercal_table import TableOptions, provenance, write_table
from recd_plugins.data.list_dict import is_list_dict

IDS = pa.list_(pa.int64())


convert, refused = (partial(command, "convert-layout") for command in (recd, refusal))


def rows_of(path: Path) -> pa.Table:
    table = pq.read_table(path)
    fields = [field.with_nullable(True).remove_metadata() for field in table.schema]
    plain = [field.with_type(IDS) if pa.types.is_list(field.type) else field for field in fields]
    return table.cast(pa.schema(plain)).combine_chunks()


def files(folder: Path) -> list[Path]:
    return sorted(path.relative_to(folder) for path in folder.rglob("*"))


def table(path: Path, rows: int = 12) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    ids = pa.array([[i // 4, 7, 8] for i in range(rows)], IDS)
    columns = {"session_id": np.arange(rows) // 4, "ts": np.arange(rows), "history": ids}
    pq.write_table(pa.table(columns), path)
    return path


def test_there_and_back_is_the_same_table(tmp_path):
    papercal, there, back = (tmp_path / name for name in ("papercal", "there", "back"))
    write_table(papercal, TableOptions(rows=1000, row_group_rows=250, files=2))
    said = convert(papercal, there, "--layout", "list_dict", "--json", tmp_path / "report.json")
    convert(there, back, "--layout", "list")
    assert rows_of(back).equals(rows_of(papercal))
    assert files(back) == files(there) == files(papercal)
    assert provenance(back) == provenance(there) == provenance(papercal)

    schema = pq.read_schema(there / "part-00001.parquet")
    assert is_list_dict(schema.field("usr_0"))
    assert schema.field("item_0").type.value_type == pa.int64(), "repeats too little"
    assert "item_0" in said
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["rows"] == 1000
    assert report["layouts"]["item_0"] == "list"
    assert report["target_bytes"] == sum(file.stat().st_size for file in there.iterdir())


def test_all_files_of_hive_folders_agree_even_where_the_first_is_empty(tmp_path):
    table(tmp_path / "source" / "day=01" / "a.parquet", rows=0)
    table(tmp_path / "source" / "day=02" / "b.parquet")
    convert(tmp_path / "source", tmp_path / "target", "--layout", "list_dict")
    assert files(tmp_path / "target") == files(tmp_path / "source")
    for file in (tmp_path / "target").rglob("*.parquet"):
        assert is_list_dict(pq.read_schema(file).field("history"))


def test_what_is_there_is_kept_unless_forced(tmp_path):
    source = table(tmp_path / "source" / "part.parquet").parent
    target = table(tmp_path / "target" / "old.parquet").parent
    assert "--force" in refused(source, target, "--layout", "list")
    assert [path.name for path in target.iterdir()] == ["old.parquet"]
    convert(source, target, "--layout", "list", "--force")
    assert [path.name for path in target.iterdir()] == ["part.parquet"]
    assert len(list(tmp_path.iterdir())) == 2, "nothing is left behind"

    other = tmp_path / "letters"
    other.mkdir()
    (other / "dear.txt").write_text("Dear")
    assert "letters" in refused(source, other, "--layout", "list", "--force")
    assert (other / "dear.txt").exists()
    assert "must not be the same as SRC" in refused(source, source / "new", "--layout", "list")


def test_a_damaged_file_is_named_and_nothing_is_written(tmp_path):
    path = table(tmp_path / "table.parquet", rows=4000)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    message = refused(path, tmp_path / "target.parquet", "--layout", "list")
    assert "table.parquet" in message
    assert [each.name for each in tmp_path.iterdir()] == ["table.parquet"]
