"""A dataset whose rows are their numbers, and steps in its readers that take time or die."""

import os
import signal
import time
from pathlib import Path

import pyarrow as pa
from torch import Tensor

from recd_plugin_dsi.ray_ingestion import RayIngestion
from recd_plugin_recd.ikjt import IkjtConverter
from recd_plugins import RunConfig
from recd_plugins.config import Entry, RegistrySpec
from recd_plugins.data.reader import PlannedReader, ReadPlan, Unit
from recd_plugins.interfaces import (
    Dataset,
    FeatureSchema,
    Origin,
    PluginOptions,
    Preprocessing,
    Reader,
    Rows,
)

ROWS, UNIT, BATCH = 960, 40, 10


class Numbered(Dataset):
    name = "tests.numbered"

    class Options(PluginOptions):
        in_blocks: bool = True

    options: Options

    def prepare(self) -> None:
        pass

    def schema(self):
        return FeatureSchema(("item",), ("number",), "label")

    def reader(self, *, rank, world_size, batch_size, split):
        units = tuple(Unit(0, n, first, UNIT) for n, first in enumerate(range(0, ROWS, UNIT)))
        plan = ReadPlan(units, batch_size, shuffle=True)
        ranks = {"rank": rank, "world_size": world_size}
        reader = PlannedReader(plan, self._read, data={}, what="numbers", ahead=0, **ranks)
        return reader if self.options.in_blocks else Unskippable(reader)

    def _read(self, pieces):
        for piece in pieces:
            first = piece.unit.first_row + piece.skip
            numbers = range(first, first + piece.num_rows)
            columns = {
                "item": pa.array([[number] for number in numbers], pa.list_(pa.int64())),
                "number": pa.array(numbers, pa.float32()),
                "label": pa.array([0.0] * len(numbers), pa.float32()),
            }
            origin = Origin("numbers", first, piece.num_rows)
            yield Rows(pa.RecordBatch.from_pydict(columns), (origin,))


class Unskippable(Reader):
    def __init__(self, reader):
        self._reader = reader

    def __len__(self):
        return len(self._reader)

    def __iter__(self):
        return iter(self._reader)

    def state_dict(self):
        return self._reader.state_dict()

    def load_state_dict(self, state):
        self._reader.load_state_dict(state)


class Slow(Preprocessing):
    """Takes its time, and ends its process at one id."""

    name = "tests.slow"

    class Options(PluginOptions):
        seconds: float = 0.0
        deadly: int = -1
        only_once: Path | None = None

    options: Options

    def transform(self, values: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        time.sleep(self.options.seconds)
        once = self.options.only_once
        if bool((values == self.options.deadly).any()) and not (once and once.exists()):
            if once:
                once.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return values, offsets


def registry(ray: dict | None, in_blocks: bool = True, **slow) -> RunConfig:
    spec = RegistrySpec.model_validate({"version": 1, "training": {"batch_size": BATCH}})
    plugin = None if ray is None else RayIngestion(RayIngestion.Options.model_validate(ray))
    slowed = Slow(Slow.Options.model_validate(slow))
    return RunConfig(
        path=Path("registry.yaml"),
        spec=spec,
        dataset=Numbered(Numbered.Options(in_blocks=in_blocks)),
        converter=IkjtConverter(IkjtConverter.Options()),
        preprocessing=(Entry(slowed, ("item",), "preprocessing[0]", 1),),
        pooling=(),
        sharding=(),
        cache=(),
        ingestion=None if plugin is None else Entry(plugin, (), "ingestion", 1),
    )
