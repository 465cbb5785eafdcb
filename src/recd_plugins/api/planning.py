"""The planner's terms: topologies, work and stages of a step, candidates of ``recd plan``.

For table parts that say what they take, for plan modes, and for what they measure of a machine.
``StepCost``, what a step takes, is a name of ``recd_plugins.api`` itself. Needs torch and TorchRec.
"""

from recd_plugins.planning.compute import Compute, measure_compute
from recd_plugins.planning.constraints import table_constraints
from recd_plugins.planning.profile import gradients_sent_once
from recd_plugins.planning.report import size_text, topology_line
from recd_plugins.planning.setting import RegistryData
from recd_plugins.planning.step_cost import (
    COLLECTIVES,
    EVERY_RANK,
    ID_BYTES,
    NUMBER_BYTES,
    SCALAR_BYTES,
    bytes_of_tables,
    collective_seconds,
    estimate_step_cost,
    fit_costs,
    predict_stages,
    shards_of,
)
from recd_plugins.planning.study import Candidate, data_of_model, report_side, with_plugins
from recd_plugins.planning.topologies import (
    FILE_BYTES_PER_SECOND,
    TopologySpec,
    default_topology,
    load_topology,
    this_machine,
)
from recd_plugins.training.turns import steps_in_turns
from recd_plugins.values.collective_rates import CollectiveRate, CollectiveRates
from recd_plugins.values.data_profile import DataProfile, DistinctGradients, DistinctIds
from recd_plugins.values.stage_costs import StageCosts
from recd_plugins.values.stages import STAGES, Stage, StageTimes, stage_of

__all__ = [
    "COLLECTIVES",
    "EVERY_RANK",
    "FILE_BYTES_PER_SECOND",
    "ID_BYTES",
    "NUMBER_BYTES",
    "SCALAR_BYTES",
    "STAGES",
    "Candidate",
    "CollectiveRate",
    "CollectiveRates",
    "Compute",
    "DataProfile",
    "DistinctGradients",
    "DistinctIds",
    "RegistryData",
    "Stage",
    "StageCosts",
    "StageTimes",
    "TopologySpec",
    "bytes_of_tables",
    "collective_seconds",
    "data_of_model",
    "default_topology",
    "estimate_step_cost",
    "fit_costs",
    "gradients_sent_once",
    "load_topology",
    "measure_compute",
    "predict_stages",
    "report_side",
    "shards_of",
    "size_text",
    "stage_of",
    "steps_in_turns",
    "table_constraints",
    "this_machine",
    "topology_line",
    "with_plugins",
]
