"""Plugins of every kind that need nothing but pyarrow, and a way to write registry files."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.plugin_files import write_plugins

from recd_plugins import RunConfig, load_registry
from recd_plugins.runtime.errors import RegistryError

PLUGINS = '''
from pydantic import BaseModel

class Data(Dataset):
    """Nothing to read."""
    name = "acme.data"
    class Options(PluginOptions):
        path: str
        rows: int = Field(default=10, gt=0)
    def prepare(self): ...
    def schema(self): return FeatureSchema(("user", "item", "history"), (), "label")
    def reader(self, **arguments): return "reader"

class Outer(DatasetWrapper):
    """Says who reads."""
    name = "acme.outer"
    class Options(PluginOptions):
        word: str
        times: int = Field(default=1, gt=0)
    def reader(self, **arguments):
        return f"{self.options.word * self.options.times}({self.inner.reader(**arguments)})"

class Plain(Converter):
    """Nothing to convert."""
    name = "acme.plain"
    def convert(self, rows, schema): ...

class Limits(BaseModel):
    model_config = {"extra": "forbid"}
    lower: int = 0

class Keep(Preprocessing):
    """Leave ids as they are."""
    name = "acme.keep"
    class Options(PluginOptions):
        buckets: int = Field(default=1, gt=0)
        limits: list[Limits] = []
        pairs: tuple[tuple[int, int], ...] = Field(default=((1, 2),), min_length=1)
    def __init__(self, options):
        super().__init__(options)
        if options.buckets == 13:
            raise SetupError("option 'buckets' is 13, an unlucky number. Use 14")
        if options.buckets == 17:
            raise KeyError(0)
    def transform(self, values, offsets): return values, offsets

class Max(Pooling):
    """Pool nothing."""
    name = "acme.max"
    def build(self, embedding_dim): ...

class Stock(Sharding):
    """Leave tables to the planner."""
    name = "acme.stock"

class Hot(Cache):
    """Cache nothing."""
    name = "acme.hot"
    def check(self, device): ...
    def constraints(self, tables): return {}
'''


@pytest.fixture(scope="session")
def plugins_dir(tmp_path_factory) -> Path:
    classes = ("Data", "Outer", "Plain", "Keep", "Max", "Stock", "Hot")
    return write_plugins(tmp_path_factory.mktemp("acme"), PLUGINS, *classes)


Load = Callable[..., RunConfig]
Problems = Callable[..., list[str]]


@pytest.fixture
def load(tmp_path: Path, plugins_dir: Path) -> Load:
    """Write and load a registry file."""

    def load(text: str | bytes) -> RunConfig:
        path = tmp_path / "r.yaml"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return load_registry(path, plugins_dir=plugins_dir)

    return load


@pytest.fixture
def problems(load: Load, tmp_path: Path) -> Problems:
    """Load a registry file that is wrong, and return what is said about it."""

    def problems(text: str | bytes) -> list[str]:
        with pytest.raises(RegistryError) as caught:
            load(text)
        return [str(each).removeprefix(f"{tmp_path}{os.sep}") for each in caught.value.problems]

    return problems
