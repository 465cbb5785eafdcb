"""Feature processors over unique rows.

TorchRec (1.6 to 1.9) loses the form of a deduplicated batch if the processors are a dict, and those
of row-wise tables write positions into the batch, by which modules after it silently multiply.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.fp_embeddingbag import ShardedFeatureProcessedEmbeddingBagCollection
from torchrec.modules.feature_processor_ import (
    FeatureProcessorsCollection,
    PositionWeightedModule,
    PositionWeightedModuleCollection,
)
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins.sharding.batch_form import with_tensors
from recd_plugins.sparse.deduplicated_kjt import unique_rows


def why_all_rows_processed(module: FeatureProcessedEmbeddingBagCollection) -> str:
    """Return why processors have to get all rows; empty if unique ones do.

    A position weight depends on its place in the row alone, and its gradient is the sum over rows.
    """
    processors = module._feature_processors
    collected = isinstance(processors, FeatureProcessorsCollection)
    found = {type(processors)} if collected else {type(each) for each in processors.values()}
    if not (others := found - {PositionWeightedModule, PositionWeightedModuleCollection}):
        return ""
    names = ", ".join(sorted(each.__name__ for each in others))
    return f"as its feature processors {names} may look at more than one row"


def keep_form(sharded: ShardedFeatureProcessedEmbeddingBagCollection) -> None:
    """Have a dict of processors keep the form of a deduplicated batch."""
    process = sharded.apply_feature_processors_to_kjt_list

    def kept(dist_input: KJTList) -> KJTList:
        found = process(dist_input)
        return KJTList(
            [
                _in_form_of(given, processed)
                for given, processed in zip(dist_input, found, strict=True)
            ]
        )

    # Found before the class's by its forward and by train pipelines.
    sharded.apply_feature_processors_to_kjt_list = kept


def keep_batches(sharded: ShardedFeatureProcessedEmbeddingBagCollection) -> None:
    """Have processors of row-wise tables leave a batch as it is, for the modules after this one."""
    preprocess, input_dist = sharded.preprocess_input, sharded.input_dist

    def preprocessed(args: list[Any], kwargs: Mapping[str, Any]) -> Any:
        return preprocess(
            [_with_own_weights(each) for each in args],
            {name: _with_own_weights(each) for name, each in kwargs.items()},
        )

    def distributed(ctx: Any, features: Any) -> Any:
        # Train pipelines have called the other one.
        return input_dist(ctx, features if sharded.is_pipelined else _with_own_weights(features))

    sharded.preprocess_input, sharded.input_dist = preprocessed, distributed


def _with_own_weights(features: Any) -> Any:
    if not isinstance(features, KeyedJaggedTensor):
        return features
    features = unique_rows(features)
    weights = features.weights_or_none()
    return with_tensors(features, features.values(), None if weights is None else weights.clone())


def _in_form_of(given: KeyedJaggedTensor, processed: KeyedJaggedTensor) -> KeyedJaggedTensor:
    if given.variable_stride_per_key() == processed.variable_stride_per_key():
        return processed
    return KeyedJaggedTensor(
        keys=processed.keys(),
        values=processed.values(),
        weights=processed.weights_or_none(),
        lengths=processed.lengths(),
        stride_per_key_per_rank=given.stride_per_key_per_rank(),
    )
