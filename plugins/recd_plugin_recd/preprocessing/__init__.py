"""Transforms of ids and numbers, scriptable: TorchArrow's where it defines them."""

from recd_plugin_recd.preprocessing.box_cox import BoxCox
from recd_plugin_recd.preprocessing.bucketize import Bucketize
from recd_plugin_recd.preprocessing.clamp import Clamp
from recd_plugin_recd.preprocessing.first_x import FirstX
from recd_plugin_recd.preprocessing.logit import Logit
from recd_plugin_recd.preprocessing.map_id import MapId
from recd_plugin_recd.preprocessing.ngram import NGram
from recd_plugin_recd.preprocessing.onehot import Onehot
from recd_plugin_recd.preprocessing.sigrid_hash import SigridHash

__all__ = [
    "BoxCox",
    "Bucketize",
    "Clamp",
    "FirstX",
    "Logit",
    "MapId",
    "NGram",
    "Onehot",
    "SigridHash",
]
