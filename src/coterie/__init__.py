"""Coterie: personalised federated learning, correct by law and closed form."""

from coterie import tree
from coterie.data import Federation, from_clients
from coterie.errors import ConfigError, CoterieError, CoterieWarning, DataError
from coterie.evaluation import Benefit
from coterie.experiment.compare import compare
from coterie.experiment.comparison import Comparison
from coterie.experiment.export import export
from coterie.experiment.finished import compare_runs
from coterie.experiment.load import load
from coterie.experiment.onboard import onboard
from coterie.experiment.result import Result
from coterie.experiment.run import resume, run
from coterie.experiment.setup import prepare
from coterie.local import SGD, Adam, AdamW
from coterie.method import Method
from coterie.methods import METHODS
from coterie.task import Task

__version__ = "0.1.0"

__all__ = [
    "METHODS",
    "SGD",
    "Adam",
    "AdamW",
    "Benefit",
    "Comparison",
    "ConfigError",
    "CoterieError",
    "CoterieWarning",
    "DataError",
    "Federation",
    "Method",
    "Result",
    "Task",
    "compare",
    "compare_runs",
    "export",
    "from_clients",
    "load",
    "onboard",
    "prepare",
    "resume",
    "run",
    "tree",
]
