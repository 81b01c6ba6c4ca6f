"""Callbacks: what they see, that they change nothing, how they stop a run, and what is said when they fail."""

import pytest
import torch

import coterie
from coterie.core.errors import ConfigError, CoterieError, CoterieWarning
from coterie.core.toml import read_toml
from coterie.experiment.resolve import resolve
from coterie.experiment.setup import prepare
from coterie.storage.run_folder import RunFolder
from tests.cli.commands import cli
from tests.experiment.conftest import two_kinds

QUICK = {"engine": "loop", "compile": False, "workers": 1, "model": "linear", "report": False, "reference": False}
HOW = {**QUICK, "rounds": 5, "lr": 0.3, "local_steps": 2, "select": "balanced_accuracy"}
HERE = __name__
seen = []


class Stopper:
    """Stops when it has had enough."""

    def __init__(self, after: int = 3, *, why: str = "enough"):
        if after < 1:
            raise ValueError("after must be above 0")
        self.after, self.why, self.begun = after, why, None

    def on_start(self, run):
        self.begun = len(run.records)
        seen.append(("start", run.round))

    def on_round_end(self, run):
        seen.append((run.seed, run.round))
        if run.round >= self.after:
            run.stop(self.why)


def fails(run, *, at: int = 2):
    if run.round == at:
        raise KeyError("no such number")


def noted(run):
    seen.append((run.method, run.seed, run.round))


class NoCallback: ...


@pytest.fixture(autouse=True)
def nothing_seen():
    seen.clear()


def test_they_see_the_run_and_change_nothing():
    shown = []

    def look(run):
        record = run.records[-1]
        with pytest.raises(TypeError):
            record["round"] = 9
        with pytest.raises(TypeError):
            record["info"]["loss"][0] = 9.0
        model, (x, y) = run.model("site-2"), run.examples("site-2")
        accuracy = float((model(x).argmax(1) == y).float().mean())
        for tensor in [*model.parameters(), x, y]:
            tensor.data.zero_()
        shared = run.shared_model()
        for tensor in shared.parameters() if shared else ():
            tensor.data.zero_()
        shown.append((run.round, len(run.records), accuracy, dict(run.scores())[run.round], record["seconds"] >= 0))

    result = coterie.run("fedprox", two_kinds(), callbacks=[look], **HOW)
    plain = coterie.run("fedprox", two_kinds(), **HOW)
    drop = ({**row, "seconds": 0} for row in result.rounds)
    assert [*drop] == [{**row, "seconds": 0} for row in plain.rounds]
    assert result.clients == plain.clients
    assert torch.equal(result.predictions.outputs, plain.predictions.outputs)
    for number, (round, known, accuracy, score, timed) in enumerate(shown, 1):
        row = result.rounds[number - 1]
        assert (round, known, timed) == (number, number, True)
        assert accuracy == pytest.approx(row["validation"]["accuracy"][1])
        assert score == pytest.approx(sum(row["validation"]["balanced_accuracy"]) / 5)
    assert result.config.callbacks == ["test_they_see_the_run_and_change_nothing.<locals>.look (from Python)"]


def test_a_model_for_everybody_is_shown_where_there_is_one():
    shown = []

    def look(run):
        shared, (x, y) = run.shared_model(), run.examples("site-1", "test")
        shown.append(float((shared(x).argmax(1) == y).float().mean()))

    result = coterie.run("ditto", two_kinds(), callbacks=[look], **HOW)
    assert shown == pytest.approx([row["global_test"]["accuracy"][0] for row in result.rounds])


@pytest.mark.parametrize("every", [1, 4])
def test_a_callback_stops_a_run_which_is_then_evaluated(tmp_path, every):
    out = tmp_path / "run"
    how = {**HOW, "evaluate_every": every, "reference": True}
    named = f"{HERE}:Stopper:2:why=enough of it"
    result = coterie.run("fedavg", two_kinds(), callbacks=[named], out=out, **how)
    assert [row["round"] for row in result.rounds] == [1, 2]
    assert "test" in result.rounds[-1]
    assert len(result.reference.rounds) == 2, "the local reference is not asked, and takes as many rounds"
    assert seen == [("start", 0), (0, 1), (0, 2)]
    assert (result.stopped.by, result.stopped.why, result.stopped.planned) == (named, "enough of it", 5)
    assert read_toml(out / "config.toml")["callbacks"] == [named]
    again = coterie.resume(out, data=two_kinds())
    assert len(again.rounds) == 2
    assert seen[3:] == [("start", 2)], "it is told of the records, and no round follows"


def test_a_stop_in_the_last_planned_round_is_none():
    result = coterie.run("fedavg", two_kinds(), callbacks=[Stopper(5)], **HOW)
    assert len(result.rounds) == 5
    assert result.stopped is None


def test_what_a_callback_raises_ends_the_run_after_a_checkpoint(tmp_path):
    out = tmp_path / "run"
    with pytest.raises(KeyError, match="no such number") as found:
        coterie.run("fedavg", two_kinds(), callbacks=[f"{HERE}:fails:at=3"], out=out, **{**HOW, "checkpoint_every": 50})
    assert any("in fails: raise KeyError" in note for note in found.value.__notes__)
    assert max(RunFolder(out).checkpoints()) == 3
    assert len(RunFolder(out).read_rounds(9)) == 3
    whole = coterie.run("fedavg", two_kinds(), **HOW)
    result = coterie.resume(out, data=two_kinds())
    assert [row["test"] for row in result.rounds] == [row["test"] for row in whole.rounds]


def test_the_command_line_shows_the_users_line_first(tmp_path):
    words = ("--data", "hospitals", "--rounds", 3, "--local-steps", 1, "--no-report", "--no-reference")
    how = ("--engine", "loop", "--workers", 1, "--no-compile", "--method", "fedavg", "--out", tmp_path / "run")
    done = cli("run", *words, *how, "--callback", f"{HERE}:noted", "--callback", f"{HERE}:fails")
    assert done.exit_code == 1
    assert [each[-1] for each in seen] == [1, 2]
    assert "KeyError in your code: 'no such number'" in done.output
    assert "raise KeyError" in done.output
    stopped = cli("resume", tmp_path / "run")
    assert stopped.exit_code == 0
    assert [each[-1] for each in seen] == [1, 2, 3]


def test_objects_are_given_again_to_resume(tmp_path):
    out = tmp_path / "run"
    coterie.run("fedavg", two_kinds(), callbacks=[Stopper(2), noted], out=out, **HOW)
    with pytest.raises(ConfigError, match=r"callbacks Stopper \(from Python\), noted .*callbacks=\[...\]"):
        coterie.resume(out, data=two_kinds())
    stopper = Stopper(2)
    coterie.resume(out, data=two_kinds(), callbacks=[stopper])
    assert stopper.begun == 2


def test_all_mistakes_are_reported_at_once():
    with pytest.raises(ConfigError) as found:
        resolve({
            "callbacks": [f"{HERE}:Stopper:x", f"{HERE}:Stopper:often=3", f"{HERE}:NoCallback", f"{HERE}:gone",
                          f"{HERE}:seen", f"{HERE}:fails:at=x", "early"],
            "rounds": 0,
        })  # fmt: skip
    text = str(found.value)
    for words in ("after = 'x'", "no option 'often'", "no on_round_end(self, run)", "cannot be imported", "rounds = 0",
                  "neither a class nor a function", "at = 'x'", "there is no callback 'early'"):  # fmt: skip
        assert words in text, words
    with pytest.raises(ConfigError, match=r"callback '.*': after must be above 0"):
        coterie.run("fedavg", two_kinds(), callbacks=[f"{HERE}:Stopper:0"], **HOW)
    with pytest.raises(ConfigError, match=r"callback 'int' has no on_round_end\(run\)"):
        coterie.run("fedavg", two_kinds(), callbacks=[3], **HOW)


def test_clients_are_known_by_name():
    def look(run):
        run.model("nobody")

    with pytest.raises(CoterieError, match="no client 'nobody'; there are site-1"):
        coterie.run("fedavg", two_kinds(), callbacks=[look], **HOW)


def test_each_run_of_a_comparison_has_its_own_callback():
    settings = {key: value for key, value in HOW.items() if key != "reference"} | {"engine": "stacked"}
    coterie.compare(["local", "fedavg"], 2, two_kinds(), callbacks=[Stopper, noted], **settings)
    assert seen.count(("start", 0)) == 2  # training alone is the reference here, as in a run
    assert sorted(each for each in seen if len(each) == 3) == [
        ("fedavg", seed, number) for seed in (0, 1) for number in (1, 2, 3)
    ]
    with pytest.raises(ConfigError, match="callbacks: Stopper is one object; every run needs its own"):
        coterie.compare(["local", "fedavg"], 2, two_kinds(), callbacks=[Stopper(2)], **settings)


def test_with_privacy_a_stop_is_not_covered():
    with pytest.warns(CoterieWarning, match="Stopper stopped a run with privacy. When it stops is not covered by eps"):
        coterie.run("fedavg", two_kinds(), callbacks=[Stopper(1)], noise=1.0, **HOW)


def test_a_package_adds_callbacks(package_of):
    package_of("callback", stopper=f"{HERE}:Stopper")
    assert len(coterie.run("fedavg", two_kinds(), callbacks="stopper:2", **HOW).rounds) == 2
    with pytest.raises(ConfigError, match=r"no callback 'stoper' \(did you mean 'stopper'\?\)"):
        prepare("fedavg", two_kinds(), callbacks=["stoper"], **HOW)
