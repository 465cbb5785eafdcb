"""Every row as it is: the plain path of TorchRec."""

from __future__ import annotations

from recd_plugins.api.reading import PlainConverter


class KjtConverter(PlainConverter):
    """Plain KeyedJaggedTensor: every row as it is."""

    name = "recd.kjt"
