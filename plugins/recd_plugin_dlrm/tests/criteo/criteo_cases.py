from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from recd_plugin_dlrm.criteo.dataset import Criteo
from recd_plugin_dlrm.criteo.days import RawRows
from recd_plugin_dlrm.criteo.sample import Sampler, write_npy, write_tsv

#: Every way in which rows can lie.
FORMATS = ("tsv", "gz", "zst", "parquet", "npy")
UNIT_ROWS = 16

WriteDays = Callable[..., Path]


def write_day(folder: Path, name: str, file_format: str, rows: RawRows) -> None:
    if file_format == "npy":
        write_npy(folder, name, rows)
    else:
        suffix = {"tsv": "", "parquet": ""}.get(file_format, f".{file_format}")
        target = folder / "tsv" if file_format == "parquet" else folder
        write_tsv(target / f"{name}{suffix}", [rows])


def sample_rows(num_rows: int, seed: int = 0) -> RawRows:
    return Sampler(np.random.default_rng(seed)).rows(num_rows)


def make(path: Path, **options: object) -> Criteo:
    return Criteo(Criteo.Options.model_validate({"path": path, **options}))
