"""``recd bench trainer`` end to end, on a model of a few features."""

from dataclasses import asdict

import pytest
from click.testing import CliRunner
from tests.benchmarks.tiny import measured

from recd_plugin_recd.benchmarks.trainer import MODELS, plot
from recd_plugin_recd.benchmarks.trainer_ablation.figures import GOALS, Ablation
from recd_plugin_recd.benchmarks.trainer_ablation.variants import (
    CLUSTERED,
    DEDUP,
    DEDUP_EMB,
    PLUGIN_SHARDERS,
)
from recd_plugins.cli import main
from recd_plugins.testing.benchmark import Findings


@pytest.fixture(scope="module")
def ablation():
    return Ablation("rm1", measured("trainer", "_measure"))


def test_every_figure_is_there_and_losses_agree(ablation):
    figures = {figure.figure: figure for figure in ablation.figures()}
    names = ("speedup", "bound", "share_of_bound", "memory_with_2x_dim", "lookup_share")
    alone = ("speedup_plugin_sharders", "speedup_dedup_alone", "share_of_bound_dedup_alone")
    for name in names + alone:
        assert figures[f"rm1_{name}"].value > 0, name
    assert figures["rm1_speedup"].goal == GOALS["rm1"][0]
    assert figures["rm1_speedup"].runs == 2
    assert 0 < figures["rm1_loss_max_abs_diff"].value + 1e-12 < 1e-6
    assert len({len(ablation.measured[v.name].losses) for v in (CLUSTERED, DEDUP_EMB, DEDUP)}) == 1


def test_work_is_counted_on_equal_samples(ablation):
    figures = {figure.figure: figure.value for figure in ablation.figures()}
    assert 2 < figures["rm1_ids_ratio"] < 12
    assert ablation.measured[DEDUP.name].ids == ablation.measured[DEDUP_EMB.name].ids
    # Other kernels deduplicate nothing.
    plain = ablation.measured[PLUGIN_SHARDERS.name].ids
    assert plain == pytest.approx(ablation.measured[CLUSTERED.name].ids)
    assert figures["rm1_bytes_ratio"] > 1.5
    # What features send, on their own, is what the collectives were seen to send.
    clustered = ablation.measured[CLUSTERED.name]
    assert clustered.sent == pytest.approx(clustered.bytes_by_kind["all_to_all"], rel=0.1)


def test_pooling_unique_rows_takes_less_memory_than_pooling_all(ablation):
    unique, every = (ablation.measured[v.name] for v in (DEDUP, DEDUP_EMB))
    assert unique.peak_bytes < every.peak_bytes
    assert unique.static_bytes == every.static_bytes


def test_what_cannot_run_is_said(ablation):
    (note, bound) = ablation.notes()
    assert "TorchRec's index dedup does not run here: " in note
    assert "jagged_unique_indices" in note
    assert bound.startswith(f"rm1: bound {ablation.bound():.2f} from dedupe factors")


def test_the_shares_of_a_step_are_shares(ablation):
    figures = {figure.figure: figure.value for figure in ablation.figures()}
    for suffix in ("", "_after"):
        stages = ("lookup", "gemm", "all_to_all", "other")
        assert sum(figures[f"rm1_{s}_share{suffix}"] for s in stages) == pytest.approx(1)
    pooling = ablation.measured["baseline"].pooling
    assert all(0 < share <= 1 for share in pooling.values())


def test_plots_are_drawn_from_the_report(ablation, tmp_path):
    found = Findings(ablation.figures(), [ablation.time_table(), ablation.work_table()], [])
    paths = plot(asdict(found), tmp_path / "new")
    assert [path.name for path in paths] == ["figure_8.svg", "figure_9.svg"]
    assert all("+dedup compute" in path.read_text() for path in paths)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["convert", "--only", "rm1"], "No such option '--only'"),
        (["convert", "--device", "cpu"], "No such option '--device'"),
        (["convert", "--plot", "plots"], "No such option '--plot'"),
        (["trainer", "--device", "tpu"], "'tpu' is not one of 'cpu', 'cuda'"),
        (["trainer", "--only", "rm4"], f"--only rm4: the models are {', '.join(MODELS)}"),
        (["nothing"], "no benchmark is named nothing; there are: accuracy, "),
    ],
)
def test_an_option_that_a_benchmark_lacks_is_an_error(arguments, message):
    result = CliRunner().invoke(main, ["bench", *arguments])
    assert result.exit_code in (1, 2)
    assert message in result.stderr
