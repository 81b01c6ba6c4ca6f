from pathlib import Path

import pytest

from coterie.core import extensions
from coterie.core.errors import ConfigError
from coterie.core.extensions import find, with_options

KNOWN = {"constant": "the library's own"}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An installed package that adds schedules, one of which cannot be imported."""
    (tmp_path / "restarting.py").write_text("Restarts = 'from a package'\n")
    facts = tmp_path / "restarting-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: restarting\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text(
        "[coterie.schedules]\nwarm-restarts = restarting:Restarts\nconstant = restarting:Restarts\n"
        "lost = restarting:Lost\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    extensions.added.cache_clear()
    yield
    extensions.added.cache_clear()


def test_the_library_s_own_come_before_packages_before_import_paths(package):
    assert find("schedule", "constant", KNOWN) == "the library's own"
    assert find("schedule", "warm-restarts", KNOWN) == "from a package"
    assert find("schedule", "restarting:Restarts", KNOWN) == "from a package"


def test_words_after_a_name_are_options(package):
    assert with_options("schedule", "constant", KNOWN) == ("the library's own", [])
    assert with_options("schedule", "constant:a=1:b", KNOWN) == ("the library's own", ["a=1", "b"])
    assert with_options("schedule", "warm-restarts:period=3", KNOWN) == ("from a package", ["period=3"])
    assert with_options("schedule", "restarting:Restarts:period=3", KNOWN) == ("from a package", ["period=3"])


def test_what_is_not_there_is_said_in_words(package):
    for name, words in (
        ("constnt", r"no schedule 'constnt' \(did you mean 'constant'\?\); there are constant, warm-restarts, lost"),
        ("lost", r"schedule 'lost' of package restarting cannot be imported \(restarting:Lost\): AttributeError"),
        ("restarting:Lost", "schedule 'restarting:Lost' cannot be imported"),
        ("nowhere:at_all", "schedule 'nowhere:at_all' cannot be imported"),
    ):
        with pytest.raises(ConfigError, match=words):
            find("schedule", name, KNOWN)


def test_a_misspelt_name_with_options_is_no_import_path(package):
    for text in ("constnt:value=2", "constnt:2", "constnt:0.5"):
        with pytest.raises(ConfigError, match=r"no schedule 'constnt' \(did you mean 'constant'\?\)"):
            with_options("schedule", text, KNOWN)
    with pytest.raises(ConfigError, match=r"no callback 'often'; give an import path, package\.module:name"):
        with_options("callback", "often", {})


def test_a_package_adds_methods_and_models(tmp_path, monkeypatch):
    import torch

    from coterie.methods.fields import find_method
    from coterie.models import find_model

    (tmp_path / "mean_and_wide.py").write_text(
        "import torch\nfrom coterie.methods.fedavg import FedAvg as Mean\n"
        "def Wide(shape, outputs, *, width=3):\n"
        "    return torch.nn.Sequential(torch.nn.Linear(*shape, width), torch.nn.Linear(width, outputs))\n"
    )
    facts = tmp_path / "mean_and_wide-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: mean_and_wide\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text(
        "[coterie.methods]\nmean = mean_and_wide:Mean\n[coterie.models]\nwide = mean_and_wide:Wide\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    extensions.added.cache_clear()
    try:
        assert find_method("mean")[0].__name__ == "FedAvg"
        assert find_model("wide:width=7")((4,), 2)(torch.zeros(1, 4)).shape == (1, 2)
        with pytest.raises(ConfigError, match=r"no option 'depth' \(did.*\); write wide\[:width=3\]"):
            find_model("wide:depth=7")
    finally:
        extensions.added.cache_clear()
