"""Weights of ids that an EmbeddingBagCollection gets and does not want, or the reverse."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins.distributed.mean_pooling import refuse_weighted_mean
from recd_plugins.errors import ExactnessError

logger = logging.getLogger(__name__)


class IdWeights:
    """A look at the weights of a sharded EmbeddingBagCollection's batches.

    Args:
        name: of the module, for messages.
        weighted: as its ``is_weighted()`` says.
        means: its tables with mean pooling.

    Raises:
        ExactnessError: there are some in a weighted module.
    """

    def __init__(self, name: str, *, weighted: bool, means: Sequence[str] = ()) -> None:
        if weighted:
            refuse_weighted_mean(means)
        self._name = name
        self._weighted = weighted
        self._means = means
        self._told = False

    def check_batch(self, features: KeyedJaggedTensor) -> None:
        """Look at a batch before it is sent.

        Raises:
            ExactnessError: weights would never learn, or are of ids that are pooled by means.
        """
        weights = features.weights_or_none()
        if weights is None:
            return
        if weights.requires_grad:
            raise ExactnessError(
                f"the weights of {', '.join(features.keys())} require a gradient, which "
                "TorchRec's input dist does not pass on: what makes them would never learn. "
                "Put it into a FeatureProcessedEmbeddingBagCollection, or detach the weights"
            )
        if not self._weighted:
            refuse_weighted_mean(
                self._means,
                f"; or give the batches of {self._name}, which is not is_weighted, no weights",
            )
            self._tell(
                "is not is_weighted, and its batches have weights: sharded, TorchRec multiplies by "
                "them, in one piece it ignores them. Make it is_weighted=True, or give it none"
            )

    def check_sent(self, features: Iterable[KeyedJaggedTensor]) -> None:
        """Look at what is looked up; feature processors have made weights by now."""
        # Of a rank without tables they have no features.
        if self._weighted and any(kjt.weights_or_none() is None and kjt.keys() for kjt in features):
            self._tell(
                "is is_weighted, and its batches have no weights: sharded, TorchRec sums vectors, "
                "in one piece it fails. Give it weights, or make it is_weighted=False"
            )

    def _tell(self, what: str) -> None:
        if not self._told:
            self._told = True
            logger.warning("%s %s", self._name, what)
