"""Plugins with one fault each, as the text of a module."""

SOURCE = """
import pyarrow as pa
import pytest
import torch
from torch import nn
from torchrec import JaggedTensor, KeyedJaggedTensor
from recd_plugins.interfaces.batch import Batch
from recd_plugins.runtime.errors import DataError
from recd_plugins.interfaces import *
from recd_plugins.sparse.ikjt import InverseKeyedJaggedTensor
from recd_plugins.sparse.partial_ikjt import PartialInverseKeyedJaggedTensor
from recd_plugins.testing.contracts import *
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.planner.types import ParameterConstraints


class Change(Preprocessing):
    name = "test.change"
    @property
    def scope(self):
        return "id" if self.fault == "cuts_under_scope_id" else "row"
    @property
    def takes(self):
        return {"takes_nothing": (), "doubles_numbers": ("numbers",)}.get(self.fault, ("ids",))
    def identity(self):
        return {"at": id(self)} if self.fault == "is_known_by_its_place" else {}
    @property
    def num_ids(self):
        return 10 if self.fault == "gives_more_than_it_says" else None
    def kept_lengths(self, lengths):
        return lengths.clamp(max=1) if self.fault == "keeps_the_last" else None
    def transform(self, values, offsets):
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
        if self.fault == "looks_at_other_rows":
            return values % max(values.unique().numel(), 1), offsets.clone()
        if self.fault == "works_in_place":
            return values.fill_(1), offsets.clone()
        if self.fault == "gives_floats":
            return values.float(), offsets.clone()
        if self.fault == "numbers_ids_as_they_come":
            seen = vars(self).setdefault("seen", {})
            numbers = [seen.setdefault(value, len(seen)) for value in values.tolist()]
            return torch.tensor(numbers, dtype=torch.int64), offsets
        if self.fault == "gives_more_than_it_says":
            return values % 11, offsets
        if self.fault == "returns_one_memory":
            if "memory" not in vars(self):
                self.memory = torch.empty(1000, dtype=values.dtype)
            return self.memory[: values.numel()].copy_(values), offsets


class AtMost(Preprocessing):
    name = "test.at_most"
    scope = "id"
    takes = ("ids", "numbers")
    def __init__(self, options):
        super().__init__(options)
        if self.fault == "takes_the_name_fitted":
            self.fitted = {}
    @property
    def fit_rows(self):
        return 0 if self.fault == "asks_for_no_rows" else 10
    @property
    def num_ids(self):
        return self.most + 1 if self.fault == "counts_what_it_fitted" else None
    def fit(self, feature, rows):
        self.most = 0
        for pieces, (values, _) in enumerate(rows):
            self.most = max([self.most, *values.tolist()])
            if self.fault == "clears_rows":
                values.zero_()
        if self.fault == "counts_pieces":
            self.most = pieces
        if self.fault == "draws":
            self.most = torch.randint(1, 1 << 60, ()).item()
    def identity(self):
        known = {"is_known_by_nothing": {}, "is_known_by_its_rows": {"rows": self.fit_rows}}
        return known.get(self.fault, {"most": self.most})
    def transform(self, values, offsets):
        return values.clamp(max=self.most), offsets


class Scaled(Preprocessing):
    name = "test.scaled"
    takes = ("numbers",)
    def fit(self, feature, rows):
        values = torch.cat([values for values, _ in rows])
        self.span = int(values.max() - values.min())
        if not self.span:
            raise DataError(f"{feature} is the same in all rows: leave it out")
    def identity(self):
        return {"span": self.span}
    def transform(self, values, offsets):
        return values / self.span, offsets


FittedContract = ScaledContract = PreprocessingContract


class Sum(Pooling):
    name = "test.sum"
    def build(self, embedding_dim):
        return SumModule(embedding_dim, self.fault)
    def pool_groups(self, groups):
        if self.fault == "pools_groups_by_modules_of_the_first":
            first = groups[0][0]
            groups = [(first[: len(sequences)], sequences) for _, sequences in groups]
        pooled = super().pool_groups(groups)
        if self.fault == "pools_groups_on_the_cpu":
            return [each + torch.zeros(each.shape, device="cpu") for each in pooled]
        return pooled


class SumModule(nn.Module):
    def __init__(self, embedding_dim, fault):
        super().__init__()
        self.fault = fault
        self.scale = nn.Parameter(torch.ones(embedding_dim))
    def forward(self, sequences):
        values, lengths = sequences.values(), sequences.lengths()
        pooled = values.new_zeros(lengths.numel(), values.shape[1])
        if not values.numel():
            return pooled + (self.fault == "gives_ones_for_empty")
        row = torch.repeat_interleave(torch.arange(lengths.numel(), device=values.device), lengths)
        pooled = pooled.index_add(0, row, values) * self.scale
        if self.fault == "gives_ones_for_empty":
            return pooled + (lengths == 0).unsqueeze(1)
        if self.fault == "centers_the_batch":
            return pooled - pooled.mean(0)
        return pooled.detach().requires_grad_() if self.fault == "detaches" else pooled


class SumForTarget(TargetPooling):
    name = "test.sum_for_target"
    target = "item"
    always_trained = False
    def build(self, embedding_dim):
        return SumForTargetModule(embedding_dim, "")


class SumForTargetModule(SumModule):
    def forward(self, sequences, targets, inverse):
        pooled = super().forward(sequences)
        return (pooled if inverse is None else pooled.index_select(0, inverse)) * targets


Target_poolingContract = TargetPoolingContract


class Numbers(Dataset):
    name = "test.numbers"
    def prepare(self): ...
    def identity(self):
        return {"schema": 1} if self.fault == "names_the_schema" else {}
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


class SplitPart(TableStrategy):
    def __init__(self, fault, tables):
        self.fault, self.tables = fault, tables
        self.drawn = torch.rand(1).item() if fault.startswith("draws_") else 0
    def constraints(self, tables):
        own = [table.name for table in tables if table.name in self.tables]
        others = ["t_other"] if self.fault == "part_constrains_others" else []
        if self.fault == "draws_constraints":
            return {name: ParameterConstraints(min_partition=int(self.drawn * 1e9)) for name in own}
        return {name: ParameterConstraints() for name in own + others}
    def memory_of_rank(self, *_):
        return {"drawn": int(self.drawn * 1e9)} if self.fault == "draws_memory" else {}
    def figures(self, table):
        own = table in self.tables or self.fault == "part_of_others"
        return {"drawn": self.drawn * (self.fault == "draws_rows")} if own else {}
    @classmethod
    def kernels(cls, parts):
        return Others() if parts[0].fault == "part_looks_up_others" else None
    def __getstate__(self):
        if self.fault == "part_that_stays":
            raise TypeError("cannot pickle it")
        return self.__dict__


class Split(Sharding):
    name = "test.split"
    def constraints(self, tables):
        names = [table.name for table in tables]
        if self.fault == ("constrains_others" if tables else "constrains_without_tables"):
            names.append("t_other")
        return {name: ParameterConstraints() for name in names}
    def rewrite(self, model, tables, context):
        names = [table.name for table in tables]
        if self.fault == "drops_others":
            return nn.ModuleDict()
        if self.fault == "reads_values":
            float(next(model.parameters())[0, 0])
        for name, value in model.state_dict().items():
            if self.fault == "changes_without_tables" and not tables:
                value.zero_()
            if self.fault == "clears_its_tables" and any(each in name for each in names):
                value.zero_()
            if self.fault == "draws_weights" and any(each in name for each in names):
                value.uniform_()
        return model
    def strategy(self, tables, context):
        if not tables and self.fault != "part_without_tables":
            return None
        return SplitPart(self.fault, [table.name for table in tables])
    def sharders(self, arguments):
        count = 2 if self.fault == "two_sharders_for_one" else 1
        return [EmbeddingCollectionSharder() for _ in range(count)]


class Greedy(Cache):
    name = "test.greedy"
    def check(self, device): ...
    def constraints(self, tables):
        return {name: ParameterConstraints() for name in ("t_user", "t_other")}


class Loose(Converter):
    name = "test.loose"
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
"""
