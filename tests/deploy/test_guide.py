"""docs/deploy.md: its commands are ones that exist, its files can be read by those they are for."""

import configparser
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import typer
import yaml  # Flower needs it, so it is here
from flwr.superlink.cli.flower_superlink import _parse_args_run_superlink
from typer.testing import CliRunner

from coterie.cli import app

GUIDE = (Path(__file__).parents[2] / "docs" / "deploy.md").read_text()
BIN = "/srv/coterie/venv/bin"


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", GUIDE, re.S)


def shell_lines():
    return [
        line.strip().partition("  #")[0] for line in GUIDE.splitlines() if re.match(r"    (coterie|flwr|pip) ", line)
    ]


def units():
    found = {}
    for text in blocks("ini"):
        parser = configparser.ConfigParser(strict=True, interpolation=None)
        parser.optionxform = str
        parser.read_string(text.replace("\\\n", " "))
        found[parser["Unit"]["Description"]] = (parser, text)
    return found


def commands():
    """Every command of the units and of the Compose file, as words."""
    inner = [service["command"] for file in blocks("yaml") for service in yaml.safe_load(file)["services"].values()]
    lines = [parser["Service"]["ExecStart"] for parser, _ in units().values()]
    lines += [shlex.split(line)[2].partition("exec ")[2] for line in inner]
    return [shlex.split(line.removeprefix(f"{BIN}/")) for line in lines]


def test_units_and_services_start_a_superlink_and_a_site_each():
    assert [words[:2] for words in commands()] == [
        ["flower-superlink", "--host"],
        ["coterie", "site"],
        ["flower-superlink", "--host"],
        ["coterie", "site"],
    ]


@pytest.mark.parametrize("words", commands(), ids=lambda words: words[0])
def test_their_options_exist(words):
    if words[0] == "flower-superlink":
        told = _parse_args_run_superlink().parse_args(words[1:])
        assert (told.enable_supernode_auth, told.runtime_dependency_install) == (True, False)
        return
    site = typer.main.get_command(app).commands["site"]
    known = {name for each in site.params for name in each.opts}
    needed = {each.opts[0] for each in site.params if each.required}
    given = {word for word in words if word.startswith("--")}
    assert needed <= given <= known


def test_systemd_takes_the_units(tmp_path):
    assert len(units()) == 2
    for parser, _ in units().values():
        assert parser["Service"]["Restart"] == "always"
        assert parser["Install"]["WantedBy"] == "multi-user.target"
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd-analyze here")
    for i, (_, text) in enumerate(units().values()):
        for name in ("flower-superlink", "coterie"):
            (tmp_path / name).symlink_to(shutil.which("true")) if i == 0 else None
        path = tmp_path / f"unit-{i}.service"
        path.write_text(text.replace(BIN, str(tmp_path)).replace("/srv/coterie", str(tmp_path)))
        told = subprocess.run(
            ["systemd-analyze", "verify", "--man=no", str(path)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        mine = [line for line in told.stderr.splitlines() if path.name in line]
        assert not mine, told.stderr


def test_compose_has_what_it_mounts():
    for text in blocks("yaml"):
        for service in yaml.safe_load(text)["services"].values():
            inside = {volume.split(":")[1] for volume in service["volumes"]}
            used = {f"/{path}" for path in re.findall(r" /(\w+)/", service["command"])}
            assert used <= inside
            assert service["restart"] == "always"


def test_the_lines_to_type_are_commands_that_work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    certs, init = (
        next(line for line in shell_lines() if f"coterie flower {what}" in line) for what in ("certs", "init")
    )
    for line in (certs, init):
        told = CliRunner().invoke(app, shlex.split(line)[1:])
        assert told.exit_code == 0, told.output
    for path in re.findall(r"`(certs/[\w.-]+)`", GUIDE):
        assert (tmp_path / path).exists(), path
    config = tomllib.loads((tmp_path / "stroke" / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    assert {"names", "keys", "key", "out", "deadline", "quorum", "norm_bound", "sealed"} <= config["deploy"].keys()
    assert set(re.findall(r"deploy\.(\w+)", GUIDE)) <= config["deploy"].keys()
    superlink = tomllib.loads(blocks("toml")[0])["superlink"]
    assert superlink.keys() == {"hospitals"}
    assert not (tmp_path / "hospitals").exists(), "flwr would take it for an app"
    assert "flwr run stroke hospitals --stream" in GUIDE
    resume = typer.main.get_command(app).commands["flower"].commands["resume"]
    given = re.findall(r"`coterie flower resume RUN (--\w+) \w+ (--\w+) hospitals`", GUIDE)[0]
    assert set(given) <= {name for each in resume.params for name in each.opts}
