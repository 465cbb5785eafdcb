"""Imports without collections of garbage, which are there again afterwards."""

from __future__ import annotations

import gc
from contextlib import suppress

from recd_plugins.imports import without_collections


def test_collections_are_back_after_imports() -> None:
    with suppress(ImportError), without_collections():
        with without_collections():
            assert not gc.isenabled()
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled()
