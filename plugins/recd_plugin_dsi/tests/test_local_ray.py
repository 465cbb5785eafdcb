"""A Ray that a run starts for itself ends with it, however that ends."""

import os
import signal
import sys

import psutil
import pytest
from tests import forked

from recd_plugin_dsi.tests.numbered import registry
from recd_plugins.data.loader import build_dataloader
from recd_plugins.runtime.errors import SetupError

OPTIONS = {"cpus": 4, "cpus_per_reader": 0.5, "readers": 1, "memory": "20MB", "start_timeout": 250}

_TRAINER = """
import signal, time
from recd_plugin_dsi.tests.numbered import registry
from recd_plugin_dsi.tests.test_local_ray import OPTIONS
from recd_plugins.data.loader import build_dataloader

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
loader = build_dataloader(registry(OPTIONS, seconds=0.05), 0, 1)
batches = iter(loader)
next(batches)
print("reading", flush=True)
while True:  # a signal that comes as a sleep begins is heard when it ends
    time.sleep(0.1)
"""


@pytest.fixture(autouse=True)
def _no_other_ray(monkeypatch):
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        monkeypatch.delenv(name, raising=False)


def below(pid):
    return psutil.Process(pid).children(recursive=True)


def assert_ended(processes):
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert not alive


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_nothing_is_left_of_a_trainer_that_is_ended(how):
    trainer = forked.Program([sys.executable, "-c", _TRAINER])
    try:
        assert trainer.first_line() == "reading\n"
        started = below(trainer.pid)
        names = " ".join(" ".join(process.cmdline()) for process in started)
        for part in ("recd_plugin_dsi.feeder", "recd_plugin_dsi.cluster", "raylet", "ray::"):
            assert part in names
        trainer.send_signal(how)
        trainer.wait(timeout=120)
        assert_ended(started)
    finally:
        trainer.kill_all()


@pytest.mark.parametrize("lost", ["raylet", "recd_plugin_dsi.cluster"])
def test_a_lost_cluster_is_an_error(lost):
    before = set(below(os.getpid()))
    with build_dataloader(registry(OPTIONS, seconds=0.05), 0, 1) as loader:
        batches = iter(loader)
        next(batches)
        started = set(below(os.getpid())) - before
        (process,) = [each for each in started if lost in (each.name(), *each.cmdline())]
        folder = loader._feed._cluster.folder
        assert folder.stat().st_mode & 0o777 == 0o700, "what is in it is open to all"
        process.kill()
        said = r"rank 0 lost its connection to Ray at .*--resume"
        with pytest.raises(SetupError, match=said) as caught:
            list(batches)
        assert lost == "raylet" or f"process {process.pid} ended" in str(caught.value)
    assert_ended(started)
    assert not folder.exists()
