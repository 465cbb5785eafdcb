"""Arrays of checkpoints come back as they were written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from recd_plugins.training.checkpoint_files import (
    FITTED,
    MANIFEST,
    manifest_text,
    read_arrays,
    write_arrays,
)


@pytest.mark.parametrize("shape", [(), (1,), (0,), (2, 3)])
def test_shapes(tmp_path: Path, shape: tuple[int, ...]) -> None:
    array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    manifest = manifest_text({FITTED: write_arrays(tmp_path / FITTED, {"a b": array.T})})
    (tmp_path / MANIFEST).write_text(manifest, encoding="utf-8")
    (found,) = read_arrays(tmp_path, FITTED).items()
    assert found[0] == "a b"
    assert found[1].shape == array.T.shape
    assert np.array_equal(found[1], array.T)
