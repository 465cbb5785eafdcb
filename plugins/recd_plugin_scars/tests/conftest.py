from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests import sharded

from recd_plugin_flexshard.tests.conftest import table

__all__ = ["one_rank", "table"]


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    with sharded.one_rank():
        yield
