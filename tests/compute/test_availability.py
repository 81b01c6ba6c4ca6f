"""Why nothing can be compiled is said in one true sentence."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from coterie import ConfigError
from coterie.compute import availability, compiled, step_key, torch_private
from coterie.compute.availability import unavailable
from coterie.compute.compiled import Compiled, backend
from coterie.compute.packing import Packed
from coterie.core.backend import using
from coterie.core.batches import Batches
from coterie.core.plain import Plain
from coterie.core.scan import scan
from tests.marks import compiles

INDEX = torch.zeros(1, 2, 3, dtype=torch.int64)  # two minibatches of three examples
ONES = Batches(torch.ones(1, 1), torch.zeros(1), INDEX, torch.ones(INDEX.shape), INDEX[..., 0], torch.tensor(6.0))


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    """What a process knows of its machine is asked once: these tests change it."""
    yield
    step_key.machine.cache_clear()


def test_the_environment_can_ask_for_plain_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COTERIE_BACKEND", "plain")
    assert unavailable() == "COTERIE_BACKEND=plain asks for ordinary PyTorch"
    assert isinstance(backend(compiled=True), Plain)
    assert isinstance(backend(compiled=False), Plain)
    monkeypatch.setenv("COTERIE_BACKEND", "fast")
    with pytest.raises(ConfigError, match="COTERIE_BACKEND=fast: choose from auto, plain"):
        unavailable()


def test_no_compiler_is_said_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("COTERIE_BACKEND", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "c++-of-mine")
    assert "c++-of-mine is not on the PATH" in (unavailable() or "")
    assert isinstance(backend(compiled=True), Packed)


def test_a_private_name_that_is_missing_is_said_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COTERIE_BACKEND", raising=False)
    monkeypatch.setattr(availability, "compiler", lambda: "g++")
    monkeypatch.setitem(torch_private.NAMES, "compile_fx", "torch._inductor.compile_fx:gone")
    for cached in (torch_private.private, torch_private.missing, availability._unavailable):
        cached.cache_clear()
    try:
        assert "has no torch._inductor.compile_fx.gone" in (unavailable() or "")
        monkeypatch.setattr(compiled, "_compiled", {})
        with compiled.observing() as seen, using(backend(compiled=True)):
            found = scan(lambda carry, aux, batch: carry + batch.x.sum(), torch.zeros(()), (), ONES)
        assert found == 6
        assert [(each.path, each.why) for each in seen] == [("plain", unavailable())]
    finally:
        monkeypatch.undo()
        for cached in (torch_private.private, torch_private.missing, availability._unavailable):
            cached.cache_clear()


@compiles
def test_all_names_are_here() -> None:
    assert isinstance(backend(compiled=True), Compiled)
    assert all(map(torch_private.has, torch_private.OPTIONAL)), "compiling would be slow"
