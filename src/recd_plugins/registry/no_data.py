"""What stands for the dataset and converter of a trainer that brings batches of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from recd_plugins.errors import SetupError
from recd_plugins.interfaces import Converter, Dataset, PluginOptions, Reader

if TYPE_CHECKING:
    from recd_plugins.values.rows import FeatureSchema


class NoDataset(Dataset):
    """No dataset: whatever needs rows raises SetupError, which says what to do."""

    name = "none"

    def __init__(self, options: PluginOptions | None = None) -> None:
        super().__init__(options or PluginOptions())

    def prepare(self) -> NoReturn:
        """See ``Dataset.prepare``."""
        raise SetupError(
            "this needs rows (tiers and caches do, as they count how often ids occur), and the "
            "registry has no dataset: add the sections dataset and converter, with the data that "
            "the model is trained on"
        )

    def schema(self) -> FeatureSchema:
        """See ``Dataset.schema``."""
        self.prepare()

    def reader(self, **_: Any) -> Reader:
        """See ``Dataset.reader``."""
        self.prepare()


class NoConverter(Converter):
    """No converter: batches come from the trainer."""

    name = "none"

    def __init__(self, options: PluginOptions | None = None) -> None:
        super().__init__(options or PluginOptions())

    def convert(self, *_: Any) -> NoReturn:
        """See ``Converter.convert``."""
        raise AssertionError("without a dataset there is nothing to convert")
