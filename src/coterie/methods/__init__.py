"""All methods, one file each. Methods listed in METHODS get flags, documentation and tests from their files."""

from __future__ import annotations

from typing import Any

from coterie.core.method import Method
from coterie.methods.apfl import APFL
from coterie.methods.clustered_fl import ClusteredFL
from coterie.methods.ditto import Ditto
from coterie.methods.fedala import FedALA
from coterie.methods.fedamp import FedAMP
from coterie.methods.fedavg import FedAvg
from coterie.methods.fedavg_ft import FedAvgFT
from coterie.methods.fedbabu import FedBABU
from coterie.methods.fedbn import FedBN
from coterie.methods.fedcp import FedCP
from coterie.methods.fedem import FedEM
from coterie.methods.fedep_ft import FedEPFT
from coterie.methods.federico import FedeRiCo
from coterie.methods.fedfomo import FedFomo
from coterie.methods.fedmap import FedMAP
from coterie.methods.fedpa_ft import FedPAFT
from coterie.methods.fedpac import FedPAC
from coterie.methods.fedper import FedPer
from coterie.methods.fedproto import FedProto
from coterie.methods.fedprox import FedProx
from coterie.methods.fedprox_ft import FedProxFT
from coterie.methods.fedrep import FedRep
from coterie.methods.fedrod import FedROD
from coterie.methods.gpfl import GPFL
from coterie.methods.heurfedamp import HeurFedAMP
from coterie.methods.ifca import IFCA
from coterie.methods.lg_fedavg import LGFedAvg
from coterie.methods.local import Local
from coterie.methods.moon import MOON
from coterie.methods.per_fedavg import PerFedAvg
from coterie.methods.pfedbayes import PFedBayes
from coterie.methods.pfedbred import PFedBreD
from coterie.methods.pfedgp import PFedGP
from coterie.methods.pfedme import PFedMe
from coterie.methods.pfedvmp import PFedVMP
from coterie.methods.qlsd_ft import QLSDFT
from coterie.methods.scaffold import Scaffold

METHODS: dict[str, type[Method[Any, Any, Any, Any]]] = {
    "local": Local,
    "fedavg": FedAvg,
    "fedavg-ft": FedAvgFT,
    "fedprox": FedProx,
    "fedprox-ft": FedProxFT,
    "moon": MOON,
    "scaffold": Scaffold,
    "fedpa-ft": FedPAFT,
    "fedbn": FedBN,
    "fedper": FedPer,
    "fedrep": FedRep,
    "fedbabu": FedBABU,
    "lg-fedavg": LGFedAvg,
    "fedrod": FedROD,
    "fedpac": FedPAC,
    "fedproto": FedProto,
    "pfedvmp": PFedVMP,
    "fedmap": FedMAP,
    "fedamp": FedAMP,
    "heurfedamp": HeurFedAMP,
    "federico": FedeRiCo,
    "fedem": FedEM,
    "ifca": IFCA,
    "clustered-fl": ClusteredFL,
    "pfedbred": PFedBreD,
    "pfedme": PFedMe,
    "pfedbayes": PFedBayes,
    "pfedgp": PFedGP,
    "ditto": Ditto,
    "apfl": APFL,
    "fedala": FedALA,
    "per-fedavg": PerFedAvg,
    "fedcp": FedCP,
    "gpfl": GPFL,
    "fedfomo": FedFomo,
    "fedep-ft": FedEPFT,
    "qlsd-ft": QLSDFT,
}

__all__ = [
    "APFL",
    "GPFL",
    "IFCA",
    "METHODS",
    "MOON",
    "QLSDFT",
    "ClusteredFL",
    "Ditto",
    "FedALA",
    "FedAMP",
    "FedAvg",
    "FedAvgFT",
    "FedBABU",
    "FedBN",
    "FedCP",
    "FedEM",
    "FedEPFT",
    "FedFomo",
    "FedMAP",
    "FedPAC",
    "FedPAFT",
    "FedPer",
    "FedProto",
    "FedProx",
    "FedProxFT",
    "FedROD",
    "FedRep",
    "FedeRiCo",
    "HeurFedAMP",
    "LGFedAvg",
    "Local",
    "PFedBayes",
    "PFedBreD",
    "PFedGP",
    "PFedMe",
    "PFedVMP",
    "PerFedAvg",
    "Scaffold",
]
