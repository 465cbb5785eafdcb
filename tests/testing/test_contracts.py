"""The contract suites notice what breaks a contract. That they pass is tested with each plugin."""

import os
import sys

import pytest
from tests import forked
from tests.testing import faulty_plugins

from recd_plugins.interfaces import Sharding
from recd_plugins.testing.contracts import ShardingContract

# Faults of a plugin of a kind, and a test that must fail for each.
FAULTS = {
    ("preprocessing", "Change"): {
        "drops_empty_rows": "test_transform_returns_rows",
        "looks_at_other_rows": "test_a_row_depends_on_itself_alone",
        "works_in_place": "test_leaves_tensors_alone",
        "gives_floats": "test_transform_returns_rows",
        "cuts_under_scope_id": "test_scope_id_looks_at_nothing_but_an_id",
        "keeps_the_last": "test_kept_lengths_are_those_of_rows_cut_at_their_end",
        "doubles_numbers": "test_numbers_have_a_width_and_64_bits",
        "takes_nothing": "test_takes_ids_or_numbers",
        "numbers_ids_as_they_come": "test_transform_keeps_no_state",
        "gives_more_than_it_says": "test_transform_returns_rows",
        "returns_one_memory": "test_leaves_tensors_alone",
        "is_known_by_its_place": "test_identity_is_of_what_it_transforms_by",
    },
    ("fitted", "AtMost"): {
        "draws": "test_fit_takes_rows_in_pieces_of_any_size[ids-4]",
        "is_known_by_nothing": "test_identity_tells_what_was_fitted",
        "is_known_by_its_rows": "test_identity_tells_what_was_fitted",
        "counts_pieces": "test_fit_takes_rows_in_pieces_of_any_size[ids-1]",
        "clears_rows": "test_fit_looks_at_rows_and_leaves_them",
        "asks_for_no_rows": "test_fit_looks_at_rows_and_leaves_them",
        "counts_what_it_fitted": "test_nothing_is_fitted_before_fit",
        "takes_the_name_fitted": "test_nothing_is_fitted_before_fit",
    },
    ("pooling", "Sum"): {
        "gives_ones_for_empty": "test_gives_one_vector_a_row",
        "centers_the_batch": "test_a_row_depends_on_itself_alone",
        "detaches": "test_gradients_reach_embeddings_and_parameters",
        "pools_groups_by_modules_of_the_first": "test_groups_are_pooled_as_one_by_one",
        "pools_groups_on_the_cpu": "test_mixes_no_devices",
    },
    ("target_pooling", "SumForTarget"): {},
    ("scaled", "Scaled"): {},
    ("dataset", "Numbers"): {
        "uneven": "test_every_rank_takes_as_many_steps[2]",
        "repeats": "test_no_row_comes_twice_or_is_lost[2]",
        "loses": "test_no_row_comes_twice_or_is_lost[1]",
        "counts_ahead": "test_goes_on_where_a_state_was_taken[1]",
        "forgets_at_other_ranks": "test_state_loads_at_another_number_of_ranks[2-1]",
        "wrong_origin": "test_no_row_comes_twice_or_is_lost[2]",
        "state_of_rank": "test_goes_on_where_a_state_was_taken[2]",
        "workers_repeat": "test_workers_share_the_batches[2]",
        "counts_own_blocks": "test_workers_share_the_batches[2]",
        "hides_the_test_split": "test_splits_names_what_can_be_read",
        "promises_a_test_split": "test_splits_names_what_can_be_read",
        "scans_without_time": "test_scan_yields_every_row_once",
        "scans_some_rows": "test_scan_yields_every_row_once",
        "scans_without_keys": "test_scan_yields_every_row_once",
        "names_the_schema": "test_identity_is_of_the_rows",
    },
    ("sharding", "Split"): {
        "constrains_others": "test_constrains_only_the_tables_it_is_given",
        "constrains_without_tables": "test_does_nothing_without_tables",
        "drops_others": "test_rewrite_keeps_all_weights",
        "changes_without_tables": "test_rewrite_without_tables_changes_nothing",
        "clears_its_tables": "test_rewrite_keeps_all_weights",
        "reads_values": "test_rewrites_a_model_without_values",
        "draws_weights": "test_every_rank_comes_to_the_same",
        "draws_rows": "test_every_rank_makes_the_same_strategy",
        "draws_constraints": "test_every_rank_makes_the_same_strategy",
        "draws_memory": "test_every_rank_makes_the_same_strategy",
        "part_of_others": "test_says_nothing_of_other_tables",
        "part_constrains_others": "test_constrains_only_the_tables_it_is_given",
        "part_looks_up_others": "test_says_nothing_of_other_tables",
        "part_without_tables": "test_does_nothing_without_tables",
        "part_that_stays": "test_its_strategy_is_picklable",
        "two_sharders_for_one": "test_sharders_shard_modules",
    },
    ("cache", "Greedy"): {"constrains_others": "test_constrains_only_the_tables_it_is_given"},
    ("converter", "Loose"): {
        "swaps_ids": "test_changes_no_value",
        "ignores_offsets": "test_takes_part_of_a_batch[3-5]",
        "takes_nulls": "test_refuses_a_null[history-null2]",
        "sorts_dense_features": "test_takes_features_in_the_order_of_the_schema",
        "needs_dense_features": "test_takes_data_without_dense_features",
        "stores_all_rows": "test_stores_equal_rows_once",
        "hides_factors": "test_stores_equal_rows_once",
        "hides_partial_factors": "test_stores_equal_rows_once",
        "misplaces_rows": "test_changes_no_value",
    },
}

#: Kinds whose plugin above has no fault where it is told of none.
SOUND = (*("dataset", "sharding", "fitted", "pooling", "target_pooling", "scaled"),)


@pytest.fixture(scope="module")
def failed(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("contracts")
    source, tests = faulty_plugins.SOURCE, []
    for (kind, plugin), faults in FAULTS.items():
        for fault, test in {**({"none": ""} if kind in SOUND else {}), **faults}.items():
            tests.append("::".join(filter(None, ("test_faults.py", f"Test_{kind}_{fault}", test))))
            source += f'''

class Faulty_{kind}_{fault}({plugin}):
    "A fault."
    fault = "{fault}"


class Test_{kind}_{fault}({kind.capitalize()}Contract):
    @pytest.fixture
    def plugin(self):
        return Faulty_{kind}_{fault}(Faulty_{kind}_{fault}.Options())
    test_module_imports_without_torch = None
    embedding_dim = 16
    deduplicated = ("history",) if "{fault}" == "stores_all_rows" else ()
'''
    (folder / "test_faults.py").write_text(source)
    done = forked.run(
        [sys.executable, "-m", "pytest", "-q", "-rfE", "--tb=no", "-p", "no:cacheprovider", *tests],
        cwd=folder,
        env={**os.environ, "COLUMNS": "300", "PYTEST_ADDOPTS": ""},
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("kind", "fault", "test"),
    [(kind, fault, test) for (kind, _), faults in FAULTS.items() for fault, test in faults.items()],
)
def test_a_fault_is_noticed(failed, kind, fault, test):
    expected = f"FAILED test_faults.py::Test_{kind}_{fault}::{test}"
    assert any(line.startswith(expected) for line in failed.splitlines()), failed


class ByHash(Sharding):
    name = "test.by_hash"

    def constraints(self, tables):
        from torchrec.distributed.planner.types import ParameterConstraints

        names = {f"{table.name} {number}" for table in tables for number in range(9)}
        return {tables[0].name: ParameterConstraints(feature_names=list(names))} if tables else {}


class TestAnOrderOfHashes:
    """The plugins above are in a process that has the hashes of its ranks."""

    tables, context = ShardingContract.tables, ShardingContract.context

    @pytest.mark.skipif("PYTHONHASHSEED" in os.environ, reason="all processes have one order")
    def test_is_noticed(self, tables, context):
        test = ShardingContract().test_another_process_makes_the_same_strategy
        with pytest.raises(AssertionError):
            test(ByHash(ByHash.Options()), tables, context)


@pytest.mark.parametrize("kind", SOUND)
def test_a_plugin_without_faults_passes(failed, kind):
    assert f"::Test_{kind}_none::" not in failed
