"""Partitions split a data set among clients: pure functions of labels and seed. An example has at most one owner."""

from coterie.data.partition.grouped import FEDAMP, Group, groups, practical
from coterie.data.partition.label_free import iid, merged, natural, quantity, subsample
from coterie.data.partition.pathological import classes, shards
from coterie.data.partition.sizes import lognormal
from coterie.data.partition.skew import clusters, dirichlet
from coterie.data.partition.spec import PARTITIONS, WITHOUT_LABELS, check_spec, deal

__all__ = [
    "FEDAMP",
    "PARTITIONS",
    "WITHOUT_LABELS",
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
