"""Lets every Python process of a test run see a checkout's tests, and these sharders as TorchRec's.

Python imports a module of this name as it starts, so that ranks that tests spawn have it, too.
"""

import os
import sys
import traceback
from importlib import import_module
from pathlib import Path


def see_tests(checkout: Path) -> None:
    """Find tests and what they share in the checkout, and all else where it is installed."""
    for package in ("torchrec.distributed", "torchrec.distributed.train_pipeline"):
        folder = checkout.joinpath(*package.split("."))
        import_module(package).__path__.append(str(folder))
    utils = checkout / "torchrec" / "distributed" / "test_utils"
    import_module("torchrec.distributed.test_utils").__path__.insert(0, str(utils))


def put_ours_in_place() -> None:
    """Every module of TorchRec's that has one of the two sharders gets the exact one."""
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder

    from recd_plugins.sharding.sharders import (
        ExactEmbeddingBagCollectionSharder,
        ExactEmbeddingCollectionSharder,
    )

    ours = {
        EmbeddingBagCollectionSharder: ExactEmbeddingBagCollectionSharder,
        EmbeddingCollectionSharder: ExactEmbeddingCollectionSharder,
    }
    for name, module in list(sys.modules.items()):
        if name.startswith("torchrec."):
            for stock, exact in ours.items():
                if getattr(module, stock.__name__, None) is stock:
                    setattr(module, stock.__name__, exact)


if checkout := os.environ.get("TORCHREC_CHECKOUT"):
    try:
        see_tests(Path(checkout))
        if os.environ.get("TORCHREC_SHARDERS") == "ours":
            put_ours_in_place()
    except BaseException:  # Python would go on without it
        traceback.print_exc()
        os._exit(1)
