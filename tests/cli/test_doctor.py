"""What `coterie doctor` says is true."""

from __future__ import annotations

import json
import tomllib

import pytest
import torch
from typer.testing import CliRunner

from coterie.cli import app
from coterie.cli.doctor import PACKAGES
from coterie.compute import self_check as module
from tests.marks import compiles
from tests.places import ROOT


def doctor(*words: str, code: int = 0, **environment: str) -> str:
    result = CliRunner(env={"COLUMNS": "200", **environment}).invoke(app, ["doctor", *words])
    assert result.exit_code == code, result.output
    return result.output


@compiles
@pytest.mark.xdist_group("doctor compiles")
def test_the_fast_path_is_tried() -> None:
    told = json.loads(doctor("--json"))
    assert told["fast path"]["path"] == "replayed"
    assert told["fast path"]["right"] is True
    assert told["torch"] == torch.__version__
    assert "digits" in told["data here"]
    assert "all is well" in doctor()


def test_plain_is_said_with_its_reason() -> None:
    told = doctor(COTERIE_BACKEND="plain")
    assert "plain: COTERIE_BACKEND=plain asks for ordinary PyTorch" in told


def test_no_compiler_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COTERIE_BACKEND", raising=False)
    told = doctor(PATH="", CXX="g++")
    assert "plain: there is no C++ compiler: g++ is not on the PATH" in told
    assert "none (g++ is not on the PATH)" in told


@compiles
@pytest.mark.xdist_group("doctor compiles")
def test_wrong_results_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    right = module._train
    monkeypatch.setattr(module, "_train", lambda backend: right(backend) + isinstance(backend, module.Compiled))
    assert "Compiled steps are wrong on this machine" in doctor(code=1)


@compiles
def test_what_compiling_raises_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("cannot allocate\nmore words")

    monkeypatch.setattr("coterie.compute.compiled.compile_graph", broken)
    monkeypatch.setattr("coterie.compute.compiled._compiled", {})
    assert "plain: cannot allocate" in doctor()


def test_every_extra_for_users_is_told() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    others = {"ray", "browser", "dev", "docs"}  # for simulations of Flower, tests and the site
    assert PACKAGES.keys() == extras.keys() - others
