"""Transforms that are fitted to the training rows: vocabularies, scales, quantiles."""

from recd_plugin_tables.preprocessing.log1p import Log1p
from recd_plugin_tables.preprocessing.quantiles import Quantiles
from recd_plugin_tables.preprocessing.standardise import Standardise
from recd_plugin_tables.preprocessing.vocabulary import Vocabulary

__all__ = ["Log1p", "Quantiles", "Standardise", "Vocabulary"]
