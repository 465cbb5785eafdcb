"""Tests see the plugins of this repository and no others that happen to be installed."""

import os
from pathlib import Path

import pytest

os.environ["RECD_NO_THIRD_PARTY"] = "1"


@pytest.fixture
def movielens() -> Path:
    """MovieLens-100K, which nobody may pass on: at RECD_MOVIELENS, or where its README puts it."""
    example = Path(__file__).parents[1] / "examples" / "movielens" / "data" / "ml-100k.inter"
    path = Path(os.environ.get("RECD_MOVIELENS", example))
    if not path.is_file():
        pytest.skip(f"{path} is missing; examples/movielens/README.md says how to get it")
    return path.resolve()
