from __future__ import annotations

import pytest

from recd_plugin_dlrm.tests.criteo.criteo_cases import FORMATS, make
from recd_plugins.testing.contracts import DatasetContract


class TestTerabyte(DatasetContract):
    @pytest.fixture(params=FORMATS)
    def plugin(self, request, write_days):
        return make(write_days(request.param, 37, 21, 40), prefetch=0)


class TestHalfOfTheLastDay(DatasetContract):
    split = "test"

    @pytest.fixture
    def plugin(self, write_days):
        return make(write_days("gz", 20, 91), categorical="dictionary")


class TestShuffled(DatasetContract):
    @pytest.fixture(params=["tsv", "parquet"])
    def plugin(self, request, write_days):
        return make(write_days(request.param, 70, 30), shuffle=True, evaluate="nothing")

    def test_starts_again_after_the_end(self, dataset):
        pytest.skip("other rows fill no batch in another epoch")
