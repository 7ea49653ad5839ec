"""WHO sends WHICH bytes to whom. Pure functions of layouts: no torch, no clock, no network.

    index_sources   all writer ranks' layouts -> disjoint cells and who holds each
    plan_copies     cells x one destination's shards -> copies, proved complete
    lower_copies    copies -> strided descriptors per source, adjacent ones merged
    select_tensors  descriptors -> those that a partial update needs

Each rank computes only its own part; ``fingerprint`` lets both ends of a pair
check that they computed the same.
"""

from awex_core.plan.cells import SourceIndex, index_sources
from awex_core.plan.copies import CopyTable, check_precision, choose_replicas, plan_copies, plan_part
from awex_core.plan.program import CopyProgram, lower_all, lower_copies
from awex_core.plan.select import check_patterns, matching_names, select_tensors, take_tensors
from awex_core.plan.sharing import check_distinct, destination_faults
from awex_core.plan.unused import unused_tensors

__all__ = [
    "CopyProgram",
    "CopyTable",
    "SourceIndex",
    "check_distinct",
    "check_patterns",
    "check_precision",
    "choose_replicas",
    "destination_faults",
    "index_sources",
    "lower_all",
    "lower_copies",
    "matching_names",
    "plan_copies",
    "plan_part",
    "select_tensors",
    "take_tensors",
    "unused_tensors",
]
