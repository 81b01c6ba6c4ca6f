"""A run leaves the process that called it as it was: whoever uses Coterie as a library owns that process."""

import json
import subprocess
import sys

from coterie.compute.availability import unavailable
from coterie.engine.process_pool import can_fork

SCRIPT = """
import contextlib, ctypes, gc, hashlib, importlib, json, logging, os, random, signal, sys, warnings
import numpy as np
import torch
import coterie

# Importing these changes warning filters, the environment, the path and random states, once. That is their doing.
for name in ("plotly.io", "rich.console", "scipy.stats", "setuptools", "sklearn.metrics", "sympy", "torch._dynamo"):
    with contextlib.suppress(ImportError):
        importlib.import_module(name)

DATA_PTR = "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"  # PyTorch tells this to the code that it compiled
asked_of_c = []
original = ctypes.CDLL.__getattr__
ctypes.CDLL.__getattr__ = lambda library, name: (asked_of_c.append(name), original(library, name))[1]

def digest(value):
    return hashlib.blake2b(repr(value).encode()).hexdigest()

def snapshot():
    return {
        "gc": [gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()],
        **{f"${name}": value for name, value in os.environ.items() if name != DATA_PTR},
        "threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "signal handlers": {number.name: str(signal.getsignal(number)) for number in signal.valid_signals()
                            if isinstance(number, signal.Signals)},
        "blocked signals": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "warnings": [text for text in map(str, warnings.filters) if "plotly" not in text],  # it imports as it goes
        "folder": os.getcwd(),
        "random": digest(random.getstate()),
        "numpy random": digest([each.tolist() if isinstance(each, np.ndarray) else each
                                for each in np.random.get_state()]),
        "torch random": digest(torch.get_rng_state().tolist()),
        "path": list(sys.path),
        "torch": [str(torch.get_default_dtype()), torch.is_grad_enabled()],
        "logging": [logging.root.level, str(logging.root.handlers)],
        "hooks": [str(sys.excepthook), str(sys.displayhook)],
        "settings of malloc": sorted({"mallopt", "malloc_trim"} & set(asked_of_c)),
    }

draw = torch.Generator().manual_seed(0)
data = {f"site-{i}": (torch.randn(40, 4, generator=draw), torch.randint(2, (40,), generator=draw)) for i in range(4)}
torch.set_num_threads(2)  # which is not what client work runs on
found = {}
for name, settings in json.loads(sys.argv[1]).items():
    before = snapshot()
    coterie.run("fedavg", data, model="mlp", rounds=2, local_steps=2, out="run " + name, **settings)
    after = snapshot()
    changed = {key for key in before | after if before.get(key) != after.get(key)}
    found[name] = {key: [before.get(key), after.get(key)] for key in sorted(changed)}
print(json.dumps(found))
"""


def test_a_run_changes_nothing_in_the_process_that_called_it(tmp_path):
    """One process for all of them, which imports everything once."""
    runs = {"uncompiled": {"compile": False, "workers": 1}}
    if can_fork():
        runs["processes"] = {"compile": False, "workers": 2, "engine": "loop"}
    if unavailable() is None:
        runs["compiled"] = {"compile": True, "engine": "stacked"}
    command = [sys.executable, "-c", SCRIPT, json.dumps(runs)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {name: {} for name in runs}
