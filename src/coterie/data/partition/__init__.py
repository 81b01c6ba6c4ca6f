"""Dealing one data set out to clients: pure functions of labels and seed. Every example goes to at most one client."""

from coterie.data.partition.even import iid, merged, natural, quantity, subsample
from coterie.data.partition.few import classes, shards
from coterie.data.partition.grouped import FEDAMP, Group, groups, practical
from coterie.data.partition.sizes import lognormal
from coterie.data.partition.skew import clusters, dirichlet
from coterie.data.partition.spec import PARTITIONS, check_spec, deal

__all__ = [
    "FEDAMP",
    "PARTITIONS",
    "Group",
    "check_spec",
    "classes",
    "clusters",
    "deal",
    "dirichlet",
    "groups",
    "iid",
    "lognormal",
    "merged",
    "natural",
    "practical",
    "quantity",
    "shards",
    "subsample",
]
