"""The planner's terms: topologies, work and stages of a step, candidates of ``recd plan``.

For table parts that say what they take, for plan modes, and for what they measure of a machine.
``Work``, what a step takes, is a name of ``recd_plugins.api`` itself. Needs torch and TorchRec.
"""

from recd_plugins.planning.candidates import Candidate, data_of_model, with_plugins
from recd_plugins.planning.collectives import COLLECTIVES
from recd_plugins.planning.compute import Compute, measure_compute
from recd_plugins.planning.constraints import table_constraints
from recd_plugins.planning.equal_gradients import gradients_sent_once
from recd_plugins.planning.fitting import fit_costs
from recd_plugins.planning.machines import default_topology
from recd_plugins.planning.performance import collective_seconds
from recd_plugins.planning.plan_report import report_side
from recd_plugins.planning.report_text import size_text, topology_line
from recd_plugins.planning.setting import RegistryData
from recd_plugins.planning.stage_times import FILE_BYTES_PER_SECOND, predict_stages
from recd_plugins.planning.topologies import TopologySpec, load_topology, this_machine
from recd_plugins.planning.work import (
    EVERY_RANK,
    ID_BYTES,
    NUMBER_BYTES,
    SCALAR_BYTES,
    bytes_of_tables,
    shards_of,
    work_of_step,
)
from recd_plugins.training.turns import steps_in_turns
from recd_plugins.values.collective_rates import CollectiveRate, CollectiveRates
from recd_plugins.values.data_profile import DataProfile, DistinctGradients, DistinctIds, Spread
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
    "Spread",
    "Stage",
    "StageCosts",
    "StageTimes",
    "TopologySpec",
    "bytes_of_tables",
    "collective_seconds",
    "data_of_model",
    "default_topology",
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
    "work_of_step",
]
