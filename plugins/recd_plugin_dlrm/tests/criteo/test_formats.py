"""The same rows in another format are the same batches."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from recd_plugin_dlrm.criteo.convert import ConvertOptions, convert
from recd_plugin_dlrm.criteo.days import DENSE, SPARSE, RawRows
from recd_plugin_dlrm.tests.criteo.criteo_cases import FORMATS, make, sample_rows, write_day
from recd_plugins.runtime.errors import DataError


def batches(path: Path, rank: int = 0, world_size: int = 1, **options: object):
    dataset = make(path, **options)
    dataset.prepare()
    return [
        rows.data
        for split in dataset.splits()
        for rows in dataset.reader(rank=rank, world_size=world_size, batch_size=7, split=split)
    ]


@pytest.mark.parametrize("categorical", ["hashed", "dictionary", "raw"])
@pytest.mark.parametrize("kaggle", [False, True])
def test_formats_give_equal_batches(write_days, kaggle, categorical):
    days = (250,) if kaggle else (83, 40, 100)
    folders = [write_days(each, *days, kaggle=kaggle) for each in FORMATS]
    found = [batches(folder, 1, 2, categorical=categorical) for folder in folders]
    assert len(found[0]) > 5
    assert all(each == found[0] for each in found)


def test_rows_are_what_was_written(tmp_path):
    ids = [f"{number:08x}" for number in range(2**32 - 26, 2**32)]
    first = ["1", "3", "-2", "", "0", *["7"] * 9, *ids]
    second = ["0", *[""] * 13, *[""] * 25, "FfFf"]
    text = "\t".join(first) + "\n" + "\t".join(second) + "\r\n"
    (tmp_path / "train.txt").write_bytes(text.encode())
    dataset = make(tmp_path, evaluate="nothing", buckets={"cat_25": 10, "*": 2**40})
    (rows,) = dataset.reader(rank=0, world_size=1, batch_size=2, split="train")
    assert rows.origins[0].path == str(tmp_path / "train.txt")
    one, two = rows.data.to_pylist()
    assert one == {
        "label": 1,
        "int_0": np.log(np.float32(4)),
        **dict.fromkeys(DENSE[1:4], 0),
        **{name: pytest.approx(math.log(8)) for name in DENSE[4:]},
        **{f"cat_{number}": 2**32 - 26 + number for number in range(25)},
        "cat_25": (2**32 - 1) % 10,
    }
    assert two == {"label": 0, **dict.fromkeys((*DENSE, *SPARSE), 0), "cat_25": 0xFFFF % 10}


def write_like_torchrec(folder: Path, name: str, rows: RawRows) -> None:
    """What ``BinaryCriteoUtils.tsv_to_npys`` writes; until 2024 ids were int32, which wraps."""
    dense = np.stack(rows.dense, axis=1).astype(np.int32)
    dense -= dense.min() - 2
    folder.mkdir(exist_ok=True)
    np.save(folder / f"{name}_dense.npy", np.log(dense, dtype=np.float32))
    np.save(folder / f"{name}_sparse.npy", np.stack(rows.sparse, axis=1).astype(np.int32))
    np.save(folder / f"{name}_labels.npy", rows.labels.astype(np.int32)[:, None])


def test_files_of_torchrec(tmp_path, write_days):
    expected = batches(write_days("tsv", 60, 30), categorical="raw")
    for number, rows in enumerate((60, 30)):
        write_like_torchrec(tmp_path / "npy", f"day_{number}", sample_rows(rows, number))
    found = batches(tmp_path / "npy", categorical="raw")
    for one, other in zip(found, expected, strict=True):
        assert one.select([*SPARSE, "label"]) == other.select([*SPARSE, "label"])
    raw = np.stack(sample_rows(60).dense, axis=1)
    first = np.stack([found[0][name].to_numpy() for name in DENSE], axis=1)
    assert np.array_equal(first, np.log((raw - raw.min() + 2)[:7], dtype=np.float32))


def test_dense_features_can_stay_as_they_are(write_days):
    (first, *_) = batches(write_days("tsv", 30, 30), dense="stored")
    for name, values in zip(DENSE, sample_rows(30).dense, strict=True):
        assert np.array_equal(first[name].to_numpy(), values[:7].astype(np.float32))


@pytest.mark.parametrize(
    ("word", "array", "message"),
    [
        ("dense", np.zeros((60, 12), np.float32), r"dense.npy: the array has shape \[60, 12\]"),
        ("dense", np.zeros((59, 13), np.int32), r"shape \[59, 13\]. .* shape \[60, 13\]"),
        ("labels", np.full((60, 1), 2), "train_labels.npy: label 2 is neither"),
    ],
)
def test_npy_files_that_do_not_fit(tmp_path, word, array, message):
    write_like_torchrec(tmp_path, "train", sample_rows(60))
    np.save(tmp_path / f"train_{word}.npy", array)
    with pytest.raises(DataError, match=message):
        batches(tmp_path)


def test_parquet_without_a_column(tmp_path):
    write_day(tmp_path, "train", "tsv", sample_rows(60))
    convert(ConvertOptions(tmp_path / "train", tmp_path / "new"))
    (path,) = (tmp_path / "new").rglob("*.parquet")
    pq.write_table(pq.ParquetFile(path).read().drop_columns(["cat_3"]), path)
    with pytest.raises(DataError, match="column 'cat_3' is missing"):
        batches(tmp_path / "new")


def test_compressed_files_are_not_shuffled(write_days):
    with pytest.raises(DataError, match="cannot be shuffled"):
        batches(write_days("gz", 60, 30), shuffle=True)


def test_a_file_that_is_replaced_is_noticed(write_days):
    folder = write_days("gz", 60, 30)
    dataset = make(folder)
    dataset.prepare()
    write_day(folder, "day_0", "gz", sample_rows(50, seed=7))
    with pytest.raises(DataError, match=r"day_0.*: the file was replaced"):
        list(dataset.reader(rank=0, world_size=1, batch_size=4, split="train"))
