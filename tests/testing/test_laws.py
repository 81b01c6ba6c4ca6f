"""Every registered method x every law. A method that is registered is tested, without another line."""

import ast
import json
from pathlib import Path

import pytest

import coterie
from coterie import METHODS, run, testing
from coterie.compute.availability import unavailable
from coterie.compute.compiled import AS_IT_IS
from coterie.core.method import CountedParams
from coterie.core.optimizers import OPTIMIZERS
from coterie.engine.process_pool import can_fork
from coterie.experiment.config import Config
from coterie.methods.fields import hyper_parameters
from tests.marks import compiles

FOLDER = Path(coterie.__file__).parent / "methods"
COMPILING = (10, 11, 12)
# Their steps unroll several gradients. What BatchNorm and dropout make of these takes minutes to compile.
LARGE = ("pfedbred", "pfedme")
# These take FedAvg's very step and no other: `make test` compiles it for a network with BatchNorm and dropout, once for
# all of them. The others' own steps are compiled for a network without, in half the time. `make test-all` compiles
# every method's for both.
FEDAVGS_STEP = ("local", "fedavg", "fedavg-ft", "fedbn", "lg-fedavg", "clustered-fl")
# Their steps are not compiled: they say so themselves (`scan(compiles=False)`).
AS_THEY_ARE = ("pfedgp",)
# Methods that have a step in common are tested in the same process, which compiles it once. Ditto, for instance, takes
# the steps of FedAvg and those of FedProx.
SHARED = {
    **dict.fromkeys(("local", "fedavg-ft", "fedbn", "fedper", "lg-fedavg", "ifca", "clustered-fl", "fedala"), "fedavg"),
    **dict.fromkeys(("fedep-ft", "fedpa-ft", "qlsd-ft", "per-fedavg", "fedprox", "fedprox-ft", "ditto"), "fedavg"),
    **dict.fromkeys(("fedbabu", "fedrep", "fedpac", "fedfomo", "fedmap", "fedamp", "heurfedamp", "federico"), "fedavg"),
    "fedproto": "pfedvmp",
}


def in_one_process(name):
    """Of `pytest -n 2 --dist loadgroup`: tests of one group run in one process."""
    return pytest.mark.xdist_group(f"compiled {SHARED.get(name, name)}")


@pytest.mark.parametrize("law", [number for number in testing.LAWS if number not in (4, *COMPILING)])
@pytest.mark.parametrize("method", METHODS)
def test_law(method, law):
    testing.check(METHODS[method](), only=(law,))


@pytest.mark.parametrize("method", METHODS)
def test_law_4_every_choice_learns(method):
    testing.every_setting_learns(METHODS[method](), everything=False)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_law_4_every_setting_learns(method):
    testing.check(METHODS[method](), only=(4,))


@pytest.mark.parametrize("method", METHODS)
def test_law_4_every_option_changes_the_result(method):
    testing.options_change_the_result(METHODS[method]())


def networks(name):
    """(method, whether the network has BatchNorm and dropout): one network in `make test`, both in `make test-all`."""
    own, first = in_one_process(name), name in FEDAVGS_STEP
    yield pytest.param(name, first, marks=own, id=name)
    if name not in LARGE:
        yield pytest.param(name, not first, marks=[own, pytest.mark.slow], id=f"{name}-the-other-network")


@pytest.mark.parametrize(("method", "norm"), [each for name in METHODS for each in networks(name)])
def test_laws_of_compiled_steps(method, norm):
    words = [testing.LAWS[law].test(METHODS[method](), norm=norm) for law in COMPILING]
    if method in AS_THEY_ARE and unavailable() is None:
        assert words[1].startswith(f"threads were left out: {testing.REFUSED} ({AS_IT_IS})")
        assert words[-1].startswith(testing.REFUSED)
        return
    assert bool(words[1]) == (unavailable() is not None or not can_fork()), "threads and processes were both there"
    # Else no compiled step would have been tested, and the law could not fail.
    assert words[-1] == testing.REPEATED if unavailable() is None else words[-1].startswith("nothing was compiled")


@compiles
def test_steps_that_are_not_compiled_are_noticed(monkeypatch):
    def refuse(*_):
        raise RuntimeError("no")

    monkeypatch.setattr("coterie.compute.compiled.compile_graph", refuse)
    monkeypatch.setattr("coterie.compute.compiled._compiled", {})
    assert testing.engines_agree(testing.plain(METHODS["fedavg"]()), testing.ROUNDING, norm=False) == testing.REFUSED
    (row,) = testing.check(METHODS["fedavg"](), only=(11,))
    assert row.words == f"threads were left out: {testing.REFUSED} (no)"


def test_where_nothing_is_compiled_the_eleventh_law_says_that_there_were_no_threads(monkeypatch):
    monkeypatch.setenv("COTERIE_BACKEND", "plain")
    (row,) = testing.check(METHODS["fedavg"](), only=(11,))
    assert row.words.startswith("threads were left out: nothing is compiled, since COTERIE_BACKEND=plain")


def test_the_eleventh_law_says_that_a_method_without_steps_needs_no_threads(monkeypatch):
    class Idle(type(METHODS["fedavg"]())):
        def local_update(self, task, client, down, batches):
            return client, CountedParams(down, batches.count), {"loss": batches.count}

    monkeypatch.setattr("coterie.testing.engine_laws.unavailable", lambda: None)
    (row,) = testing.check(Idle(), only=(11,))
    assert row.words == "threads were left out: the method takes no steps"


@compiles
@in_one_process("fedavg")
def test_the_tenth_law_asks_for_compiled_steps_and_gets_threads(tmp_path):
    method, data = testing.plain(METHODS["fedavg"]()), testing.federation()
    run(
        method,
        data,
        model=testing.module(),
        rounds=1,
        batch_size=4,
        reference=False,
        report=False,
        out=tmp_path / "run",
        **testing.COMPILED,
    )
    chosen = json.loads((tmp_path / "run/engine.json").read_text())["engine"]
    assert {key: chosen[key] for key in ("kind", "compiled", "threads", "workers")} == {
        "kind": "stacked",
        "compiled": True,
        "threads": True,
        "workers": 2,
    }


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::coterie.CoterieWarning")  # an extreme value may deserve one
@pytest.mark.parametrize("method", METHODS)
def test_every_context_and_option_obeys_the_twelfth_law(method):
    for context in testing.contexts(METHODS[method]()):
        for each, tolerance in ((context, testing.ADAM_ROUNDING), (testing.plain(context), testing.ROUNDING)):
            assert (testing.engines_agree(each, tolerance) == testing.REFUSED) == (method in AS_THEY_ARE)
    own = {hyper.name for hyper in hyper_parameters(METHODS[method])}
    for name, variant in testing.variants(testing.plain(METHODS[method]())):
        if name.split(" = ")[0] in own:
            words = testing.engines_agree(variant, testing.ROUNDING, norm=method not in LARGE)
            assert (words == testing.REFUSED) == (method in AS_THEY_ARE)


def own_variants(method):
    """The method's variants by its own options, and whether an option has no number by default, or 0.

    Another word, or a term that is there at all, takes other lines of the method. Another number takes the same ones.
    """
    plain = testing.plain(METHODS[method]())
    for name, variant in testing.variants(plain):
        option = name.split(" = ")[0]
        if option in {hyper.name for hyper in hyper_parameters(METHODS[method])}:
            value = getattr(plain, option)
            yield variant, isinstance(value, bool | str) or not value


LONG = ("fedmap", "federico", "pfedbred")  # so many options that they are left to `make test-all`
CHOOSING = [name for name in METHODS if name not in LONG and any(other for _, other in own_variants(name))]


@pytest.mark.filterwarnings("ignore::coterie.CoterieWarning")  # an extreme value may deserve one
@pytest.mark.parametrize("method", CHOOSING)
def test_every_choice_obeys_the_first_law(method):
    for variant, other_lines in own_variants(method):
        if other_lines:
            testing.stacking_changes_nothing(variant, testing.ROUNDING)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::coterie.CoterieWarning")  # an extreme value may deserve one
@pytest.mark.parametrize("method", METHODS)
def test_every_option_obeys_the_first_law(method):
    for variant, _ in own_variants(method):
        testing.stacking_changes_nothing(variant, testing.ROUNDING)


@pytest.mark.parametrize("method", METHODS)
def test_flags_are_unambiguous(method):
    names = {hyper.key for hyper in hyper_parameters(METHODS[method])}
    optimizers = {hyper.name for cls in OPTIMIZERS.values() for hyper in hyper_parameters(cls)}
    assert not names & (set(Config.model_fields) | optimizers)
    assert all(hyper.help for hyper in hyper_parameters(METHODS[method])), "say what the hyper-parameter means"


NO_METHODS = {FOLDER / "fields.py", FOLDER / "named.py"}


@pytest.mark.parametrize("path", sorted(set(FOLDER.glob("*.py")) - NO_METHODS), ids=lambda path: path.name)
def test_method_files_are_pure(path):
    """No in-place operation, `.data`, `.item()`, global randomness, or inheritance between methods."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            in_place = node.attr.endswith("_") and not node.attr.startswith("_")
            assert not in_place, f"line {node.lineno}: {node.attr}"
            assert node.attr not in ("data", "item", "manual_seed"), f"line {node.lineno}: {node.attr}"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("rand", "randn"):
            assert any(keyword.arg == "generator" for keyword in node.keywords), f"line {node.lineno}"
        if isinstance(node, ast.ImportFrom) and path.name != "__init__.py":
            assert not (node.module or "").startswith("coterie.methods"), "methods share through core and parts"
