"""The contract suites notice what breaks a contract. That they pass is tested with each plugin."""

import os
import sys

import pytest
from tests import forked

# Each test class holds one fault; the test named after it must be among those that fail.
FAULTS = {
    "preprocessing": {
        "drops_empty_rows": "test_keeps_the_number_of_rows",
        "numbers_values": "test_equal_rows_give_equal_rows",
        "looks_at_other_rows": "test_a_row_depends_on_itself_alone",
        "works_in_place": "test_leaves_its_input_as_it_is",
        "gives_floats": "test_keeps_the_number_of_rows",
        "adds_up_under_scope_id": "test_scope_id_looks_at_nothing_but_an_id",
        "cuts_under_scope_id": "test_scope_id_looks_at_nothing_but_an_id",
        "keeps_the_last": "test_kept_lengths_are_those_of_rows_cut_at_their_end",
        "doubles_numbers": "test_a_number_becomes_as_many_as_width_says",
        "takes_nothing": "test_takes_ids_or_numbers",
        "is_known_by_its_place": "test_identity_is_of_what_it_transforms_by",
    },
    "fitted": {
        "draws": "test_fit_comes_to_the_same",
        "is_known_by_nothing": "test_identity_tells_what_was_fitted",
        "is_known_by_its_rows": "test_identity_tells_what_was_fitted",
        "clears_rows": "test_fit_looks_at_rows_and_leaves_them",
        "asks_for_no_rows": "test_fit_looks_at_rows_and_leaves_them",
    },
    "pooling": {
        "gives_ones_for_empty": "test_an_empty_row_gives_zeros",
        "centers_the_batch": "test_a_row_depends_on_itself_alone",
        "detaches": "test_gradients_reach_embeddings_and_parameters",
    },
    "dataset": {
        "uneven": "test_every_rank_takes_as_many_steps[2]",
        "repeats": "test_no_row_comes_twice_or_is_lost[2]",
        "loses": "test_no_row_comes_twice_or_is_lost[1]",
        "counts_ahead": "test_goes_on_where_a_state_was_taken[1]",
        "forgets_at_other_ranks": "test_state_loads_at_another_number_of_ranks[2-1]",
        "wrong_origin": "test_no_row_comes_twice_or_is_lost[2]",
        "state_of_rank": "test_state_is_equal_on_every_rank",
        "workers_repeat": "test_workers_share_the_batches[2]",
        "counts_own_blocks": "test_workers_share_the_batches[2]",
        "hides_the_test_split": "test_splits_names_what_can_be_read",
        "promises_a_test_split": "test_splits_names_what_can_be_read",
        "scans_without_time": "test_scan_and_session_keys_come_together",
        "scans_some_rows": "test_scan_yields_every_row_once",
        "scans_without_keys": "test_scan_and_session_keys_come_together",
    },
    "sharding": {
        "constrains_others": "test_constrains_only_the_tables_it_is_given",
        "constrains_without_tables": "test_does_nothing_without_tables",
        "changes_others": "test_rewrite_leaves_other_tables_alone",
        "drops_others": "test_rewrite_leaves_other_tables_alone",
        "changes_without_tables": "test_rewrite_without_tables_changes_nothing",
        "draws_weights": "test_every_rank_comes_to_the_same",
        "draws_rows": "test_every_rank_makes_the_same_part",
        "part_of_others": "test_says_nothing_of_other_tables",
        "part_constrains_others": "test_constrains_only_the_tables_it_is_given",
        "part_looks_up_others": "test_looks_up_only_the_tables_it_is_given",
        "part_without_tables": "test_does_nothing_without_tables",
        "part_that_stays": "test_its_part_travels",
        "two_sharders_for_one": "test_sharders_shard_modules",
    },
    "callback": {
        "changes_a_loss": "test_looks_on_and_changes_nothing",
        "changes_a_batch": "test_looks_on_and_changes_nothing",
        "needs_a_step": "test_a_run_without_a_step_ends",
        "keeps_tensors": "test_its_state_is_json",
        "forgets": "test_a_run_that_goes_on_has_the_same_state",
        "loads_nothing": "test_a_run_that_goes_on_has_the_same_state",
    },
    "optimizer": {
        "gives_a_dict": "test_fbgemm_has_the_update",
        "is_unknown": "test_fbgemm_has_the_update",
        "has_momentum": "test_fbgemm_has_the_update",
        "has_no_rate": "test_its_class_takes_the_arguments",
        "draws_rates": "test_every_rank_comes_to_the_same",
        "counts_calls": "test_every_rank_comes_to_the_same",
        "stands_still": "test_it_trains_the_rows_that_are_read",
    },
    "metric": {
        "gives_nothing": "test_results_are_finite_numbers_by_name",
        "gives_nan": "test_results_are_finite_numbers_by_name",
        "gives_tensors": "test_results_are_finite_numbers_by_name",
        "has_a_title": "test_results_are_finite_numbers_by_name",
        "takes_the_last_rank": "test_it_does_not_matter_which_rank_saw_a_sample",
        "means_of_ranks": "test_it_does_not_matter_which_rank_saw_a_sample",
        "needs_samples": "test_it_does_not_matter_which_rank_saw_a_sample",
        "means_of_batches": "test_it_does_not_matter_how_samples_are_batched",
        "works_in_place": "test_leaves_batches_as_they_are",
        "keeps_to_itself": "test_its_state_travels",
        "stays": "test_its_state_travels",
        "needs_both_labels": "test_labels_of_one_kind_do_no_harm",
    },
    "cache": {"constrains_others": "test_constrains_only_the_tables_it_is_given"},
    "converter": {
        "swaps_ids": "test_changes_no_value",
        "ignores_offsets": "test_takes_part_of_a_batch[3-5]",
        "takes_nulls": "test_refuses_a_null_in_a_list",
        "sorts_dense_features": "test_takes_features_in_the_order_of_the_schema",
        "needs_dense_features": "test_takes_data_without_dense_features",
        "stores_all_rows": "test_stores_equal_rows_once",
        "hides_factors": "test_stores_equal_rows_once",
        "hides_partial_factors": "test_stores_equal_rows_once",
        "misplaces_rows": "test_changes_no_value",
    },
}

SOURCE = '''
import pyarrow as pa
import pytest
import torch
from torch import nn
from torchrec import JaggedTensor, KeyedJaggedTensor
from recd_plugins.values.batch import Batch
from recd_plugins.errors import DataError
from recd_plugins.interfaces import *
from recd_plugins.sparse import InverseKeyedJaggedTensor, PartialInverseKeyedJaggedTensor
from recd_plugins.testing.contracts import *
from recd_plugins.interfaces import TablePart
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.planner.types import ParameterConstraints


class Change(Preprocessing):
    """Change ids."""
    name = "test.change"
    fault = ""
    @property
    def scope(self):
        return "id" if self.fault.endswith("under_scope_id") else "row"
    @property
    def takes(self):
        return {"takes_nothing": (), "doubles_numbers": ("numbers",)}.get(self.fault, ("ids",))
    def identity(self):
        return {"at": id(self)} if self.fault == "is_known_by_its_place" else {}
    def kept_lengths(self, lengths):
        return lengths.clamp(max=1) if self.fault == "keeps_the_last" else None
    def transform(self, values, offsets):
        if self.fault == "adds_up_under_scope_id":
            sums = torch.cat([values.new_zeros(1), values.cumsum(0)])
            starts = torch.repeat_interleave(sums[offsets[:-1]], offsets.diff())
            return sums[1:] - starts, offsets.clone()
        if self.fault in ("cuts_under_scope_id", "keeps_the_last"):
            full = offsets.diff() > 0
            places = offsets[1:] - 1 if self.fault == "keeps_the_last" else offsets[:-1]
            return values[places[full]], torch.cat([offsets.new_zeros(1), full.cumsum(0)])
        if self.fault == "doubles_numbers":
            return values.repeat_interleave(2), offsets * 2
        if self.fault in ("takes_nothing", "is_known_by_its_place"):
            return values, offsets
        if self.fault == "drops_empty_rows":
            keep = torch.ones_like(offsets, dtype=torch.bool)
            keep[1:] = offsets.diff() > 0
            return values.clone(), offsets[keep]
        if self.fault == "numbers_values":
            return torch.arange(values.numel()), offsets.clone()
        if self.fault == "looks_at_other_rows":
            return values % max(values.unique().numel(), 1), offsets.clone()
        if self.fault == "works_in_place":
            return values.fill_(1), offsets.clone()
        if self.fault == "gives_floats":
            return values.float(), offsets.clone()


class AtMost(Preprocessing):
    """Make ids the largest one seen at most."""
    name = "test.at_most"
    scope = "id"
    fault = ""
    @property
    def fit_rows(self):
        return 0 if self.fault == "asks_for_no_rows" else 10
    def fit(self, feature, rows):
        self.most = 0
        for values, _ in rows:
            self.most = max([self.most, *values.tolist()])
            if self.fault == "clears_rows":
                values.zero_()
        if self.fault == "draws":
            self.most = torch.randint(1, 1 << 60, ()).item()
    def identity(self):
        known = {"is_known_by_nothing": {}, "is_known_by_its_rows": {"rows": self.fit_rows}}
        return known.get(self.fault, {"most": self.most})
    def transform(self, values, offsets):
        return values.clamp(max=self.most), offsets


FittedContract = PreprocessingContract


class Sum(Pooling):
    """Sum."""
    name = "test.sum"
    fault = ""
    def build(self, embedding_dim):
        fault = self.fault
        class Module(nn.Module):
            def forward(self, sequences):
                values, lengths = sequences.values(), sequences.lengths()
                row = torch.repeat_interleave(torch.arange(lengths.numel()), lengths)
                pooled = values.new_zeros(lengths.numel(), embedding_dim).index_add(0, row, values)
                if fault == "gives_ones_for_empty":
                    return pooled + (lengths == 0).unsqueeze(1)
                if fault == "centers_the_batch":
                    return pooled - pooled.mean(0) if pooled.any() else pooled
                return pooled.detach().requires_grad_()
        return Module()


class Numbers(Dataset):
    """Numbers."""
    name = "test.numbers"
    fault = ""
    def prepare(self): ...
    def schema(self): return FeatureSchema(("id",), (), "label")
    def splits(self):
        return ("train", "test") if self.fault == "promises_a_test_split" else ("train",)
    def session_keys(self):
        return None if self.fault == "scans_without_keys" else SessionKeys("session", "time")
    def scan(self, split="train"):
        count = 40 if self.fault == "scans_some_rows" else 50
        data = NumbersReader("", 0, 1, count).rows(0).data
        columns = {**dict(zip(data.schema.names, data.columns)), "session": data["id"]}
        if self.fault != "scans_without_time":
            columns["time"] = data["id"]
        yield Rows(pa.RecordBatch.from_pydict(columns), (Origin("numbers", 0, count),))
    def reader(self, *, rank, world_size, batch_size, split):
        if split == "test" and self.fault != "hides_the_test_split":
            raise DataError("there is no test split")
        if 50 < world_size * batch_size:
            raise DataError("too few rows")
        return NumbersReader(self.fault, rank, world_size, batch_size)


class NumbersReader(Reader):
    def __init__(self, fault, rank, world_size, batch_size):
        self.fault, self.rank, self.world, self.batch = fault, rank, world_size, batch_size
        self.row = 0
        self.count = 40 if fault == "loses" and batch_size > 1 else 50
    def __len__(self):
        extra = self.fault == "uneven" and self.rank == 1
        return self.count // (self.world * self.batch) - extra
    def __iter__(self):
        step = self.world * self.batch
        while self.row + step <= self.count:
            if self.fault == "uneven" and self.rank == 1 and self.row + 2 * step > self.count:
                break
            start = self.row + (0 if self.fault == "repeats" else self.rank * self.batch)
            if self.fault == "counts_ahead":
                self.row += 2 * step
                yield self.rows(start)
                self.row -= step
            else:
                self.row += step
                yield self.rows(start)
        self.row = 0
    def rows(self, start):
        numbers = list(range(start, start + self.batch))
        data = {"id": pa.array(numbers, pa.int64()), "label": pa.array([n % 2 for n in numbers])}
        wrong = self.fault == "wrong_origin" and self.rank
        origin = Origin("numbers", start - self.batch if wrong else start, self.batch)
        return Rows(pa.RecordBatch.from_pydict(data), (origin,))
    def blocks(self, worker, num_workers):
        if self.fault == "workers_repeat":
            return super().blocks(0, 1)
        if self.fault == "counts_own_blocks":
            return self.own_blocks(worker, num_workers)
        return super().blocks(worker, num_workers)
    def own_blocks(self, worker, num_workers):
        first = self.row
        for start in range(first + worker * self.batch, 51 - self.batch, num_workers * self.batch):
            self.row += self.batch
            yield [self.rows(start)]
        self.row = 0
    def state_dict(self):
        state = {"row": self.row, "batch": self.batch, "world": self.world}
        return {**state, "rank": self.rank} if self.fault == "state_of_rank" else state
    def load_state_dict(self, state):
        if state["batch"] != self.batch:
            raise DataError("another batch size")
        self.row = state["row"]
        if self.fault == "forgets_at_other_ranks" and state["world"] != self.world:
            self.row = 0


class Others:
    tables = ["t_other"]


class SplitPart(TablePart):
    def __init__(self, fault, tables):
        self.fault, self.tables = fault, tables
        self.drawn = torch.rand(1).item() if fault == "draws_rows" else 0
    def constraints(self, tables):
        own = [table.name for table in tables if table.name in self.tables]
        others = ["t_other"] if self.fault == "part_constrains_others" else []
        return {name: ParameterConstraints() for name in own + others}
    def figures(self, table):
        own = table in self.tables or self.fault == "part_of_others"
        return {"drawn": self.drawn} if own else {}
    @classmethod
    def kernels(cls, parts):
        return Others() if parts[0].fault == "part_looks_up_others" else None
    def __getstate__(self):
        if self.fault == "part_that_stays":
            raise TypeError("cannot pickle it")
        return self.__dict__


class Split(Sharding):
    """Split."""
    name = "test.split"
    fault = ""
    OTHER = Table("t_other", ("other",), 200, 16, pooled=True)
    def constraints(self, tables):
        names = [table.name for table in tables]
        if self.fault == ("constrains_others" if tables else "constrains_without_tables"):
            names.append("t_other")
        return {name: ParameterConstraints() for name in names}
    def rewrite(self, model, tables, setting):
        names = [table.name for table in tables]
        if self.fault == "drops_others":
            return nn.ModuleDict()
        for name, value in model.state_dict().items():
            if self.fault == "changes_others" and "t_other" in name:
                value.zero_()
            if self.fault == "changes_without_tables" and not tables:
                value.zero_()
            if self.fault == "draws_weights" and any(each in name for each in names):
                value.uniform_()
        return model
    def part(self, tables, setting):
        if not tables and self.fault != "part_without_tables":
            return None
        return SplitPart(self.fault, [table.name for table in tables])
    def sharders(self, arguments):
        count = 2 if self.fault == "two_sharders_for_one" else 1
        return [EmbeddingCollectionSharder() for _ in range(count)]


class Looker(Callback):
    """Look on, with a fault."""
    name = "faulty.looker"
    fault = ""

    def on_start(self, start):
        self.ids, self.last = 0, [0] * (self.fault != "needs_a_step")

    def on_batch(self, batch):
        self.ids += len(batch.ids("user"))
        if self.fault == "changes_a_batch":
            batch.ids("history").zero_()

    def on_step(self, step):
        self.last.append(step.step)
        if self.fault == "changes_a_loss":
            step.loss.mul_(2)

    def on_end(self, end):
        self.last.pop()

    def state_dict(self):
        if self.fault == "keeps_tensors":
            return {"ids": torch.tensor(self.ids)}
        return {"ids": self.ids}

    def load_state_dict(self, states):
        if self.fault == "loads_nothing":
            return super().load_state_dict(states)
        if self.fault != "forgets":
            self.ids = states[0]["ids"]


class Stepper(Optimizer):
    """SGD."""
    name = "test.stepper"
    fault = ""
    calls = 0
    def update(self, table):
        self.calls += 1
        arguments = {"lr": 0.1}
        if self.fault == "has_momentum":
            arguments["momentum"] = 0.9
        if self.fault == "has_no_rate":
            arguments = {"rate": 0.1}
        if self.fault == "draws_rates":
            arguments["lr"] = float(torch.rand(()))
        if self.fault == "counts_calls":
            arguments["lr"] = 0.1 * self.calls
        if self.fault == "stands_still":
            arguments["lr"] = 0.0
        if self.fault == "gives_a_dict":
            return arguments
        if self.fault == "is_unknown":
            return RowUpdate(torch.optim.Adamax, arguments)
        return RowUpdate(torch.optim.SGD, arguments)


class MeanLabel(Metric):
    """The mean label."""
    name = "test.mean_label"
    fault = ""
    def start(self):
        self.total = 0.0
        return [] if self.fault == "needs_samples" else [(0.0, 0)]
    def update(self, state, batch):
        if self.fault == "works_in_place":
            batch.labels.zero_()
        if self.fault == "means_of_batches":
            return [*state, (float(batch.labels.double().mean()), 1)]
        self.total += float(batch.labels.sum())
        if self.fault == "stays":
            return [*state, (float(batch.labels.sum()), len(batch.labels)), lambda: 0]
        return [*state, (float(batch.labels.sum()), len(batch.labels))]
    def results(self, states):
        if self.fault == "gives_nothing":
            return {}
        if self.fault == "needs_samples":
            states = [state for state in states if max(state)]
        if self.fault == "takes_the_last_rank":
            states = states[-1:]
        if self.fault == "stays":
            states = [[each for each in state if isinstance(each, tuple)] for state in states]
        sums = [(sum(x for x, _ in state), sum(n for _, n in state)) for state in states]
        if self.fault == "means_of_ranks":
            means = [x / n for x, n in sums if n]
            return {"mean_label": sum(means) / len(means)}
        total, seen = map(sum, zip(*sums))
        if self.fault == "keeps_to_itself":
            total = self.total
        if self.fault == "needs_both_labels":
            return {"odds": total / seen / (1 - total / seen)}
        name = "mean label" if self.fault == "has_a_title" else "mean_label"
        found = {"gives_nan": float("nan"), "gives_tensors": torch.tensor(0.5)}
        return {name: found.get(self.fault, total / seen)}


class Greedy(Cache):
    """Greedy."""
    name = "test.greedy"
    fault = ""
    def check(self, device): ...
    def constraints(self, tables):
        return {name: ParameterConstraints() for name in ("t_user", "t_other")}


class Loose(Converter):
    """Loose."""
    name = "test.loose"
    fault = ""
    def convert(self, rows, schema):
        columns = {name: rows.data.column(name) for name in schema.sparse}
        values, lengths = [], []
        for name, column in columns.items():
            listed = pa.types.is_list(column.type)
            if listed and self.fault == "ignores_offsets":
                ids = column.values.to_pylist()
            else:
                ids = [i for row in column.to_pylist() for i in (row if listed else [row])]
            lengths += [len(row) if listed else 1 for row in column.to_pylist()]
            values += ids[::-1] if self.fault == "swaps_ids" else ids
        values = [0 if value is None else value for value in values]
        names = sorted(schema.dense) if self.fault == "sorts_dense_features" else schema.dense
        if not names and self.fault == "needs_dense_features":
            raise DataError("no dense features")
        dense = torch.zeros(len(rows), len(names))
        for index, name in enumerate(names):
            dense[:, index] = torch.tensor(rows.data.column(name).to_pylist())
        labels = torch.tensor(rows.data.column(schema.label).to_pylist()).float()
        kjt = KeyedJaggedTensor(list(columns), torch.tensor(values), torch.tensor(lengths),
                                stride=len(rows))
        if self.fault in ("hides_partial_factors", "misplaces_rows"):
            partial = PartialInverseKeyedJaggedTensor.from_kjt(kjt)
            if self.fault == "misplaces_rows":
                partial.offsets().zero_()
            return Batch(dense, labels, partials=(partial,))
        if self.fault == "hides_factors":
            return Batch(dense, labels, ikjts=InverseKeyedJaggedTensor.from_kjt(kjt, [columns]))
        return Batch(dense, labels, kjt)
'''

CLASSES = {
    "preprocessing": "Change",
    "fitted": "AtMost",
    "pooling": "Sum",
    "dataset": "Numbers",
    "sharding": "Split",
    "callback": "Looker",
    "optimizer": "Stepper",
    "metric": "MeanLabel",
    "cache": "Greedy",
    "converter": "Loose",
}

#: Kinds whose plugin above has no fault where it is told of none.
SOUND = ("sharding", "optimizer", "metric", "callback", "fitted")


@pytest.fixture(scope="module")
def failed(tmp_path_factory) -> str:
    """What pytest says of all faulty plugins, run in one process."""
    folder = tmp_path_factory.mktemp("contracts")
    source = SOURCE
    for kind, faults in FAULTS.items():
        for fault in ("none", *faults) if kind in SOUND else faults:
            source += f'''

class Faulty_{kind}_{fault}({CLASSES[kind]}):
    "A fault."
    fault = "{fault}"


class Test_{kind}_{fault}({kind.capitalize()}Contract):
    @pytest.fixture
    def plugin(self):
        return Faulty_{kind}_{fault}(Faulty_{kind}_{fault}.Options())
    test_module_imports_without_torch = None
    deduplicated = ("history",) if "{fault}" == "stores_all_rows" else ()
'''
    (folder / "test_faults.py").write_text(source)
    done = forked.run(
        [sys.executable, "-m", "pytest", "-q", "-rfE", "--tb=no", "-p", "no:cacheprovider", "."],
        cwd=folder,
        env={**os.environ, "COLUMNS": "300", "PYTEST_ADDOPTS": ""},
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("kind", "fault"), [(kind, fault) for kind, faults in FAULTS.items() for fault in faults]
)
def test_a_fault_is_noticed(failed, kind, fault):
    expected = f"FAILED test_faults.py::Test_{kind}_{fault}::{FAULTS[kind][fault]}"
    assert any(line.startswith(expected) for line in failed.splitlines()), failed


@pytest.mark.parametrize("kind", SOUND)
def test_a_plugin_without_faults_passes(failed, kind):
    assert f"::Test_{kind}_none::" not in failed


@pytest.mark.parametrize("fault", FAULTS["dataset"])
def test_sound_parts_of_a_faulty_plugin_pass(failed, fault):
    """The suites do not fail altogether."""
    wrong = f"FAILED test_faults.py::Test_dataset_{fault}::test_columns_are_what_the_schema_says"
    assert wrong not in failed
