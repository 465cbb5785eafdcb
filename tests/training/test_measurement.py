from __future__ import annotations

import re
import time
from collections.abc import Iterator
from io import StringIO
from typing import Any

import pytest
import torch
from rich.console import Console
from tests.sharded import CPU, bags, shard
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins.config import TrainingSpec
from recd_plugins.data.stalls import Stalls
from recd_plugins.interfaces.batch import MakingTimes, ModelInput
from recd_plugins.interfaces.step_cost import STAGES, StageTimes, stage_of
from recd_plugins.runtime.launch import CUDA_BACKEND, launch
from recd_plugins.sharding.pipeline import build_train_pipeline
from recd_plugins.sharding.sharders import ExactEmbeddingBagCollectionSharder, fused_params
from recd_plugins.testing.gloo import run_on_ranks
from recd_plugins.training import progress_bar as module
from recd_plugins.training.measurement import Meter
from recd_plugins.training.optimizer import build_optimizer
from recd_plugins.training.progress_bar import progress_bar
from recd_plugins.training.step_profile import (
    PROFILED_STEP,
    Span,
    StepEvents,
    StepMemory,
    StepProfile,
    device_seconds,
    host_seconds,
    memory_of_step,
)

ROWS, DIM, BATCH, IDS = 1000, 32, 64, 20
# Long against the rest of these steps, also on a machine that does other work.
SLEEP = 0.3


class Model(nn.Module):
    def __init__(self, sleep: float) -> None:
        super().__init__()
        self.sleep = sleep
        self.bags = bags("f", rows=ROWS, dim=DIM)
        self.top = nn.Linear(DIM, 1)

    def forward(self, batch: ModelInput) -> tuple[Tensor, Tensor]:
        time.sleep(self.sleep)
        loss = self.top(self.bags(batch.sparse_features)["f"]).square().mean()
        return loss, loss.detach()


def batches() -> Iterator[ModelInput]:
    while True:
        ids, lengths = torch.randint(ROWS, (BATCH * IDS,)), torch.full((BATCH,), IDS)
        kjt = KeyedJaggedTensor(["f"], ids, lengths=lengths)
        yield ModelInput(torch.zeros(BATCH, 0), kjt, torch.zeros(BATCH))


def pipelined(rank: int, world_size: int, kind: str, slow: int) -> tuple[StageTimes, float]:
    training = TrainingSpec()
    sharders = [ExactEmbeddingBagCollectionSharder(fused_params(training))]
    dmp = shard(Model(SLEEP if rank == slow else 0.0), sharders, kind, CPU)
    optimizer = build_optimizer(dmp, training)
    pipeline = build_train_pipeline(dmp, optimizer, CPU)
    source = batches()
    profile = StepProfile(CPU, warmup=1)
    for _ in range(3):
        with profile.step():
            pipeline.progress(source)
    return profile.stages(), profile.step_seconds


def test_a_rank_waits_for_a_slower_one_in_the_all_to_all() -> None:
    slow, fast = run_on_ranks(pipelined, 2, "row_wise", 0)
    for stages, seconds in (slow, fast):
        assert stages.total == pytest.approx(seconds)
    assert slow[0].other > SLEEP / 2 > slow[0].all_to_all
    assert fast[0].all_to_all > SLEEP / 2 > fast[0].other


def seconds(**stages: float) -> dict[str, float]:
    return {stage: stages.get(stage, 0.0) for stage in STAGES}


def milliseconds(name: str, start: int, end: int, **attributes: Any) -> Span:
    return Span(name, start * 10**6, end * 10**6, **attributes)


def test_a_moment_belongs_to_the_innermost_stage() -> None:
    step = milliseconds(PROFILED_STEP, 0, 100)
    events = StepEvents(
        step,
        host=[
            milliseconds("All2All_Seq_Req_Wait", 10, 60),
            milliseconds("aten::copy_", 20, 30),
            milliseconds("aten::mm", 40, 50),
            milliseconds("## backward 1 ##", 70, 100, is_region=True),
            milliseconds("aten::copy_", 75, 80),
            milliseconds("aten::mm", 0, 100, thread=1),  # of another thread
        ],
        in_flight=[
            milliseconds("gloo:reduce", 74, 82, thread=7),
            milliseconds("gloo:all_reduce", 82, 90, thread=8),
        ],
    )
    assert host_seconds(events) == seconds(
        all_to_all=0.04, gemm=0.01, all_reduce=0.011, other=0.039
    )


def test_a_kernel_that_computes_hides_one_that_communicates() -> None:
    events = StepEvents(
        milliseconds(PROFILED_STEP, 0, 100),
        host=[
            milliseconds("[lookup]_[bags]_[table_wise]", 0, 5, is_region=True, operator=1),
            milliseconds("aten::index", 1, 2, operator=2),
            milliseconds("aten::mm", 6, 7, operator=3),
            milliseconds("c10d::alltoall_base_", 8, 9, operator=4),
        ],
        kernels=[
            milliseconds("elementwise_kernel", 10, 30, operator=2),
            milliseconds("ncclDevKernel_SendRecv", 20, 60, operator=4),
            milliseconds("sm80_xmma_gemm", 50, 70, operator=3),
            milliseconds("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 80, 120),
        ],
    )
    assert device_seconds(events) == pytest.approx(
        seconds(lookup=0.02, all_to_all=0.02, gemm=0.02, all_reduce=0.02, other=0.02)
    )


def test_memory_above_the_start() -> None:
    step = milliseconds(PROFILED_STEP, 100, 200)
    at = [(50, 999), (100, 100), (150, 300), (175, -300), (250, 10**6)]
    events = StepEvents(step, allocations=[(moment * 10**6, size) for moment, size in at])
    assert memory_of_step(events) == StepMemory(
        peak=400, mean=(50 * 100 + 25 * 400 + 25 * 100) / 100
    )


def test_stages_of_names() -> None:
    for name, stage in {
        "fbgemm::split_embedding_codegen_forward_cpu": "lookup",
        "torch::autograd::CppNode<SplitVBELookupFunction_rowwise_adagrad_Op_pt2>": "lookup",
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward": "gemm",
        "[output_dist_wait]_[bags]_[row_wise]": "all_to_all",
        "Variable_Batch_All2All_Pooled_ReqBackward": "all_to_all",
        "## wait_sparse_data_dist 3 ##": "all_to_all",
        "_c10d_functional::wait_tensor": "all_to_all",
        "torch::distributed::reducer::mul_out": "all_reduce",
        "c10d::allreduce_": "all_reduce",
        "c10d::reduce_": "all_reduce",
        "c10d::reduce_scatter_": "all_to_all",
        "autograd::engine::evaluate_function: _TierSendBackward": "all_to_all",
        "_TierLookup": "lookup",
        "aten::copy_": None,
        "aten::native_dropout": None,
        "## forward 7 ##": None,
    }.items():
        assert stage_of(name) == stage, name


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda() -> None:
    # Not here: torch's profiler sees no device in a process that has profiled the CPU alone.
    ((stages, step_seconds, peak),) = launch(profiled_products, 1, backend=CUDA_BACKEND)
    assert stages.total == pytest.approx(step_seconds)
    assert stages.gemm > stages.total / 2
    assert peak >= 4 * 4096**2


def profiled_products(rank: int, world_size: int) -> tuple[StageTimes, float, float]:
    device = torch.device("cuda", rank)
    x = torch.ones(4096, 4096, device=device)
    profile = StepProfile(device, warmup=2)
    for _ in range(6):
        with profile.step():
            for _ in range(20):
                x = x @ x / 4096
    return profile.stages(), profile.step_seconds, profile.memory().peak


@pytest.mark.parametrize(
    ("segments", "timed", "counted"), [([8], 3, True), ([7, 7], 2 + 7, True), ([4, 8], 8, False)]
)
def test_only_a_whole_segment_is_counted(segments, timed, counted):
    meter = Meter(torch.nn.Linear(1, 1), torch.device("cpu"))
    for steps in segments:
        for _ in range(steps):
            with meter.step():
                pass
        meter.ran_dry()
    assert len(meter.step_seconds()) == timed
    assert (meter.per_step() is not None) == counted


def test_the_live_line_fits_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = StringIO()
    screen = Console(file=drawn, force_terminal=True, width=80, color_system=None)
    monkeypatch.setattr(module, "error_console", lambda: screen)
    with progress_bar(0, "plugins", 1000, 30_000, samples=64) as advance:
        for step in range(2):
            advance(torch.tensor(0.47412))
            time.sleep(0.02 * step)
    said = r"plugins ╸ {15,}1002/30000 loss=0\.4741 [\d,]+ rows/s eta \d:\d\d:\d\d"
    assert re.search(said, drawn.getvalue())


def test_log_lines(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    stalls = Stalls(1, 4.0, {"fill": 1.0}, MakingTimes())
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    with progress_bar(0, "plugins", 10, 30, samples=64, waiting=lambda: stalls) as advance:
        for step in range(1, 11):
            now += 3
            advance(torch.tensor(1 / step))
            if step == 5:
                with advance.paused():
                    now += 1000
    lines = capfd.readouterr().err.splitlines()
    assert lines == [
        "plugins: step=14 of=30 loss=0.25 samples_per_second=21 eta_seconds=48 waiting=0.250",
        "plugins: step=18 of=30 loss=0.125 samples_per_second=21 eta_seconds=36 waiting=0.250",
        "plugins: step=20 of=30 loss=0.1 samples_per_second=21 eta_seconds=30 waiting=0.250",
    ]
