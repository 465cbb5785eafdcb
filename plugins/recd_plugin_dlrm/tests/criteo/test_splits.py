"""Which files are which days, and which rows of them are trained on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from recd_plugin_dlrm.criteo.days import find_days
from recd_plugin_dlrm.tests.criteo.criteo_cases import make
from recd_plugins.interfaces import Split
from recd_plugins.runtime.errors import DataError


def rows_of(path: Path, split: Split, **options: object) -> list[tuple[str, int]]:
    dataset = make(path, **options)
    reader = dataset.reader(rank=0, world_size=1, batch_size=1, split=split)
    origins = [rows.origins[0] for rows in reader]
    return [(Path(each.path).name.partition(".")[0], each.first_row) for each in origins]


@pytest.mark.parametrize(
    ("evaluate", "first", "stop"), [("test", 11, 21), ("validation", 0, 11), ("last_day", 0, 21)]
)
def test_the_last_day_is_held_out(write_days, evaluate, first, stop):
    """Its first half is for validation, and has the row more, as in torchrec."""
    folder = write_days("tsv", 20, 5, 21)
    train = [*(("day_0", row) for row in range(20)), *(("day_1", row) for row in range(5))]
    assert rows_of(folder, "train", evaluate=evaluate) == train
    held_out = [("day_2", row) for row in range(first, stop)]
    assert rows_of(folder, "test", evaluate=evaluate) == held_out


def test_of_one_file_the_last_seventh(write_days):
    """DLRM cuts 45 rows into 7, 7, 7, 6, 6, 6, 6: as ``np.array_split`` does."""
    path = write_days("tsv", 45, kaggle=True)
    sevenths = np.array_split(np.arange(45), 7)
    first, second = np.array_split(sevenths[-1], 2)
    assert [row for _, row in rows_of(path, "train")] == np.concatenate(sevenths[:-1]).tolist()
    assert [row for _, row in rows_of(path, "test")] == second.tolist()
    validation = rows_of(path / "train", "test", evaluate="validation")
    assert [row for _, row in validation] == first.tolist()
    assert len(rows_of(path, "train", parts=2)) == 23


def test_everything_can_be_trained_on(write_days):
    folder = write_days("tsv", 20, 5)
    assert len(rows_of(folder, "train", evaluate="nothing")) == 25
    dataset = make(folder, evaluate="nothing")
    assert dataset.splits() == ("train",)
    with pytest.raises(DataError, match=r"no test split, because option 'evaluate' is 'nothing'"):
        dataset.reader(rank=0, world_size=1, batch_size=1, split="test")


def test_other_names_of_one_file(tmp_path):
    for name, kind in (("clicks.tsv.gz", "TSV, gzip"), ("part.parquet", "Parquet")):
        (tmp_path / name).touch()
        (day,) = find_days(tmp_path / name)
        assert (day.name, day.number, day.format) == ("train", None, kind)
    # Parquet of any names is one table.
    (tmp_path / "clicks.tsv.gz").unlink()
    (day,) = find_days(tmp_path)
    assert day.path == tmp_path


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "the folder has no Criteo data"),
        (["train.txt"], "train.txt: the file has no rows"),
        (["day_0", "day_2"], "one file per day .* has 'day_0', 'day_2'"),
        (["day_0", "day_0.gz"], "has 'day_0', 'day_0.gz'"),
        (["day_0", "train.txt"], "set option 'path' to a single file"),
        (["train.tsv", "train.txt"], "set option 'path' to a single file"),
    ],
)
def test_folders_that_are_refused(tmp_path, names, message):
    for name in names:
        (tmp_path / name).touch()
    with pytest.raises(DataError, match=message):
        make(tmp_path).prepare()


def test_no_such_place(tmp_path):
    with pytest.raises(DataError, match="data: the file or folder does not exist"):
        make(tmp_path / "data").prepare()
    (tmp_path / "day_0_dense.npy").touch()
    with pytest.raises(DataError, match="one of three npy files of a day"):
        make(tmp_path / "day_0_dense.npy").prepare()
