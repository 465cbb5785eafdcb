"""Tests see the plugins of this repository and no others that happen to be installed."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from recd_plugin_recd.cluster import embedded

os.environ["RECD_NO_THIRD_PARTY"] = "1"
# No test is timed: a kernel is compiled first, or another process has the cores.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture
def movielens() -> Path:
    """MovieLens-100K, which nobody may pass on: at RECD_MOVIELENS, or where its README puts it."""
    example = Path(__file__).parents[1] / "examples" / "movielens" / "data" / "ml-100k.inter"
    path = Path(os.environ.get("RECD_MOVIELENS", example))
    if not path.is_file():
        pytest.skip(f"{path} is missing; examples/movielens/README.md says how to get it")
    return path.resolve()


@pytest.fixture(scope="session", autouse=True)
def _what_is_noted_is_not_the_users(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Counts of rows go into a cache, here and in processes that tests start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def _a_command_starts_small() -> Iterator[None]:
    """``recd cluster`` counts what its process took before; here thousands of tests have run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(embedded, "resident", lambda: 300_000_000)
        yield
