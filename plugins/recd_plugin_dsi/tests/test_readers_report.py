"""What is said of readers, from what was measured."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from recd_plugin_dsi.readers_report import ReaderPlan, Reading, Training, render
from recd_plugins.interfaces.batch import MakingTimes


def plan(*, making=0.3, reader_cpu=0.0, training=0.1, trainer_cpu=0.1, arrival=0.0, **options):
    times = MakingTimes(fill=making, transfer=arrival, arrival=arrival)
    options = {"target": 0.05, "batch_size": 8, "ranks": 1} | options
    return ReaderPlan(
        Reading(times, reader_cpu, batch_bytes=1000.0),
        Training(training, trainer_cpu, 0.0),
        **{"cores": 2} | options,
    )


def test_readers_that_wait_need_no_cores():
    found = plan()
    assert (found.readers, found.cores_suffice, found.reader_cores) == (3, True, 0.0)
    assert "training.workers: 3" in found.advice()


def test_a_machine_without_cores_for_them():
    """0.3 s of a processor for a batch of 0.1 s of training: three cores, and one is left."""
    found = plan(reader_cpu=0.3)
    assert plan(reader_cpu=0.05).cores_suffice
    assert not plan(reader_cpu=0.05, ranks=2).cores_suffice
    assert (found.readers, found.cores_suffice) == (3, False)
    assert found.reader_cores == pytest.approx(3)
    assert "lacks cores for them" in found.advice()
    assert "dsi.ray" in found.advice()


def test_no_reader_is_needed_where_reading_is_quick():
    found = plan(making=0.001)
    assert found.readers == 0
    assert "no reader is needed" in found.advice()


def test_unpacking_that_takes_too_long():
    found = plan(making=0.1, arrival=0.05)
    assert found.readers is None
    assert "no number of readers" in found.advice()
    assert found.as_json()["readers"] is None


def test_json_and_table():
    found = plan(reader_cpu=0.3, ranks=2)
    report = found.as_json()
    assert (report["readers_per_rank"], report["readers"]) == (3, 6)
    assert report["reader"]["fill_seconds"] == 0.3
    out = StringIO()
    Console(width=100, file=out).print(render(found))
    assert "* 3" in out.getvalue()
