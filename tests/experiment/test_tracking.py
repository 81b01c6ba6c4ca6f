import importlib.util
import json

import pytest

import coterie
from coterie.core.errors import ConfigError, CoterieWarning
from coterie.experiment import tracking
from coterie.experiment.tracking import Tracking, _allowed, scalars
from tests.experiment.test_run import QUICK, clients, model

RECORD = {
    **{"round": 3, "participants": ["b"], "info": {"loss": [0.5]}, "server": {"weight": [1, 2]}},
    **{"bytes_up": 7, "bytes_down": 9, "seconds": 0.1, "test": {"accuracy": [0.5, None]}},
}


def run(out, **settings):
    return coterie.run("fedavg", clients(), model=model(), out=out, rounds=2, lr=0.3, **{**QUICK, **settings})


def test_scalars_are_per_client_and_their_mean():
    assert dict(scalars(RECORD, ["a", "b"])) == {
        **{"bytes_up": 7, "bytes_down": 9, "seconds": 0.1, "train/loss/mean": 0.5, "train/loss/b": 0.5},
        **{"test/accuracy/mean": 0.5, "test/accuracy/a": 0.5},
    }


def test_what_is_wrong_is_told_before_anything_trains(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="there is no tracker 'tensorbord'; there are tensorboard, mlflow"):
        run(tmp_path / "run", track="tensorbord")
    with pytest.raises(ConfigError, match="track needs a run folder"):
        run(None, track="tensorboard")
    monkeypatch.setattr(tracking.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"coterie\[tensorboard\].*\n.*coterie\[mlflow\]"):
        run(tmp_path / "run", track="tensorboard, mlflow")
    assert not (tmp_path / "run").exists()


def test_a_tracker_that_fails_is_left_and_the_run_goes_on(tmp_path):
    class Broken:
        def log(self, step, scalars):
            raise OSError("no route to host")

        def close(self): ...

    all_of_them = Tracking(None, tmp_path, {}, ["a", "b"], 0)
    all_of_them._trackers.append(Broken())
    with pytest.warns(CoterieWarning, match="Broken failed and is not used any more in this run: no route to host"):
        all_of_them.round(RECORD)
    all_of_them.round(RECORD)


def test_tensorboard_has_every_client(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install 'coterie[tensorboard]'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = run(tmp_path / "run", track="tensorboard", reference=True)
    for folder, found in ((tmp_path / "run", result), (tmp_path / "run" / "reference", result.reference)):
        events = EventAccumulator(str(folder / "tensorboard"))
        events.Reload()
        for i, name in enumerate(result.names):
            points = events.Scalars(f"test/accuracy/{name}")
            assert [point.step for point in points] == [1, 2]
            assert [point.value for point in points] == pytest.approx([r["test"]["accuracy"][i] for r in found.rounds])


@pytest.mark.slow  # its database takes seconds to set up
@pytest.mark.skipif(
    importlib.util.find_spec("mlflow") is None or importlib.util.find_spec("alembic") is None,
    reason="mlflow is not installed: pip install 'coterie[mlflow]'",
)
def test_mlflow_has_every_client_and_the_settings(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    from mlflow.tracking import MlflowClient

    result = run(tmp_path / "run", track="mlflow")
    kept = json.loads((tmp_path / "run" / "mlflow.json").read_text())
    assert (tmp_path / "mlflow.db").exists()
    client = MlflowClient(tracking_uri=kept["uri"])
    for i, name in enumerate(result.names):
        points = client.get_metric_history(kept["run_id"], _allowed(f"test/accuracy/{name}"))
        assert [point.step for point in points] == [1, 2]
        assert [point.value for point in points] == [r["test"]["accuracy"][i] for r in result.rounds]
    about = client.get_run(kept["run_id"])
    assert about.data.params["method"] == "fedavg"
    assert about.data.params["optimizer.lr"] == "0.3"
    assert about.info.status == "FINISHED"
