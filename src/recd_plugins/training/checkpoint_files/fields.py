"""Fields of a run's identity that may change when another goes on from its checkpoint."""

#: The file of a checkpoint that has the identity.
IDENTITY = "identity.json"

#: The fields that hold sections of further kinds, and those of kinds whose plugins only look on.
FURTHER, OBSERVERS = "further", "observers"

#: What a run may change when it goes on, and is told of: no result depends on it.
FREE = (
    *("sharding", "cache", "ingestion", "versions", "model.pool_rows", OBSERVERS),
    *(
        f"training.{name}"
        for name in (
            *("ranks", "ranks_per_node", "topology", "workers", "epochs", "steps", "device"),
            *("overlap", "checkpoint", "evaluate", "validation", "hang_notice", "hang_timeout"),
        )
    ),
)
#: What scores depend on besides the weights.
SCORES = (
    "dataset.use",
    "dataset.options",
    "data.schema",
    "preprocessing",
    "pooling",
    "model",
    f"{FURTHER}.model",
)
#: What it may change with ``--allow``: the state fits, and what is learnt from there is another.
ALLOWABLE = (
    *("training.learning_rate", "training.dense_learning_rate", "training.eps"),
    *("training.schedule", "training.wire", "converter", "preprocessing", "model.bag_pooling"),
)
