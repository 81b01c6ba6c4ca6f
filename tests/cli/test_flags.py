from coterie.cli.flags import ONCE_FOR_EACH
from coterie.core.optimizers import OPTIMIZERS
from coterie.experiment.config import TABLES, Config
from tests.cli.commands import cli


def test_help_lists_every_setting():
    told = cli("run", "--help").output
    plain = " ".join(told.split())
    for name, field in Config.model_fields.items():
        if name not in TABLES:
            assert f"{ONCE_FOR_EACH.get(name, '--' + name.replace('_', '-'))} " in told
            assert " ".join(field.description.split()) in plain
    assert "--no-reference" in told
    assert "--compile / --no-compile" in told
    assert "--lr NUMBER" in told
    assert "--optimizer sgd|adam|adamw" in told
    assert "coterie methods fedmap" in plain
    assert "default: 20" in plain


def test_optimizers_are_complete():
    told = cli("methods", "local").output
    assert all(name in told for name in OPTIMIZERS)
