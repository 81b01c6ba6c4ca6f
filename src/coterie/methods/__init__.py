"""All methods, one file each. Methods listed in METHODS get flags, documentation and tests from their files."""

from __future__ import annotations

from typing import Any

from coterie.core.method import Method
from coterie.methods.ditto import Ditto
from coterie.methods.fedamp import FedAMP
from coterie.methods.fedavg import FedAvg
from coterie.methods.fedavg_ft import FedAvgFT
from coterie.methods.fedbn import FedBN
from coterie.methods.federico import FedeRiCo
from coterie.methods.fedmap import FedMAP
from coterie.methods.fedper import FedPer
from coterie.methods.fedproto import FedProto
from coterie.methods.fedprox import FedProx
from coterie.methods.fedrep import FedRep
from coterie.methods.heurfedamp import HeurFedAMP
from coterie.methods.local import Local
from coterie.methods.per_fedavg import PerFedAvg
from coterie.methods.pfedbred import PFedBreD
from coterie.methods.pfedme import PFedMe
from coterie.methods.pfedvmp import PFedVMP
from coterie.methods.scaffold import Scaffold

METHODS: dict[str, type[Method[Any, Any, Any, Any]]] = {
    "local": Local,
    "fedavg": FedAvg,
    "fedavg-ft": FedAvgFT,
    "fedprox": FedProx,
    "fedbn": FedBN,
    "fedper": FedPer,
    "fedrep": FedRep,
    "fedproto": FedProto,
    "pfedvmp": PFedVMP,
    "fedmap": FedMAP,
    "fedamp": FedAMP,
    "heurfedamp": HeurFedAMP,
    "federico": FedeRiCo,
    "pfedbred": PFedBreD,
    "pfedme": PFedMe,
    "ditto": Ditto,
    "per-fedavg": PerFedAvg,
    "scaffold": Scaffold,
}

__all__ = [
    "METHODS",
    "Ditto",
    "FedAMP",
    "FedAvg",
    "FedAvgFT",
    "FedBN",
    "FedMAP",
    "FedPer",
    "FedProto",
    "FedProx",
    "FedRep",
    "FedeRiCo",
    "HeurFedAMP",
    "Local",
    "PFedBreD",
    "PFedMe",
    "PFedVMP",
    "PerFedAvg",
    "Scaffold",
]
