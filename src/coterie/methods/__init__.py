"""One method, one file. A method listed here has flags, documentation and tests without another line."""

from __future__ import annotations

from typing import Any

from coterie.method import Method
from coterie.methods.fedavg import FedAvg
from coterie.methods.fedavg_ft import FedAvgFT
from coterie.methods.fedbn import FedBN
from coterie.methods.fedmap import FedMAP
from coterie.methods.fedprox import FedProx
from coterie.methods.local import Local

METHODS: dict[str, type[Method[Any, Any, Any, Any]]] = {
    "local": Local,
    "fedavg": FedAvg,
    "fedavg-ft": FedAvgFT,
    "fedprox": FedProx,
    "fedbn": FedBN,
    "fedmap": FedMAP,
}

__all__ = ["METHODS", "FedAvg", "FedAvgFT", "FedBN", "FedMAP", "FedProx", "Local"]
