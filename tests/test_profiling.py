import json
import time

import pytest
import torch

import coterie
from coterie import profiling
from coterie.cli.profile import profile_table
from coterie.engine.process_pool import can_fork
from coterie.profiling import ORDER, each, recording, span, timed


def clients(number=4, rows=40):
    draw = torch.Generator().manual_seed(0)
    xs = [torch.randn(rows, 4, generator=draw) for _ in range(number)]
    return {f"site-{i}": (x, (x[:, 0] > 0).long()) for i, x in enumerate(xs)}


def run(**settings):
    quick = {"engine": "loop", "compile": False, "workers": 1, "rounds": 3, "local_steps": 2, "report": False}
    return coterie.run("fedavg", clients(), model="mlp", **{**quick, "profile": True, **settings})


def test_off_is_off():
    with span("train"):
        assert span("train") is span("evaluate")
    with recording(False) as profile:
        assert profile is None
    assert profiling.taken() is None


def test_own_times_add_up_to_the_whole_and_inner_spans_know_what_is_around_them():
    with recording() as profile:
        with span("evaluate", round=2):
            with span("gather"):
                time.sleep(0.02)
            time.sleep(0.01)
        time.sleep(0.01)
    by_name = {one.name: one for one in profile.spans}
    whole = by_name["all"].length
    assert sum(one.own for one in profile.spans) == whole
    assert by_name["evaluate"].own == by_name["evaluate"].length - by_name["gather"].length
    assert by_name["gather"].about == {"round": 2}
    assert "round" not in by_name["all"].about
    rows = profile.table()
    assert [row.name for row in rows] == ["gather", "evaluate", "other"]  # in the order of ORDER
    assert sum(row.seconds for row in rows) == pytest.approx(whole / 1e9)
    assert sum(row.share for row in rows) == pytest.approx(1)
    inside = {row.name: row for row in profile.table(rounds=True)}
    assert inside.keys() == {"gather", "evaluate"}
    assert profile.share_of_work() == pytest.approx(inside["evaluate"].share)
    assert profile.table(rounds=True, first=3) == []


def test_threads_are_told_of_and_waiting_for_them_is_not_training():
    with recording() as profile:
        profiling.beside([[0, 1], [0, 5]])  # in no span of its own
        with span("train", round=1):
            begin = time.perf_counter_ns()
            time.sleep(0.03)
            # Another thread began 1 ms later, and ended 10 ms after this one had.
            profiling.beside([[begin, begin + 20_000_000], [begin + 1_000_000, begin + 30_000_000]])
    rows = {row.name: row for row in profile.table(rounds=True)}
    assert rows["train"].elsewhere == pytest.approx(0.029)
    assert rows["workers"].seconds == pytest.approx(0.010)
    assert rows["train"].seconds + rows["workers"].seconds == pytest.approx(0.03, abs=0.01)
    (other,) = (one for one in profile.spans if one.process == 1 and one.about == {"round": 1})
    assert begin < other.start < begin + 10_000_000


def test_a_span_that_raises_is_closed_and_a_loop_that_is_left_does_not_confuse_the_others():
    @timed("train")
    def fails():
        raise ValueError("no")

    with recording() as profile:
        with pytest.raises(ValueError, match="no"):
            fails()
        with span("evaluate"):
            loop = each("round", range(3))
            next(loop)
        loop.close()  # later than what was around it
        with span("write"):
            pass
    assert [one.name for one in profile.spans] == ["train", "evaluate", "write", "all"]
    assert sum(one.own for one in profile.spans) == profile.spans[-1].length


def test_a_run_tells_where_its_time_went(tmp_path):
    result = run(out=tmp_path / "run")
    rows = {row.name: row for row in result.profile.table(rounds=True, run="fedavg")}
    assert {"dispatch", "gather", "train", "aggregate", "evaluate", "write"} <= rows.keys() <= set(ORDER)
    rounds = [one for one in result.profile.spans if one.name == "round" and one.about["run"] == "fedavg"]
    assert [one.about["round"] for one in rounds] == [1, 2, 3]
    total = sum(one.length for one in rounds) / 1e9
    assert sum(row.seconds for row in rows.values()) == pytest.approx(total)
    # What a round says it took lies inside its span, and is nearly all of it.
    told = sum(record["seconds"] for record in result.rounds)
    assert rows["write"].seconds < total - told < total
    assert {one.about.get("run") for one in result.profile.spans} == {None, "fedavg", "local"}
    assert {"prepare", "finish"} <= {row.name for row in result.profile.table()}
    assert run(profile=False, reference=False).profile is None
    # The trace, as it was written, has every span as a complete event within the whole.
    events = json.loads((tmp_path / "run" / "trace.json").read_text())["traceEvents"]
    spans_of = [event for event in events if event["ph"] == "X"]
    assert len(spans_of) == len(result.profile.spans)
    assert all({"name", "ts", "dur", "pid", "tid", "args"} <= event.keys() for event in spans_of)
    whole = next(event for event in spans_of if event["name"] == "all")
    ends = whole["ts"] + whole["dur"]
    assert all(0 <= event["ts"] <= event["ts"] + event["dur"] <= ends + 1e-3 for event in spans_of)


@pytest.mark.skipif(not can_fork(), reason="worker processes need Linux")
def test_workers_tell_too(workers_keep_their_work):
    result = run(workers=2, reference=False)
    there = [one for one in result.profile.spans if one.process == 1]
    assert {one.name for one in there} == {"train", "evaluate"}
    assert {one.about["round"] for one in there if one.name == "train"} == {1, 2, 3}
    trained = [one for one in result.profile.spans if one.name == "train"]
    assert len(trained) == 3 * 4  # every client once a round, whoever took it
    parents = {one.about["round"]: one for one in result.profile.spans if one.name == "round"}
    for one in (one for one in there if "round" in one.about):  # all processes share a clock
        parent = parents[one.about["round"]]
        assert parent.start <= one.start <= one.start + one.length <= parent.start + parent.length
    rows = {row.name: row for row in result.profile.table(rounds=True)}
    assert rows["train"].elsewhere == pytest.approx(sum(o.own for o in there if o.name == "train") / 1e9)
    assert "workers" in [column.header for column in profile_table(result.profile).columns]
    names = {
        event["pid"]: event["args"]["name"] for event in result.profile.trace()["traceEvents"] if event["ph"] == "M"
    }
    assert names == {0: "this process", 1: "worker 1"}
