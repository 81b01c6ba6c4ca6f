from coterie.cli.flags import ONCE_FOR_EACH, optimizer_settings, settings
from coterie.cli.panels import PANELS
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


def test_every_setting_is_in_one_panel_and_a_new_user_sees_what_to_begin_with_first():
    listed = [name for names in PANELS.values() for name in names]
    assert len(listed) == len(set(listed))
    assert set(listed) == {each.name for each in (*settings(), *optimizer_settings())}
    told = cli("run", "--help").output
    titles = ["Options:", *(f"{title}:" for title in PANELS)]
    assert [line for line in told.splitlines() if line in titles] == titles
    begin = told.partition("To begin with:")[2].partition("Data:")[0]
    assert begin.index("--method") < begin.index("--silos") < begin.index("--rounds")
    assert "--delta" in told.partition("Differential privacy:")[2].partition("Evaluation:")[0]
    assert "--reference" not in cli("compare", "--help").output.partition("Evaluation:")[2].split()


def test_limits_are_readable():
    told = cli("compare", "--help").output
    assert "[x>=1]" in told
    assert "\\[" not in told


def test_optimizers_are_complete():
    told = cli("methods", "local").output
    assert all(name in told for name in OPTIMIZERS)
