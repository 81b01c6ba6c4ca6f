import pytest

from coterie.core.errors import ConfigError
from coterie.deploy import app as app_folder
from coterie.deploy import settings
from coterie.deploy.flower import server_app
from coterie.deploy.up import app_config
from coterie.experiment.setup import prepare
from tests.deploy.test_flower import LOOP


def test_an_app_says_all_and_reads_itself_back(tmp_path):
    setup = prepare("fedamp", "digits", rounds=7, seed=4, lam=0.5, lr=0.2, **LOOP)
    out = app_folder.write(tmp_path / "my federation", setup.config, {"sites": 3, "deadline": 5.0})
    config, method, deploy = settings.read(app_config(out), own_data=False, own_model=False)
    assert method == setup.method
    assert config == setup.config.model_copy(
        update={"engine": "auto", "compile": None, "workers": None, "average": "trimmed"}
    )
    assert (deploy.sites, deploy.deadline, deploy.federation) == (3, 5.0, "my-federation")
    assert deploy.rules().deadline == 5.0
    shown = app_config(out)
    assert {"clients_per_round", "local_steps", "head"} <= shown.keys(), "what is not set can be set for one run"
    config, *_ = settings.read({**shown, "local_steps": 4, "clients_per_round": 2}, own_data=False, own_model=False)
    assert (config.local_steps, config.clients_per_round) == (4, 2)
    with pytest.raises(ConfigError, match="already contains an app"):
        app_folder.write(out, setup.config, {})
    with pytest.raises(ConfigError) as caught:
        settings.read({**shown, "rounds": 0, "deploy.quorum": 2}, own_data=False, own_model=False)
    assert len(caught.value.problems) == 2
    for part in ("server_app", "client_app"):
        compile((out / "my_federation" / f"{part}.py").read_text(), part, "exec")
    assert server_app() is not None


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"privacy": "record", "noise": 1.0}, "not together with privacy"),
        ({"deploy.recommend": "local,fedavg"}, "one by one"),
    ],
)
def test_secure_sums_go_with_neither_privacy_nor_a_recommendation(more, words):
    with pytest.raises(ConfigError, match=words):
        settings.read(
            {"method": "fedavg", "data": "digits", "deploy.secure": True, "deploy.sites": 4, **more},
            own_data=False,
            own_model=False,
        )
