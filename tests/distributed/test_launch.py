from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.forked import Program
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from recd_plugin_flexshard.runtime import tier_groups
from recd_plugin_tuning.collectives import node_groups
from recd_plugins.runtime.errors import PluginError, Problem, RecdError, RegistryError, SetupError
from recd_plugins.runtime.launch import RankError, Ranks, launch, torchrun_rank
from recd_plugins.runtime.machine import threads_of_a_rank
from recd_plugins.sharding.overlap import DeferredAllReduce

ROOT = Path(__file__).parents[2]


def process_id(rank: int, world_size: int) -> int:
    return os.getpid()


def total(rank: int, world_size: int, start: float) -> torch.Tensor:
    value = torch.tensor(start + rank)
    dist.all_reduce(value)
    return value


def environment(rank: int, world_size: int, names: list[str]) -> list[str | None]:
    return [os.environ.get(name) for name in names]


def threads(rank: int, world_size: int) -> int:
    return torch.get_num_threads()


def refuse_registry() -> None:
    raise RegistryError([Problem("registry.yaml", 3, "cache", "the reason")])


KILL = partial(signal.raise_signal, signal.SIGKILL)


def fail_on_rank_1(rank: int, world_size: int, fails: Exception | Callable[[], object]) -> None:
    if rank == 1:
        if isinstance(fails, Exception):
            raise fails
        fails()
    dist.barrier()


def note_pid_and_sleep(rank: int, world_size: int, folder: str) -> None:
    (Path(folder) / str(rank)).write_text(str(os.getpid()))
    time.sleep(60)


def test_results_come_back_by_rank_as_tensors() -> None:
    assert [value.item() for value in launch(total, 2, 1.0)] == [3.0, 3.0]


def test_environment_is_that_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RECD_TEST_SETTING", "from the parent")
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "RECD_TEST_SETTING"]
    assert launch(environment, 4, names, local_world_size=2) == [
        ["0", "4", "0", "2", "from the parent"],
        ["1", "4", "1", "2", "from the parent"],
        ["2", "4", "0", "2", "from the parent"],
        ["3", "4", "1", "2", "from the parent"],
    ]


def test_ranks_share_the_cores_and_have_one_thread_at_least(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cores = len(os.sched_getaffinity(0))
    for no_number in ("", "x", "0"):
        monkeypatch.setenv("OMP_NUM_THREADS", no_number)
        assert [threads_of_a_rank(ranks) for ranks in (1, 1000)] == [cores, 1]
    assert launch(threads, 2) == [max(1, cores // 2)] * 2


def test_an_exception_names_the_rank_and_carries_its_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("recd_plugins.runtime.launch._GRACE_SECONDS", 0.1)
    with pytest.raises(
        RankError, match=r"(?s)rank 1 failed.*fail_on_rank_1.*ValueError: the reason"
    ) as caught:
        launch(fail_on_rank_1, 2, ValueError("the reason"))
    what = r"ValueError: the reason \(test_launch\.py:\d+\), on rank 1"
    assert re.fullmatch(what, caught.value.what)


@pytest.mark.parametrize(
    ("fails", "error", "message"),
    [
        (PluginError("acme: the reason"), PluginError, "^on rank 1: acme: the reason$"),
        (refuse_registry, RecdError, r"^registry.yaml:3 cache: the reason$"),
        (KILL, SetupError, "rank 1 was killed by SIGKILL, .* ran out of memory"),
        (os.abort, SetupError, r"rank 1 was killed by SIGABRT after .* len\(reader\)"),
        (partial(os._exit, 3), SetupError, "rank 1 exited with code 3"),
    ],
    ids=["plugin", "registry", "kill", "abort", "exit"],
)
def test_failures_of_one_rank_end_all(fails: Any, error: type[Exception], message: str) -> None:
    with Ranks(2) as ranks:
        pids = ranks.run(process_id)
        with pytest.raises(error, match=message):
            ranks.run(fail_on_rank_1, fails)
        assert not ranks.alive
        assert not any(_runs(pid) for pid in pids)


def test_a_dead_rank_is_the_cause_when_its_peers_complain() -> None:
    with pytest.raises(SetupError, match="rank 1 was killed"):
        launch(fail_on_rank_1, 4, KILL)


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGKILL])
def test_ranks_end_with_their_parent(signal_number: signal.Signals, tmp_path: Path) -> None:
    script = tmp_path / "main.py"
    script.write_text(
        "import signal, sys\n"
        "from tests.distributed.test_launch import launch, note_pid_and_sleep\n"
        "if __name__ == '__main__':\n"
        # A shell's background jobs ignore it.
        "    signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "    launch(note_pid_and_sleep, 2, sys.argv[1])\n"
    )
    parent = Program(
        [sys.executable, script, tmp_path], env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    try:
        notes = [tmp_path / str(rank) for rank in range(2)]
        assert _until(lambda: all(note.exists() and note.read_text() for note in notes))
        pids = [int(note.read_text()) for note in notes]
        parent.send_signal(signal_number)
        parent.wait(timeout=200)
        assert _until(lambda: not any(_runs(pid) for pid in pids))
    finally:
        parent.kill_all()


def test_torchrun_ranks_join(tmp_path: Path) -> None:
    script = tmp_path / "main.py"
    script.write_text(
        "import torch, torch.distributed as dist\n"
        "from recd_plugins.runtime.launch import join_torchrun, torchrun_rank\n"
        "with join_torchrun() as (rank, world_size):\n"
        "    value = torch.tensor(rank + 1)\n"
        "    dist.all_reduce(value)\n"
        "    print(f'<{torchrun_rank()}/{rank} of {world_size}: {value.item()}>', flush=True)\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, str(script)], capture_output=True, text=True, timeout=100, check=True
    )
    assert sorted(re.findall("<.*?>", done.stdout)) == ["<0/0 of 2: 3>", "<1/1 of 2: 3>"]


def _until(condition) -> bool:
    for _ in range(300):
        if condition():
            return True
        time.sleep(0.1)
    return False


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_half_an_environment_of_torchrun_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SetupError, match="RANK is '0' but WORLD_SIZE is not set"):
        torchrun_rank()


TIMEOUT = timedelta(seconds=77)


def timeouts(rank: int, world_size: int) -> set[timedelta]:
    tiers = tier_groups()
    late = DeferredAllReduce.of(DistributedDataParallel(nn.Linear(1, 1)))
    groups = [tiers.cold, tiers.hot, tiers.flex, tiers.flex_gradients, late._group]
    with node_groups() as nodes:
        groups += [nodes.everyone, nodes.node, nodes.across]
        backends = [group._get_backend(torch.device("cpu")) for group in groups]
        return {backend.options._timeout for backend in backends}


def test_the_timeout_of_the_trainer_holds() -> None:
    assert launch(timeouts, 1, timeout=TIMEOUT) == [{TIMEOUT}]


def late_of_some_ranks(rank: int, world_size: int) -> bool:
    groups = [dist.new_group([other]) for other in range(world_size)]
    wrapped = DistributedDataParallel(nn.Linear(1, 1), process_group=groups[rank])
    return DeferredAllReduce.of(wrapped) is not None


def test_ranks_that_train_apart_make_no_groups_without_the_others() -> None:
    assert launch(late_of_some_ranks, 2) == [False, False]
