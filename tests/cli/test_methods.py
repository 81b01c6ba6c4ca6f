import sys

from coterie.methods import METHODS
from tests.cli.commands import cli


def test_every_method_is_listed_and_shown():
    listed = cli("methods").output
    for name, cls in METHODS.items():
        first = sys.modules[cls.__module__].__doc__.strip().splitlines()[0]
        assert f"{name} " in listed
        assert first in listed
        told = cli("methods", name).output
        assert first in told
        assert "--weight-decay" in told


def test_a_method_shows_its_equations_and_flags():
    told = cli("methods", "fedmap").output
    assert "log omega_k = -L(theta_k; Z_k)" in told
    for words in ("--sigma2", "15", "a number > 0", "variance of the prior", "omega | samples | uniform", "0.0001"):
        assert words in told
    assert "fedavg has no flags" in cli("methods", "fedavg").output


def test_an_unknown_method_is_suggested():
    result = cli("methods", "fedmapp")
    assert result.exit_code == 2
    assert "there is no method 'fedmapp' (did you mean 'fedmap'?)" in result.stderr
