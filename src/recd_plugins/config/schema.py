"""Pydantic models of ``registry.yaml``. ``recd schema`` prints the field descriptions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictInt,
    ValidationInfo,
    create_model,
    field_validator,
    model_validator,
)

from recd_plugins.config.built_in_kinds import BY_NAME
from recd_plugins.interfaces import Kind

# Strict: rejects true and 2.5. The bound is that of int64 tensors.
Count = Annotated[StrictInt, Field(gt=0, lt=1 << 63)]
# Number of processes, columns or layers. Larger values are typing errors.
Width = Annotated[StrictInt, Field(gt=0, le=1 << 20)]


# Smaller values round to 0 in float32. Larger rates lead to infinite weights within a few steps.
Float32 = Annotated[float, Field(ge=1.2e-38, le=1e9, allow_inf_nan=False)]


class Spec(BaseModel):
    """Base class of the sections of ``registry.yaml``. Immutable, and rejects unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class CheckpointSpec(Spec):
    """Folder and interval of checkpoints."""

    path: str | None = Field(
        default=None,
        description="Folder for the checkpoints of one run. With null, `runs` applies.",
    )
    runs: str | None = Field(
        default=None,
        description="Folder in which `recd run` creates a numbered folder per run, with "
        "checkpoints, settings and results. If `path` is null too, nothing is saved.",
    )
    every: Count = Field(default=100, description="Steps between checkpoints.")
    full_every: Count = Field(
        default=1,
        description="Checkpoints per full checkpoint. The others are deltas, with only the table "
        "rows that changed since the checkpoint before.",
    )
    keep: Count = Field(
        default=2,
        description="Number of latest checkpoints, and of latest full ones, to keep, in addition "
        "to the best one of `training.validation`.",
    )

    @field_validator("path", "runs")
    @classmethod
    def _is_a_path(cls, path: str | None) -> str | None:
        if path is not None and "://" in path:
            raise ValueError(
                "the path is a URL, but checkpoints need a folder. Use a folder shared by all ranks"
            )
        return path

    @model_validator(mode="after")
    def _has_a_path(self) -> Self:
        given = self.model_fields_set
        if given and not given & {"path", "runs"}:  # an explicit `path: null` is fine
            raise ValueError(
                f"{' and '.join(f'checkpoint.{key}' for key in sorted(given))} is set, but neither "
                "checkpoint.runs nor checkpoint.path is, so no checkpoint would be written. Set "
                "checkpoint.runs"
            )
        return self


class ScheduleSpec(Spec):
    """Warm-up and decay of all learning rates."""

    warmup: StrictInt = Field(
        default=0, ge=0, description="Number of first steps with linearly increasing rates."
    )
    decay: Literal["none", "linear", "cosine"] = Field(
        default="none", description="Shape of the learning rate decay after the warm-up."
    )
    steps: Count | None = Field(default=None, description="Step at which the decay ends.")
    floor: float = Field(
        default=0.0, ge=0, le=1, description="Factor of the learning rates after the decay."
    )

    @model_validator(mode="after")
    def _falls(self) -> Self:
        if self.decay != "none" and self.steps is None:
            raise ValueError(
                f"decay: {self.decay} needs an end. Set schedule.steps to the step at which the "
                "decay ends"
            )
        if self.decay == "none" and (self.steps is not None or self.floor):
            raise ValueError(
                "keys 'steps' and 'floor' have no effect without a decay. Set the key 'decay', "
                "for example to 'cosine'"
            )
        if self.steps is not None and self.steps <= self.warmup:
            raise ValueError(
                f"schedule.steps is {self.steps}, but the warm-up takes {self.warmup} steps. Set "
                "schedule.steps to a larger number than schedule.warmup"
            )
        return self


class ValidationSpec(Spec):
    """Evaluation during training, for early stopping and the best checkpoint.

    Evaluates the validation split. A dataset without one uses the test split, which makes the test
    metrics of the run optimistic.
    """

    every: Count | None = Field(
        default=None,
        description="Number of steps between validations; null validates after each epoch.",
    )
    metric: str | None = Field(
        default=None,
        description="Metric to compare: normalized_entropy, log_loss, auc, or a metric of a "
        "metric plugin in this file. With several labels TASK.METRIC, such as click.auc. null "
        "selects normalized_entropy, or with several labels loss, the weighted sum of losses.",
    )
    mode: Literal["min", "max"] | None = Field(
        default=None,
        description="Whether the smallest or largest value is best. null selects the mode of a "
        "built-in metric.",
    )
    patience: Count | None = Field(
        default=None,
        description="Stop training after this number of consecutive validations without "
        "improvement; null never stops.",
    )

    @field_validator("metric")
    @classmethod
    def _has_a_best(cls, metric: str | None) -> str | None:
        if metric is None:
            return None
        if metric not in _BEST and metric.lower() in _BEST:
            raise ValueError(f"no metric is named {metric!r}. Did you mean {metric.lower()!r}?")
        if metric.rpartition(".")[2] in ("calibration", "num_samples"):
            raise ValueError(
                f"metric {metric!r} does not rank models. Use another metric, such as "
                "'normalized_entropy'"
            )
        return metric

    @model_validator(mode="after")
    def _knows_the_best(self) -> Self:
        metric = self.metric or "loss"
        best = _BEST.get(metric.rpartition(".")[2])
        if self.mode is None and best is None:
            raise ValueError(
                f"metric {metric!r} has no default mode. Set validation.mode to 'min' or 'max'"
            )
        if self.mode not in (None, best or self.mode):
            raise ValueError(
                f"mode: {self.mode} selects the step with the worst {metric!r}. Remove the "
                f"key 'mode', or set mode: {best}"
            )
        return self

    @property
    def best(self) -> Literal["min", "max"]:
        """Return whether the smallest or the largest value of the metric is best."""
        return self.mode or _BEST[(self.metric or "loss").rpartition(".")[2]]


_BEST: dict[str, Literal["min", "max"]] = {
    "normalized_entropy": "min",
    "log_loss": "min",
    "auc": "max",
    "loss": "min",
    "rmse": "min",
    "mae": "min",
    "r2": "max",
}


class TrainingSpec(Spec):
    """Options of the training run, such as batch size and learning rate."""

    # FBGEMM counts the rows of a batch in 32 bits.
    batch_size: Count = Field(default=512, lt=1 << 31, description="Rows per batch and rank.")
    optimizer: Literal["sgd", "rowwise_adagrad"] = Field(
        default="rowwise_adagrad", description="Optimizer of the embedding tables."
    )
    learning_rate: Float32 = Field(default=0.02, description="Learning rate of the tables.")
    eps: Float32 = Field(default=1e-8, description="Epsilon of Adagrad and row-wise Adagrad.")
    dense_optimizer: Literal["adam", "adamw", "adagrad", "sgd"] | None = Field(
        default=None,
        description="Optimizer of all parameters outside embedding tables (dense parameters). "
        "null: sgd with `optimizer: sgd`, else adagrad. You can set its learning rate, and for "
        "adagrad `eps`; its other options have PyTorch's defaults.",
    )
    dense_learning_rate: Float32 | None = Field(
        default=None,
        description="Learning rate of the dense parameters; null uses learning_rate. adam and "
        "adamw usually need about 0.001.",
    )
    schedule: ScheduleSpec | None = Field(
        default=None,
        description="Warm-up and decay of all learning rates; null keeps them constant.",
    )
    wire: Literal["fp32", "fp16", "bf16", "int8"] = Field(
        default="fp32",
        description="Format in which ranks exchange embeddings and their gradients. fp16 and bf16 "
        "send half of the bytes, int8 at most three eighths. All three round the values, so losses "
        "differ from the losses with fp32.",
    )
    overlap: bool | None = Field(
        default=None,
        description="Look up rows of the next batch during the all-reduce of dense gradients. "
        "Saves time if ranks wait for the network; losses do not change. null enables it on CPUs "
        "of several nodes, unless every rank holds all tables.",
    )
    cuda_graphs: bool = Field(
        default=True,
        description="On CUDA, launch the MLPs and the interaction of the built-in model as two "
        "CUDA graphs per step. Batches of another size run without graphs.",
    )
    ranks: Width = Field(default=1, description="Number of training processes.")
    ranks_per_node: Count | None = Field(
        default=None,
        description="Ranks per node if `recd run` starts the ranks, to simulate several nodes on "
        "one machine; null puts all ranks on one node. Ignored under torchrun.",
    )
    topology: str | None = Field(
        default=None,
        description="Cluster to plan tables for: a file from `recd calibrate`, or a name that "
        "`recd plan --topology` accepts. With null, `recd run` on several nodes measures the "
        "cluster at startup (10 to 20 seconds), and other commands use topology `machine`.",
    )
    workers: StrictInt = Field(
        default=0,
        ge=0,
        le=1 << 10,
        description="Number of reader processes per rank, which read and convert batches. 0 reads "
        "in the training process.",
    )
    epochs: Count = Field(default=1, description="Number of passes over the training split.")
    steps: Count | None = Field(
        default=None, description="Stop after this number of steps; null trains all epochs."
    )
    seed: StrictInt = Field(
        default=0,
        ge=0,
        lt=1 << 63,
        description="Seed of the initial weights and of the random number generators of torch, "
        "numpy and Python.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto",
        description="Device to train on. auto selects CUDA if each rank has a GPU and FBGEMM is "
        "the CUDA build, otherwise the CPU.",
    )
    checkpoint: CheckpointSpec = Field(
        default=CheckpointSpec(), description="Checkpoints to write; null writes none."
    )
    hang_notice: float = Field(
        default=60.0,
        gt=0,
        allow_inf_nan=False,
        description="Seconds without progress until the run prints which ranks wait.",
    )
    hang_timeout: float | None = Field(
        default=1500.0,
        gt=0,
        allow_inf_nan=False,
        description="Seconds without progress until the run ends. The run can then be resumed. "
        "With null, collectives fail after 30 minutes.",
    )
    evaluate: bool = Field(
        default=True, description="Evaluate the test split at the end, if the dataset has one."
    )
    validation: ValidationSpec | None = Field(
        default=None,
        description="Evaluation of the validation split (without one, of the test split) during "
        "training; null disables it.",
    )
    progressive_validation: Count | None = Field(
        default=None,
        description="Number of steps in a window of progressive validation: its metrics are those "
        "of the training rows, each predicted before it is trained. null disables it.",
    )

    @field_validator("checkpoint", mode="before", json_schema_input_type=CheckpointSpec | None)
    @classmethod
    def _null_is_none(cls, checkpoint: Any) -> Any:
        return {} if checkpoint is None else checkpoint

    @field_validator("optimizer", mode="before")
    @classmethod
    def _trains_tables(cls, optimizer: Any) -> Any:
        if optimizer in ("adam", "adamw", "adagrad"):
            name = "adagrad" if optimizer == "adagrad" else "adam"
            needs = "" if name == "adagrad" else " (needs CUDA)"
            entry = f'[{{use: torchrec.{name}, tables: ["*"], options: {{learning_rate: 0.01}}}}]'
            raise ValueError(
                f"{optimizer!r} is not 'rowwise_adagrad' or 'sgd', which work on all devices. For "
                f"{name} in embedding tables{needs}, set optimizers: {entry}. To train only the "
                f"dense layers with it, set training.dense_optimizer: {optimizer}"
            )
        return optimizer

    @field_validator("ranks_per_node")
    @classmethod
    def _fill_nodes(cls, ranks_per_node: int | None, info: ValidationInfo) -> int | None:
        ranks = info.data.get("ranks")
        if ranks and ranks_per_node and ranks % ranks_per_node:
            raise ValueError(
                f"training.ranks is {ranks}, which is not a multiple of {ranks_per_node}. Change "
                "training.ranks or training.ranks_per_node"
            )
        return ranks_per_node

    @field_validator("validation")
    @classmethod
    def _has_a_test(
        cls, validation: ValidationSpec | None, info: ValidationInfo
    ) -> ValidationSpec | None:
        if validation is not None and info.data.get("evaluate") is False:
            raise ValueError(
                "validation needs evaluation, but training.evaluate is false. Remove "
                "training.validation or training.evaluate"
            )
        return validation

    def overlaps(self, device_type: str, nodes: int) -> bool:
        """Return whether the next batch is looked up during the all-reduce of dense gradients."""
        return device_type == "cpu" and nodes > 1 if self.overlap is None else self.overlap

    @property
    def dense_update(self) -> str:
        """Name of the optimizer of the dense parameters."""
        return self.dense_optimizer or self.default_dense_update

    @property
    def default_dense_update(self) -> str:
        """Name of the optimizer of the dense parameters if ``dense_optimizer`` is null."""
        return "sgd" if self.optimizer == "sgd" else "adagrad"

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return self.ranks // (self.ranks_per_node or self.ranks)


class PluginSpec(Spec):
    """A plugin and its options."""

    use: str = Field(description="Name of the plugin: package.part.")
    options: dict[str, Any] = Field(default={}, description="Options of the plugin.")


class EntrySpec(PluginSpec):
    """An entry in a list section of the file, with a plugin and its options."""

    enabled: bool = Field(default=True, description="false disables the entry.")


class DatasetSpec(PluginSpec):
    """A dataset, its options and its wrappers."""

    wrap: list[EntrySpec] = Field(
        default=[],
        description="Dataset wrappers, which reorder rows. The first is the innermost.",
    )


class FeatureEntrySpec(PluginSpec):
    """An entry that applies a plugin to the features that match its patterns."""

    features: list[str] = Field(
        min_length=1, description="Feature names or patterns with the wildcards *, ? and []."
    )
    enabled: bool = Field(default=True, description="false disables the entry.")


class TableEntrySpec(PluginSpec):
    """An entry that applies a plugin to the tables that match its patterns."""

    tables: list[str] = Field(
        min_length=1,
        description="Table names (t_<feature>) or patterns with the wildcards *, ? and [].",
    )
    enabled: bool = Field(default=True, description="false disables the entry.")


class TableSpec(Spec):
    """Size of the tables that match a key of ``model.tables``."""

    num_embeddings: Count = Field(description="Rows of the table.")


class MultiTaskSpec(Spec):
    """Layers between the interaction and the logit of each task, for several labels.

    Experts and the shared bottom are MLPs of the sizes in ``top_mlp``.
    """

    kind: Literal["shared", "mmoe", "ple"] = Field(
        default="shared",
        description="Layers that the tasks share: shared is one bottom MLP. mmoe mixes experts by "
        "a gate per task (MMoE, Ma et al. 2018). ple adds experts of each task (PLE, Tang et al. "
        "2020).",
    )
    experts: Width = Field(default=4, description="Number of experts that all tasks share.")
    task_experts: Width = Field(default=2, description="Number of experts per task of ple.")
    layers: Width = Field(default=1, description="Number of extraction layers of ple.")
    tower_mlp: list[Width] = Field(
        default=[32], description="Hidden layer sizes of the MLP of each task."
    )

    @field_validator("experts", "task_experts", "layers")
    @classmethod
    def _suit_the_kind(cls, value: int, info: ValidationInfo) -> int:
        kind = info.data.get("kind", "ple")
        if kind != "ple" and (kind == "shared" or info.field_name != "experts"):
            raise ValueError(
                f"the option does not apply to model.multi_task.kind: {kind}. Remove the "
                f"option, or set kind: {'mmoe or ple' if info.field_name == 'experts' else 'ple'}"
            )
        return value


class ModelSpec(Spec):
    """Architecture and sizes of the built-in model. Each feature has its own table, t_<feature>."""

    architecture: Literal["dlrm", "dcn"] = Field(
        default="dlrm",
        description="Interaction of the feature vectors: dlrm computes dot products of all pairs, "
        "dcn uses a cross network.",
    )
    # FBGEMM's kernels read four scalars at a time.
    embedding_dim: Width = Field(
        default=16, multiple_of=4, description="Length of an embedding vector."
    )
    num_embeddings: Count = Field(
        default=100_000, description="Rows of each table without an entry in `tables`."
    )
    tables: dict[str, TableSpec] = Field(
        default={}, description="Maps table names or patterns to sizes. The first match applies."
    )
    bottom_mlp: list[Width] = Field(
        default=[64],
        description="Hidden layer sizes of the MLP over dense features. The output size is "
        "embedding_dim.",
    )
    top_mlp: list[Width] = Field(
        default=[128, 64],
        description="Hidden layer sizes of the MLP over the interaction. The output size is 1.",
    )
    cross_net: Literal["low_rank", "full", "vector"] = Field(
        default="low_rank",
        description="Weights of a cross layer of dcn: two low-rank matrices or one square matrix "
        "(both DCN-v2), or one vector (DCN).",
    )
    cross_layers: Width = Field(default=3, description="Number of cross layers of dcn.")
    low_rank_dim: Width | None = Field(
        default=None,
        description="Rank of the matrices of cross_net low_rank; null uses a quarter of the cross "
        "network's input size.",
    )
    bag_pooling: Literal["sum", "mean"] = Field(
        default="sum", description="Pooling of features without a pooling entry."
    )
    pool_rows: Literal["unique", "all"] = Field(
        default="unique",
        description="Rows that pooling plugins process. all restores duplicate rows before "
        "pooling, to measure how much time deduplication saves. Results do not change.",
    )
    user_rows: Literal["unique", "all"] = Field(
        default="unique",
        description="Rows for which layers of user features are computed: unique once per request "
        "if that saves time, all for each row. Results differ only by rounding errors.",
    )
    multi_task: MultiTaskSpec | None = Field(
        default=None,
        description="Layers after the interaction for several labels. null: a shared bottom MLP "
        "with a tower per task.",
    )

    @field_validator("cross_net", "cross_layers", "low_rank_dim")
    @classmethod
    def _suit_the_architecture(cls, value: Any, info: ValidationInfo) -> Any:
        architecture = info.data.get("architecture", "dcn")
        if architecture != "dcn":
            raise ValueError(
                f"the option applies only to model.architecture: dcn, not to {architecture}. "
                "Remove the option, or set model.architecture: dcn"
            )
        cross_net = info.data.get("cross_net", "low_rank")
        if info.field_name == "low_rank_dim" and value is not None and cross_net != "low_rank":
            raise ValueError(
                "the option applies only to model.cross_net: low_rank, not to "
                f"{cross_net}. Remove the option"
            )
        return value


class _Versioned(Spec):
    version: Literal[1] = Field(description="Version of the file format.")


class RegistrySpec(_Versioned):
    """Schema of the sections of ``registry.yaml`` that do not configure plugins."""

    model: ModelSpec | None = Field(default=None, description=BY_NAME["model"].description)
    training: TrainingSpec = Field(default=TrainingSpec(), description="Settings of training.")


def registry_spec(
    kinds: Iterable[Kind], data: Mapping[str, Any] | None = None, *, needs_data: bool = True
) -> type[RegistrySpec]:
    """Return the schema of ``registry.yaml`` with a section for each plugin kind.

    The section ``model`` in ``data``, the content of the file, selects the schema of that section.
    ``needs_data`` makes the sections ``dataset`` and ``converter`` required.
    """
    written = {} if data is None else data.get("model")
    plugin = isinstance(written, dict) and not written.keys().isdisjoint(PluginSpec.model_fields)
    model = PluginSpec if plugin else ModelSpec
    either = PluginSpec | ModelSpec if data is None else model
    return _registry_spec(tuple(kinds), either, needs_data)


# Building the schema takes longer than validating a file with it.
@lru_cache(maxsize=8)
def _registry_spec(kinds: tuple[Kind, ...], model: Any, needs_data: bool) -> type[RegistrySpec]:
    fields: dict[str, Any] = {}
    for kind in kinds:
        entry = _entry_spec(kind)
        if kind.name == "model":
            continue  # every RegistrySpec has this section
        if kind.claims == "one" and needs_data:
            fields[kind.section] = entry, Field(description=kind.description)
        elif kind.claims in ("one", "optional one"):
            fields[kind.section] = entry | None, Field(None, description=kind.description)
        else:
            fields[kind.section] = list[entry], Field([], description=kind.description)  # type: ignore[valid-type]
    sections: Any = create_model("Sections", __base__=_Versioned, **fields)
    of_model: Any = model | None, RegistrySpec.model_fields["model"]
    # Pydantic orders fields by base class, from the last base to the first: version, sections,
    # model.
    return create_model(
        "RegistrySpec",
        __base__=(RegistrySpec, sections),
        __doc__="A registry file. Sections are in the order in which data passes through them.",
        model=of_model,
    )


def _entry_spec(kind: Kind) -> type[PluginSpec]:
    if kind.name == "dataset":
        return DatasetSpec
    if kind.claimed is not None:
        return FeatureEntrySpec if kind.claimed == "feature" else TableEntrySpec
    return EntrySpec if kind.claims == "list" else PluginSpec
