"""Tests see the plugins of this repository and no others that happen to be installed."""

import gc
import os
from collections.abc import Generator, Iterator
from functools import cache
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
from hypothesis import is_hypothesis_test, settings
from tests.absent import ABSENT, PRESENT, uses_what_is_absent
from tests.covering import by_night, cells_of_today

os.environ["RECD_ONLY"] = ",".join(sorted(PRESENT))
if ABSENT:  # what says that it is installed may still be there
    os.environ["RECD_WITHOUT"] = ",".join(sorted(ABSENT))
# Before torch is imported, here and in programs: there are as many workers as cores, and threads of
# OpenMP that wait for one another take the time of others.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # as recd does, before torch is imported
# Until all tests are collected: what they import stays.
gc.disable()
# No test is timed: a kernel is compiled first, or another process has the cores.
# Examples that failed are kept in .hypothesis, and are tried first in the next run.
settings.register_profile("untimed", deadline=None, print_blob=True)
settings.register_profile("nightly", settings.get_profile("untimed"))
settings.load_profile("untimed")
#: What a night draws for one example of a day.
_NIGHTLY = 20

#: Left out by ``make test-fast``: runs from start to end, and every cell of a matrix. What they put
#: together has tests of its own, which stay. Of a file all tests, or those whose names start so.
_SLOW = (
    # Runs of the command, of examples, pages and benchmarks; kills and what goes on after them.
    "benchmarks/test_*",
    "data/test_page_checksums.py::test_a_flip_anywhere",
    "data/test_workers.py",
    "plugins/*/tests/commands/test_plan_*",
    "cli/test_fault.py",
    "cli/test_run*",
    "data/storage/test_loader_from_s3.py",
    "data/storage/test_training_from_s3.py",
    "recd_plugin_scars/tests/runtime/test_mapped_file.py",
    "distributed/test_launch.py::test_torchrun",
    "docs/test_analyze_page.py",
    "docs/test_batch_page.py",
    "docs/test_call_order.py",
    "docs/test_dataset_wrapper_page.py",
    "recd_plugin_flexshard/tests/test_page.py",
    "recd_plugin_scars/tests/test_hot_batches_section.py",
    "docs/test_how_to_pages.py",
    "docs/test_plugin_pages.py",
    "docs/test_program_pages.py",
    "docs/test_site.py",
    "recd_plugin_scars/tests/test_page.py",
    "recd_plugin_dlrm/tests/test_trace_pages.py",
    "docs/test_trainer_page.py",
    "examples/*",
    "planning/test_planner.py::test_the_plan_is_the_same_in_every_process",
    "planning/test_stage_times.py",
    "planning/test_work.py",
    "plugins/*/tests/test_*run.py",
    "recd_plugin_flexshard/tests/test_checkpoints.py",
    "recd_plugin_recd/tests/analyze/test_analyze.py",
    "recd_plugin_recd/tests/cluster/test_cluster.py",
    "recd_plugin_recd/tests/cluster/test_restart.py",
    "recd_plugin_recd/tests/models/test_training.py",
    "recd_plugin_flexshard/tests/test_prediction.py",
    "recd_plugin_recd/tests/layout/test_convert_layout.py::test_torch_is_not",
    "recd_plugin_recd/tests/logs/test_commands.py::test_torch_is_not",
    "recd_plugin_recd/tests/test_generate.py::test_memory_does_not_grow",
    "recd_plugin_scars/tests/runtime/test_mover.py::test_no_process_hangs",
    "test_absence.py",
    "test_preloaded.py",
    "testing/test_ingestion_contract.py",
    "test_third_party_*.py",
    "recd_plugin_scars/tests/report/test_cached_run.py",
    "training/test_checkpoint.py",
    "training/test_finite.py",
    "model/test_dcn_run.py",
    "model/test_plugin.py::test_its_tables",
    "model/test_plugin.py::test_a_run_goes_on",
    "model/test_plugin.py::test_it_trains",
    "planning/test_auto.py::test_a_third_party",
    "planning/test_auto.py::test_it_leaves_no_trace",
    "planning/test_auto.py::test_its_lines",
    "planning/test_auto.py::test_nothing_by_hand",
    "recd_plugin_flexshard/tests/planning/test_report.py::test_the_plot",
    "recd_plugin_recd/tests/logs/test_samples.py::test_rows_come_back",
    "test_upstream_noise.py::test_tables",
    "training/test_cluster.py::test_a_run_on_several",
    "training/test_evaluation.py::test_every_row_is_scored_once[2]",
    "training/test_optimizer_entries.py::test_parity",
    "training/test_pipeline_plugin.py",
    "recd_plugin_flexshard/tests/report/test_tiers.py",
    # Bad inputs of every kind, and every option with every value.
    "fuzz/*",
    "recd_plugin_recd/tests/logs/test_damage.py",
    "training/test_checkpoint_flips.py",
    "registry/test_nasty_values.py",
    # Matrices of plans, optimizers, numbers of ranks and of datasets.
    "distributed/*/test_parity.py",
    "recd_plugin_flexshard/tests/runtime/test_parity.py",
    "recd_plugin_scars/tests/runtime/test_coalesced.py",
    "distributed/coalesced/test_modules.py",
    "recd_plugin_scars/tests/runtime/test_matrix.py",
    "recd_plugin_scars/tests/runtime/test_state.py",
    "distributed/test_dedup_costs.py",
    "distributed/test_drop_in.py",
    "drop_in/matrix/test_matrix.py",
    "distributed/test_other_modules.py",
    "distributed/test_parity.py",
    "distributed/test_pooling_parity.py",
    "distributed/test_portable_kernels.py",
    "distributed/test_torchrec_oracle.py",
    "recd_plugin_flexshard/tests/runtime/test_checkpoints.py",
    "recd_plugin_flexshard/tests/runtime/test_retier.py",
    "recd_plugin_flexshard/tests/runtime/test_sharded.py",
    "recd_plugin_flexshard/tests/runtime/test_split.py",
    "planning/test_study.py",
    "recd_plugin_flexshard/tests/planning/test_joint.py",
    "recd_plugin_flexshard/tests/planning/test_simulate.py",
    "recd_plugin_flexshard/tests/planning/test_traffic.py",
    "recd_plugin_dlrm/tests/criteo/test_contract.py",
    "recd_plugin_recd/tests/preprocessing/test_exactness.py",
    "recd_plugin_flexshard/tests/runtime/test_torchrec_oracle.py",
    "recd_plugin_scars/tests/test_hot_batches.py",
    "recd_plugin_scars/tests/test_window_reader.py::test_goes_on_at_every",
    "recd_plugin_profiles/tests/test_profile.py::test_the_example_of_the_page",
    "recd_plugin_scoring/tests/test_predict.py",
    "testing/test_built_in_plugins.py",
    "training/test_checkpoint_placement.py",
    "training/test_lookahead.py",
    # Ray starts dozens of processes.
    "recd_plugin_dsi/tests/test_local_ray.py",
    "recd_plugin_dsi/tests/test_ray_ingestion.py",
)
#: Left to ``make test-nightly``, written as above: runs whose parts have slow tests of the day
#: besides, and those that differ from one of the day in a value.
_BY_NIGHT = (
    # Runs of plans that tests of ranks, in tests/runtime of the plugin, have in every combination.
    "recd_plugin_flexshard/tests/test_checkpoints.py",
    "recd_plugin_flexshard/tests/test_run.py::test_training_stays_what_it_was[rowwise_adagrad]",
    "recd_plugin_flexshard/tests/test_tiers_run.py",
    "recd_plugin_recd/tests/models/test_training.py::test_losses_are_those_of_stock_torchrec[rm1]",
    "recd_plugin_scars/tests/report/test_cached_run.py",
    "recd_plugin_scars/tests/test_hot_batches_run.py::test_both_sides",
    # Of two axes, by day the cells in which each value is.
    "planning/test_work.py::test_ids_and_bytes_are_those_of_a_run[recd.kjt-false]",
    "planning/test_work.py::test_ids_and_bytes_are_those_of_a_run[recd.ikjt-true]",
    "recd_plugin_flexshard/tests/runtime/test_retier.py::test_checkpoints_in_between[plain]",
    "recd_plugin_flexshard/tests/runtime/test_retier.py::test_evaluation_in_between[plain]",
    "training/test_checkpoint_placement.py::test_replicated_and_row_wise[torchrec.row_wise-sgd]",
    "training/test_checkpoint_placement.py::test_replicated_and_row_wise[torchrec.data_parallel-row",
    # Other ways to the same end.
    "cli/test_run.py::test_shardings_side_by_side",
    "planning/test_stage_times.py::test_a_calibration_run",
    "recd_plugin_dsi/tests/test_local_ray.py::test_a_lost_cluster_is_an_error[raylet]",
    "recd_plugin_dsi/tests/test_local_ray.py::test_nothing_is_left_of_a_trainer_that_is_ended[2]",
    "recd_plugin_dsi/tests/test_ray_ingestion.py::test_a_feed_has_the_readers_of_the_one_before",
    "recd_plugin_dsi/tests/test_ray_ingestion.py::test_goes_on_elsewhere",
    "recd_plugin_flexshard/tests/commands/test_plan_tiers.py::test_this_machine_is_measured",
)
#: One after the other, and first: they count or kill readers of Ray on the whole machine.
_RAY = ("recd_plugin_dsi/tests/*", "examples/test_ray_readers.py")
#: On one worker, too: a benchmark runs once for all tests that look at its report.
_BENCHMARKS = ("benchmarks/test_*",)

# Processes of ranks, of readers and of programs are forked from a server that has imported all that
# any of them needs, once.
forkserver.set_forkserver_preload(["tests.fork_imports"])
forkserver.set_forkserver_preload = lambda modules_names: None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests of a file share what it makes, and some those of several: one worker has them."""
    from xdist.scheduler import LoadFileScheduling

    class BySharing(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            for together in (_RAY, _BENCHMARKS):
                if any(map(Path(file).match, together)):
                    return together[0]
            return file

    return BySharing(config, log)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files of which no test would be left are not imported."""
    if collection_path.suffix != ".py":
        return None
    if ABSENT and uses_what_is_absent(collection_path.read_text(encoding="utf-8")):
        return True
    return (
        config.option.markexpr == "not slow" and "" in _tests_of(collection_path, _SLOW)
    ) or None


def pytest_report_header() -> str | None:
    """That tests are missing, where some are."""
    return f"left out: tests that use {', '.join(sorted(ABSENT))}" if ABSENT else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _leave_out_cells(config, items)
    if not by_night():
        _leave_out(config, items, {item for item in items if _is_of(item, _BY_NIGHT)})
    files = {item.path for item in items}
    on_ray = {file for file in files if any(map(file.match, _RAY))}
    slow = {item for item in items if _is_of(item, _SLOW)}
    for item in slow:
        item.add_marker(pytest.mark.slow)
    # What takes longest first, so that no worker has it left when the others are done.
    items.sort(key=lambda item: (item.path not in on_ray, item not in slow))
    if by_night():
        tests = {getattr(item, "function", None) for item in items}
        for test in filter(is_hypothesis_test, tests):
            _draw_more(test)


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, Any, Any]:
    """pytest-xdist sends UTF-8 alone, and names of files that are none are printed in tests."""
    return _sendable((yield))


def _sendable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_sendable(key): _sendable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_sendable, value))
    return value


def pytest_collection_finish() -> None:
    # Thousands of tests, and what they import, stay: no collection of garbage looks at them again.
    gc.collect()
    gc.freeze()
    gc.enable()


def _leave_out_cells(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of each test with parameters, keep the cells of today."""
    matrices: dict[Any, dict[tuple[str, ...], pytest.Item]] = {}
    for item in items:
        if callspec := getattr(item, "callspec", None):
            test = (item.parent, getattr(item, "originalname", item.name))
            matrices.setdefault(test, {})[tuple(map(repr, callspec.params.values()))] = item
    for matrix in matrices.values():
        chosen = set(cells_of_today(list(matrix)))
        _leave_out(config, items, {item for cell, item in matrix.items() if cell not in chosen})


def _leave_out(config: pytest.Config, items: list[pytest.Item], some: set[pytest.Item]) -> None:
    if some:
        config.hook.pytest_deselected(items=list(some))
        items[:] = [item for item in items if item not in some]


def _is_of(item: pytest.Item, patterns: tuple[str, ...]) -> bool:
    return item.name.startswith(_tests_of(item.path, patterns))


@cache
def _tests_of(file: Path, patterns: tuple[str, ...]) -> tuple[str, ...]:
    """What the names of tests of a file start with."""
    parts = [pattern.partition("::") for pattern in patterns]
    return tuple(tests for files, _, tests in parts if file.match(files))


def _draw_more(test: Any) -> None:
    """More examples in a property test, and others each time, whatever its settings say."""
    # Where hypothesis keeps what @settings said; there is no other way to it.
    of_test = getattr(test, "_hypothesis_internal_use_settings", None) or settings()
    test._hypothesis_internal_use_settings = settings(
        of_test, max_examples=of_test.max_examples * _NIGHTLY, derandomize=False
    )


@pytest.fixture
def movielens() -> Path:
    """MovieLens-100K, which nobody may pass on: at RECD_MOVIELENS, or where its README puts it."""
    example = Path(__file__).parent / "examples" / "movielens" / "data" / "ml-100k.inter"
    path = Path(os.environ.get("RECD_MOVIELENS", example))
    if not path.is_file():
        pytest.skip(f"{path} is missing; examples/movielens/README.md says how to get it")
    return path.resolve()


@pytest.fixture(scope="session", autouse=True)
def _what_is_noted_is_not_the_users(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Counts of rows go into a cache, here and in processes that tests start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        # Here, not in the first test that needs it: before Python 3.13 the server looks for what it
        # is to import from the folder that it is started in, and finding nothing says nothing.
        forkserver.ensure_running()
        yield
