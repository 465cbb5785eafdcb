import pytest
import torch
from tests.small_registry import write_registry

from recd_plugins import RunConfig, load_registry
from recd_plugins.config import device
from recd_plugins.config.device import choose_device
from recd_plugins.runtime.errors import SetupError


@pytest.fixture
def registry(tmp_path) -> RunConfig:
    return load_registry(write_registry(tmp_path, training={"ranks": 2, "device": "auto"}))


@pytest.fixture
def machine(monkeypatch):
    """Make this machine look as if it had so many CUDA devices, and this build of FBGEMM."""

    def machine(devices: int, *, fbgemm_has_cuda: bool = True) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: devices > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
        monkeypatch.setattr(device, "fbgemm_has_cuda", lambda: fbgemm_has_cuda)

    return machine


@pytest.mark.parametrize("wanted", ["auto", "cuda"])
def test_cuda_is_taken_where_all_is_there(registry, machine, capsys, wanted):
    machine(2)
    assert choose_device(registry.with_training({"device": wanted})) == "cuda"
    assert capsys.readouterr().err == ""


LACKS = [
    (0, True, "torch.cuda.is_available"),
    (2, False, "the CPU build of FBGEMM is installed"),
    (1, True, "2 ranks need 2 CUDA devices, and this machine has 1"),
]


@pytest.mark.parametrize(("devices", "fbgemm_has_cuda", "reason"), LACKS)
def test_the_reason_against_cuda_is_told(
    registry, machine, capsys, devices, fbgemm_has_cuda, reason
):
    machine(devices, fbgemm_has_cuda=fbgemm_has_cuda)
    assert choose_device(registry, verbose=devices == 0) == "cpu"
    line = capsys.readouterr().err
    assert line.startswith(f"training.device: auto selects the CPU, because {reason}")
    assert line.count("\n") == 1
    with pytest.raises(SetupError, match=rf"registry.yaml: training.device is cuda, but {reason}"):
        choose_device(registry.with_training({"device": "cuda"}))


@pytest.mark.parametrize("has_driver", [False, True])
def test_a_machine_without_a_gpu_needs_no_reason(
    registry, machine, capsys, monkeypatch, tmp_path, has_driver
):
    machine(0)
    monkeypatch.setattr(device, "_NVIDIA", tmp_path if has_driver else tmp_path / "absent")
    assert choose_device(registry) == "cpu"
    assert bool(capsys.readouterr().err) == has_driver


def test_torchrun_counts_the_ranks_of_this_machine(registry, machine, monkeypatch, capsys):
    for name, value in {"RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    machine(4)
    assert choose_device(registry) == "cuda"
    machine(3)
    assert choose_device(registry) == "cpu"
    assert capsys.readouterr().err == "", "rank 0 speaks for all"
