"""``recd trace profile`` and ``generate``: sources, files and what is said of wrong ones."""

from __future__ import annotations

import gzip
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from tests.commands import invoke, recd

from recd_plugin_dlrm.trace import profile
from recd_plugin_dlrm.trace.generator import profile_ids
from recd_plugin_dlrm.trace.profile import TraceProfile, read_profile, write_profile

pytestmark = pytest.mark.usefixtures("cwd")


done = partial(recd, "trace")


def failed(*arguments: object) -> str:
    result = invoke("trace", *arguments)
    assert result.exit_code != 0
    return " ".join(result.output.split())


def write_ids(path: Path, ids: Any) -> None:
    path.write_text("".join(f"{each}\n" for each in ids))


def registry(cwd: Path, **options: Any) -> None:
    given = {"rows": 3000, "dense": 1, "sparse": {"item": 50, "user": 9}, **options}
    (cwd / "registry.yaml").write_text(
        "version: 1\n"
        f"dataset: {{use: dlrm.random, options: {json.dumps(given)}}}\n"
        "converter: {use: recd.kjt}\n"
        "preprocessing:\n"
        "  - {use: recd.sigrid_hash, features: [item], options: {buckets: 7}}\n"
        "training: {batch_size: 100}\n"
    )


def test_a_text_file_is_profiled_and_drawn_again(cwd: Path) -> None:
    write_ids(cwd / "ids.txt", np.random.default_rng(0).integers(0, 50, 20_000))
    assert "20,000" in done("profile", "ids.txt", "-o", "p.parquet")
    original = read_profile(cwd / "p.parquet").tables["t_id"]
    assert (original.accesses, len(original.ids), original.new_share) == (20_000, 50, 0.0025)
    assert 24 <= (original.median_distance or 0) <= 27
    assert original.hit_rates(original.cache_sizes())[-1] == pytest.approx(0.5, abs=0.02)

    done("generate", "p.parquet", "-o", "s.txt")
    drawn = np.loadtxt(cwd / "s.txt", dtype=np.int64)
    assert len(drawn) == 20_000
    assert len(np.unique(drawn)) == 50
    found, sizes = profile_ids(drawn), original.cache_sizes()
    assert np.abs(found.hit_rates(sizes) - original.hit_rates(sizes)).max() < 0.02


def test_columns_are_tables_and_gzip_is_read_and_written(cwd: Path) -> None:
    random = np.random.default_rng(0)
    users, items = random.integers(-9, 9, 3000), random.integers(0, 2**62, 3000)
    with gzip.open(cwd / "ids.txt.gz", "wt") as file:
        file.writelines(f"  {u}\t{i}\n\n" for u, i in zip(users, items, strict=True))
    done("profile", "ids.txt.gz", "--columns", "user,item", "-o", "p.parquet")
    found = read_profile(cwd / "p.parquet")
    assert list(found.tables) == ["t_user", "t_item"]
    for table, ids in (("t_user", users), ("t_item", items)):
        expected = profile_ids(ids)
        assert found.tables[table].ids.tolist() == expected.ids.tolist()
        assert found.tables[table].counts.tolist() == expected.counts.tolist()
        assert found.tables[table].rows == 3000
    done("generate", "p.parquet", "--accesses", 500, "-o", "s.txt.gz", "--min-new", 0, "--seed", 4)
    with gzip.open(cwd / "s.txt.gz", "rt") as file:
        lines = file.read().splitlines()
    assert len(lines) == 500
    assert set(np.loadtxt(lines, dtype=np.int64)[:, 0]) <= set(users)
    done("profile", "s.txt.gz", "--columns", "user,item", "-o", "again.parquet")
    done("profile", "ids.txt.gz", "--columns", "user,item", "-o", "one.parquet", "--tables", "t_u*")
    assert list(read_profile(cwd / "one.parquet").tables) == ["t_user"]


def test_traces_are_written_as_parquet_in_pieces(
    cwd: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_ids(cwd / "ids.txt", [1, 2, 3, 1, 2, 3, 3, 2, 1] * 100)
    done("profile", "ids.txt", "-o", "p.parquet")
    done("generate", "p.parquet", "-o", "whole.parquet", "--accesses", 1000)
    monkeypatch.setattr(profile, "_ROWS", 64)
    done("generate", "p.parquet", "-o", "pieces.parquet", "--accesses", 1000)
    whole, pieces = (pq.read_table(cwd / f"{name}.parquet") for name in ("whole", "pieces"))
    assert whole.equals(pieces)
    assert whole.num_rows == 1000
    made = json.loads(whole.schema.metadata[profile.PROVENANCE])
    assert (made["source"], made["accesses"], made["seed"]) == ("ids.txt", 1000, 0)


def test_pieces_of_text_do_not_change_ids(cwd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = np.random.default_rng(0).integers(0, 10**6, 998)
    (cwd / "ids.txt").write_text(" ".join(map(str, numbers)))
    (cwd / "pairs.txt").write_text("\n".join(f"{a} {b}" for a, b in numbers.reshape(-1, 2)))
    for size in (7, 1 << 20):
        monkeypatch.setattr(profile, "_LINES", size)
        for name, columns in (("ids", []), ("pairs", ["a", "b"])):
            read = np.concatenate(list(profile.read_text(cwd / f"{name}.txt", columns)))
            assert read.ravel().tolist() == numbers.tolist()


def test_a_registry_is_profiled_as_tables_see_it(cwd: Path) -> None:
    registry(cwd, num_indices_per_lookup=3)
    done("profile", "registry.yaml", "-o", "p.parquet")
    tables = read_profile(cwd / "p.parquet").tables
    assert list(tables) == ["t_item", "t_user"]
    assert len(tables["t_item"].ids) == 7
    assert max(tables["t_item"].ids) < 7
    assert (tables["t_user"].accesses, tables["t_user"].rows) == (9000, 3000)
    some = ["--rows", 200, "--tables", "t_user", "--force"]
    done("profile", "registry.yaml", "-o", "p.parquet", *some)
    tables = read_profile(cwd / "p.parquet").tables
    assert (list(tables), tables["t_user"].accesses) == (["t_user"], 600)


def test_lists_that_rows_share_count_in_every_row(cwd: Path) -> None:
    """Dictionary-encoded lists: what a table without deduplication is looked up with."""
    recd("generate", "plain", "--rows", 512)
    recd("convert-layout", "plain", "packed", "--layout", "list_dict")
    profiles = []
    for name in ("plain", "packed"):
        (cwd / f"{name}.yaml").write_text(
            f"version: 1\ndataset: {{use: recd.session_parquet, options: {{path: {name}, "
            "sparse: [usr_1, seq_0_0]}}\nconverter: {use: recd.kjt}\n"
        )
        done("profile", f"{name}.yaml", "-o", f"{name}.parquet")
        profiles.append(read_profile(cwd / f"{name}.parquet"))
    for name, one in profiles[0].tables.items():
        assert one.ids.tolist() == profiles[1].tables[name].ids.tolist()
        assert one.counts.tolist() == profiles[1].tables[name].counts.tolist()


@pytest.mark.parametrize(
    ("text", "columns", "said"),
    [
        ("1\n2 x3\n", [], "cannot be read as integer ids: Failed to parse string: 'x3'"),
        ("7\n9223372036854775808\n", [], "Failed to parse string: '9223372036854775808'"),
        (" \n\n", [], "the dataset has no rows"),
        ("1 2\n3 4\n5\n6 7\n", ["--columns", "a,b"], "4 lines contain 7 ids in total"),
        ("1", ["--columns", "a,,b"], "a name is empty"),
    ],
)
def test_wrong_text(cwd: Path, text: str, columns: list[str], said: str) -> None:
    (cwd / "ids.txt").write_text(text)
    assert said in failed("profile", "ids.txt", "-o", "p.parquet", *columns)
    assert [path.name for path in cwd.iterdir()] == ["ids.txt"]


def test_files_that_are_no_profile_are_refused(cwd: Path) -> None:
    write_ids(cwd / "ids.txt", [1, 2, 1])
    done("profile", "ids.txt", "-o", "p.parquet")
    assert "already exists" in failed("profile", "ids.txt", "-o", "p.parquet")
    assert "no table" in failed("generate", "p.parquet", "-o", "s.txt", "--tables", "t_x")
    assert "not in the range" in failed("generate", "p.parquet", "-o", "s.txt", "--min-new", 1)
    assert "ids.txt" in failed("generate", "ids.txt", "-o", "s.txt")
    table = pq.read_table(cwd / "p.parquet")
    pq.write_table(table.replace_schema_metadata({}), "other.parquet")
    assert "not a trace profile of version 1" in failed("generate", "other.parquet", "-o", "s")
    assert not (cwd / "s").exists()
    registry(cwd)
    said = failed("profile", "registry.yaml", "-o", "q", "--columns", "a")
    assert "--columns works only with text files" in said


def test_tables_of_other_lengths_need_a_number_of_accesses(cwd: Path) -> None:
    made = [profile_ids(np.array(ids), name) for ids, name in (([1, 1], "a"), ([1, 2, 1], "b"))]
    write_profile(TraceProfile({each.table: each for each in made}, "a test"), cwd / "p.parquet")
    assert "Set --accesses" in failed("generate", "p.parquet", "-o", "s.txt")
    done("generate", "p.parquet", "-o", "s.txt", "--tables", "t_b")
    assert len((cwd / "s.txt").read_text().split()) == 3
