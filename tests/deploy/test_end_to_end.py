"""As users do it: commands in real processes, on loopback, with time limits, stopped by their ids. Minutes, so slow."""

import csv
import json
import os
import random
import signal
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from coterie.deploy import processes
from coterie.deploy.ledger import Ledger
from coterie.deploy.up import part_of
from coterie.experiment.setup import prepare
from coterie.experiment.take_home.load import load
from coterie.storage import files
from coterie.storage.run_folder import RunFolder

from .inprocess import same, simulate
from .test_flower import LOOP
from .test_up import compare

pytestmark = pytest.mark.slow
PLAIN = ["--rounds", "3", "--seed", "1", "--no-reference", "--no-report"]


def coterie(*words, cwd, seconds=300):
    command = [sys.executable, "-m", "coterie", *map(str, words)]
    return processes.call(command, processes.environment(cwd / "home"), seconds, cwd)


def flwr(*words, cwd, seconds=300):
    return processes.call(
        [processes.program("flwr"), *map(str, words)], processes.environment(cwd / "home"), seconds, cwd
    )


@pytest.fixture
def started():
    """Starts processes, and stops them, each by its id, whatever happens."""
    running = []

    def start(command, log, env, cwd):
        running.append(processes.Process([str(word) for word in command], log, env, cwd))
        return running[-1]

    yield start
    for process in running:
        process.ask_to_stop()
    for process in running:
        process.stop()


def until(reached, seconds, process, every=0.2):
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        if reached():
            return
        assert process.running, process.tail(30)
        time.sleep(every)
    raise AssertionError(process.tail(30))


def table(out: Path):
    path = out / "sites.json"
    return json.loads(path.read_text()) if path.exists() else {"round": 0, "finished": False}


@pytest.mark.skipif(find_spec("ray") is None, reason="needs pip install 'coterie[ray]'")
def test_an_app_runs_in_rays_simulation_and_its_bits_are_the_simulators(tmp_path, started):
    """`coterie flower init`, then `flwr run`, on a SuperLink as `flwr run . local` starts it, but at a free port."""
    port = processes.free_ports(1)[0]
    command = [processes.program("flower-superlink"), "--insecure", "--simulation", "--isolation", "subprocess"]
    command += ["--host", "127.0.0.1", "--port", port, "--database", tmp_path / "state.db"]
    more = {"COTERIE_SITES": str(tmp_path / "sites"), "OMP_NUM_THREADS": "1"}
    env = processes.environment(tmp_path / "home", more)
    del env["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"]  # as a user has it: the app must not need it
    link = started(command, tmp_path / "superlink.log", env, tmp_path)
    processes.wait_for_port(port, link, 180)
    where = f'[superlink.local]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    files.write_text(tmp_path / "home" / "config.toml", where)
    size = "num-supernodes=3 client-resources-num-cpus=1 init-args-num-cpus=2"
    for method in ("fedmap", "fedamp"):
        coterie("flower", "init", method, "--method", method, "--data", "digits", "--sites", "3", *PLAIN, cwd=tmp_path)
        out = tmp_path / "runs" / method
        told = flwr(
            *("run", method, "local", "--stream", "--federation-config", size),
            *("--run-config", f'deploy.out="{out}" deploy.joining=120.0'),
            cwd=tmp_path,
            seconds=240,
        )
        assert "3 of 3 sites" in told
        assert (out / "summary.json").exists(), told
        setup = part_of(prepare(method, "digits", rounds=3, seed=1, reference=False, **LOOP), 3)
        sim = simulate(setup)
        kept, _ = RunFolder(out).load(3, type(sim.state)(sim.state.server, ()))
        assert same(kept.server, sim.state.server)


def test_up_is_killed_and_resumed_by_commands(tmp_path, started):
    """The SuperLink and its ServerApp are killed in round 2: `up` says how to go on, and `resume` does."""
    out = tmp_path / "run"
    words = ["flower", "up", "--sites", "2", "--method", "fedamp", "--data", "digits", "--out", out, *PLAIN]
    env = processes.environment(tmp_path / "home")
    up = started([sys.executable, "-m", "coterie", *words], tmp_path / "up.log", env, tmp_path)
    until(lambda: table(out)["round"] == 1, 600, up)
    servers = [pid for pid, _ in processes.descendants(up.pid) if _is_server(pid)]
    assert len(servers) >= 2, "a SuperLink and a ServerApp"
    for pid in servers:
        os.kill(pid, signal.SIGKILL)
    up.process.wait(60)
    told = up.tail(50)
    assert up.process.returncode == 1
    assert "the SuperLink ended" in told
    assert f"coterie flower resume {out}" in told
    assert not table(out)["finished"]
    told = coterie("flower", "resume", out, cwd=tmp_path, seconds=900)
    assert "Continuing after round" in told
    assert "round 3 of 3 closed" in told
    setup = part_of(prepare("fedamp", "digits", rounds=3, seed=1, reference=False, **LOOP), 2)
    compare(setup, _Result(out), out)
    assert not processes.descendants(os.getpid()), "everything is stopped"


class _Result:
    """What `compare` asks of a result, from the run folder."""

    def __init__(self, out):
        self.selected = json.loads((out / "summary.json").read_text())["selected_round"]
        self.clients = RunFolder(out).read_clients()


def _is_server(pid):
    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return any(Path(word.decode()).name in ("flower-superlink", "flwr-serverapp") for word in words[:3] if word)


def test_two_sites_with_their_own_files_as_the_guide_says(tmp_path, started):
    """docs/deploy.md, with two hospitals and on loopback; the server is killed in the middle and resumed."""
    rows = {"aachen": 160, "bergen": 90}
    draw = random.Random(1)
    for name, size in rows.items():
        with (tmp_path / f"{name}.csv").open("w", newline="") as file:
            lines = csv.writer(file)
            lines.writerow(["age", "pressure", "sex", "outcome"])
            for _ in range(size):
                age, pressure, sex = draw.gauss(65, 10), draw.gauss(140, 15), draw.choice("mf")
                score = (age - 65) / 10 + (pressure - 140) / 30 + draw.gauss(0, 0.7)
                lines.writerow([round(age, 1), round(pressure, 1), sex, "stroke" if score > 0 else "none"])
    coterie("flower", "certs", *rows, "--host", "127.0.0.1", "--out", "certs", cwd=tmp_path)
    words = ["--method", "fedmap", "--model", "mlp", "--data", "stroke", "--rounds", "4", "--lr", "0.01"]
    coterie("flower", "init", "stroke", *words, "--sites", "2", cwd=tmp_path)
    place = tmp_path / "stroke" / "pyproject.toml"
    told = place.read_text()
    for key, value in {
        "names": "aachen,bergen",
        "keys": tmp_path / "certs" / "keys",
        "key": tmp_path / "certs" / "server-app.key",
        "out": tmp_path / "runs" / "stroke",
    }.items():
        told = told.replace(f'\n{key} = ""\n', f'\n{key} = "{value}"\n')
    place.write_text(told)
    port, out = processes.free_ports(1)[0], tmp_path / "runs" / "stroke"
    command = [processes.program("flower-superlink"), "--host", "127.0.0.1", "--port", port]
    command += ["--ssl-ca-certfile", "certs/ca.crt", "--ssl-certfile", "certs/server.crt"]
    command += ["--ssl-keyfile", "certs/server.key", "--enable-supernode-auth", "--database", "superlink.db"]
    command += ["--disable-runtime-dependency-installation"]
    env = processes.environment(tmp_path / "home")
    link = started(command, tmp_path / "superlink.log", env, tmp_path)
    processes.wait_for_port(port, link, 180)
    where = f'address = "127.0.0.1:{port}"\nroot-certificates = "{tmp_path / "certs" / "ca.crt"}"\n'
    files.write_text(tmp_path / "home" / "config.toml", f"[superlink.hospitals]\n{where}")
    sites = {}
    for name in rows:
        flwr("supernode", "register", f"certs/sites/{name}.key.pub", "hospitals", cwd=tmp_path)
        own = ["--data", f"{name}.csv", "--target", "outcome", "--superlink", f"127.0.0.1:{port}"]
        own += ["--root-certificates", "certs/ca.crt", "--key", f"certs/sites/{name}.key"]
        own += ["--server-key", "certs/server-app.key.pub", "--folder", f"at-{name}"]
        command_here = [sys.executable, "-m", "coterie", "site", *own]
        sites[name] = started(command_here, tmp_path / f"{name}.log", env, tmp_path)

    flwr("run", "stroke", "hospitals", cwd=tmp_path)
    until(lambda: table(out)["finished"], 600, link)
    first = Ledger.load(out).run

    again = tmp_path / "runs" / "again"
    flwr("run", "stroke", "hospitals", "--run-config", f'deploy.out="{again}"', cwd=tmp_path)
    until(lambda: table(again)["round"] == 2, 600, link)
    link.kill()
    link = started(command, tmp_path / "superlink.log", env, tmp_path)
    processes.wait_for_port(port, link, 180)
    words = ["--app", "stroke", "--superlink", "hospitals"]
    assert "Continuing after round" in coterie("flower", "resume", again, *words, cwd=tmp_path)
    until(lambda: table(again)["finished"], 600, link)
    second = Ledger.load(again).run

    assert (out / "clients.csv").read_text() == (again / "clients.csv").read_text()
    assert not (out / "clients").exists(), "models stay at the sites"
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    for name, size in rows.items():
        one, other = (tmp_path / f"at-{name}" / run / name / "result" for run in (first, second))
        for part in ("clients", "reference/clients"):
            model = f"{part}/{name}/model.safetensors"
            assert (one / model).read_bytes() == (other / model).read_bytes()
        card = json.loads((one / "clients" / name / "card.json").read_text())
        assert (card["clients"], card["client"]) == (2, name)
        assert "one of 2 clients" in (one / "clients" / name / "card.md").read_text()
        assert "<html" in (one / "report.html").read_text()[:500]
        assert sum(card["data"][part] for part in ("train", "validation", "test")) == size
        assert load(one, name)(x).shape == (5, 2)
        log = sites[name].tail(40)
        assert f"{first}: round 4 of 4 done" in log
        assert f"finished; model, card and report are in '{one}'" in log
        predicted = coterie("predict", one, f"{name}.csv", "--client", name, cwd=tmp_path)
        assert len(predicted.splitlines()) == size + 1
    strangers = {path.name for path in tmp_path.glob("at-aachen/*/*")} & {"bergen"}
    assert not strangers
