"""Mutation testing: of small mistakes in the methods and their mathematics, how many does `make test` notice?

    python benchmarks/mutation.py                       run what is not in the journal yet, then write docs/mutation.md
    python benchmarks/mutation.py --only fedprox bregman    only these files
    python benchmarks/mutation.py --count 600           more mutants
    python benchmarks/mutation.py --fresh               forget the journal
    python benchmarks/mutation.py --page                run nothing: only write the page

The tests run once as they are, in ordinary PyTorch (COTERIE_BACKEND=plain), and note which functions each test calls.
Then every mutant meets the tests that call the changed function, those of its own test file first and quick ones before
slow ones, and then the laws of a few methods that the file belongs to, until one fails. Each mutant is a fork of one
process that has imported PyTorch but not Coterie; the changed source is imported in place of the file, which is never
written to.

The sample is the same for the same seed. Every kind of mistake has the same chance, in every file. The journal
(docs/mutation.jsonl) has one line a mutant: one that was killed is not run again until its file changes, and one that
survived not until its file or a test changes, or never if mutation.toml says that it is equivalent.

Once tests have been written for a sample's survivors, the sample says little about other mistakes. So each line keeps
what became of the mutant when it was first run, the page tells both, and a new campaign begins with another `SEED`.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import math
import os
import re
import resource
import signal
import sys
import tempfile
import time
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any, NamedTuple

from mutants import Mutant, mutants

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "coterie"
TARGETS = ("methods/*.py", "parts/*.py", "core/training.py", "core/optimizers.py")
NOT_MATHEMATICS = {"methods/__init__.py", "methods/fields.py", "parts/__init__.py"}
# The part of `make test` that may kill: what calls methods and is quick in ordinary PyTorch. The laws, which ask the
# same of every method, take longer: only what these tests do not kill meets them.
TESTS = (
    *("methods/test_*.py", "parts/test_*.py", "testing/test_special_cases.py"),
    *("testing/test_messages.py", "experiment/take_home/test_onboard.py"),
    *(
        "core/test_method.py",
        "core/test_privacy.py",
        "core/test_training.py",
        "core/test_tree.py",
        "data/test_weights.py",
        "engine/test_peers.py",
    ),
    *("experiment/take_home/test_load.py", "experiment/take_home/test_card.py", "experiment/privacy/test_install.py"),
)
LAWS = "testing/test_laws.py"
COMPILED_LAWS = "test_laws_of_compiled_steps"  # in ordinary PyTorch they compare what is the same
METHODS_OF_A_PART = 3  # whose laws a mutant of a part, or of the core, has to keep
# Files whose tests are in a test file of another name.
TESTED_IN = {
    **{"optimizers": "training", "priors": "fedmap", "averaging": "fedavg", "shared_layers": "fedper"},
    **{"local": "fedavg", "fedavg_ft": "fedavg", "heurfedamp": "fedamp"},
}
# All in seconds of processor time, which a busy machine does not stretch.
LONGEST = 9.0  # longer tests are left out
ENOUGH = 40.0  # of tests that a mutant has to survive, beyond those of its own test file
GRACE = 240.0  # that a mutant may take beyond three times what its tests take without it, for the laws
HUNG = 3600.0  # by the clock: it waits for ever
SEED = 1119  # of the sample that the page is about
# Of this seed's first run: empty with another seed.
ABOUT_FIRST = (
    "The laws were not among the tests then, so that it is a lower bound. It was run\nin pieces, and the survivors "
    "again after tests were written for them; the sample has not been run in one piece since."
)
HEAVY = (
    *("torch", "torch.func", "numpy", "pytest", "hypothesis", "xdist", "scipy.stats", "sklearn", "pydantic"),
    *("networkx", "rich.console", "rich.markdown", "rich.table", "tomli_w", "safetensors.torch", "typer", "plotly"),
)
REASONS = Path(__file__).with_name("mutation.toml")
JOURNAL = ROOT / "docs" / "mutation.jsonl"
PAGE = ROOT / "docs" / "mutation.md"


class Test(NamedTuple):
    """What a test does where nothing is changed."""

    seconds: float
    functions: frozenset[str]  # "file function" of what it calls in the package


def digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def write(path: Path, text: str) -> None:
    """Write a file so that it is there as a whole or not at all."""
    part = path.with_suffix(path.suffix + ".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


# Forks


def in_forks(
    works: Sequence[Callable[[Path], None]], jobs: int, seconds: Sequence[float], until: float = math.inf
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Call functions in forks of this process, `jobs` at a time.

    Args:
        works: each writes its result as JSON to the path it is given.
        jobs: how many run at once.
        seconds: of processor time that each may take.
        until: by `time.monotonic`, when no other is begun.

    Yields:
        The number of a function and its result, as they end; {"outcome": "time"} of one that took too long.
    """
    with tempfile.TemporaryDirectory(prefix="coterie-mutation-") as scratch:
        running: dict[int, tuple[int, float]] = {}  # process -> (number, when it began)
        waiting = list(range(len(works)))
        try:
            while waiting or running:
                if time.monotonic() > until:
                    waiting.clear()
                while waiting and len(running) < jobs:
                    number = waiting.pop(0)
                    process = os.fork()
                    if process == 0:
                        _child(works[number], Path(scratch) / str(number), seconds[number])
                    running[process] = number, time.monotonic()
                time.sleep(0.02)
                for process, (number, begin) in list(running.items()):
                    if time.monotonic() - begin > HUNG:
                        os.kill(process, signal.SIGKILL)
                    ended, status = os.waitpid(process, os.WNOHANG)
                    if ended:
                        del running[process]
                        with contextlib.suppress(ProcessLookupError):
                            os.killpg(process, signal.SIGKILL)  # what it left behind
                        path = Path(scratch) / str(number)
                        if path.exists():
                            yield number, json.loads(path.read_text())
                        elif os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL):
                            yield number, {"outcome": "time"}
                        else:
                            raise RuntimeError((Path(scratch) / f"{number}.log").read_text()[-4000:])
        finally:
            for process in running:  # of a run that is interrupted
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process, signal.SIGKILL)


def _child(work: Callable[[Path], None], path: Path, seconds: float) -> None:
    """Do the work in this fork, and end it."""
    code = 1
    try:
        os.setsid()  # its own processes can be ended with it
        limit = int(seconds) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5))
        log = os.open(f"{path}.log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(ROOT)
        sys.path[:0] = [str(ROOT), str(ROOT / "src")]
        work(path)
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _pytest(arguments: Sequence[str], plugin: object) -> int:
    import hypothesis
    import pytest

    # The same examples every time; a failing one need not be made smaller.
    phases = tuple(phase for phase in hypothesis.Phase if phase.name not in ("shrink", "explain"))
    hypothesis.settings.register_profile("mutation", derandomize=True, database=None, deadline=None, phases=phases)
    hypothesis.settings.load_profile("mutation")
    return int(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "--tb=line", *arguments], plugins=[plugin]))


# The tests without a change


class _Notes:
    """A pytest plugin that notes what each test calls in the package, and how long it takes."""

    def __init__(self) -> None:
        self.tests: dict[str, dict[str, Any]] = {}
        self.called: set[CodeType] = set()
        self.begin = 0.0

    def trace(self, frame: FrameType, event: str, argument: object) -> None:
        self.called.add(frame.f_code)

    def pytest_runtest_logstart(self) -> None:
        self.called.clear()
        self.begin = time.process_time()
        sys.settrace(self.trace)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "teardown":
            sys.settrace(None)
            inside = [code for code in self.called if code.co_filename.startswith(str(PACKAGE))]
            functions = {
                f"{Path(code.co_filename).relative_to(PACKAGE)} {code.co_qualname.split('.<locals>')[0]}"
                for code in inside
            }
            seconds = time.process_time() - self.begin
            self.tests[report.nodeid] |= {"functions": sorted(functions), "seconds": round(seconds, 3)}
            return
        self.tests.setdefault(report.nodeid, {"passed": True})["passed"] &= report.passed


def baseline(jobs: int, cache: Path) -> dict[str, Test]:
    """Return all tests that may kill; test files that were run with this very code are read from `cache`."""
    files = sorted({path for pattern in TESTS for path in (ROOT / "tests").glob(pattern)})
    sources = digest(*(path.read_bytes() for path in sorted(PACKAGE.rglob("*.py"))))
    known: dict[str, Any] = json.loads(cache.read_text()) if cache.exists() else {}
    keys = {path: f"{path.relative_to(ROOT)} {digest(path.read_bytes())} {sources}" for path in files}
    missing = [path for path in files if keys[path] not in known]

    def noting(path: Path) -> Callable[[Path], None]:
        def work(out: Path) -> None:
            notes = _Notes()
            code = _pytest([str(path.relative_to(ROOT)), "-k", "not compiled_steps"], notes)
            out.write_text(json.dumps({"code": code, "tests": notes.tests}))

        return work

    for number, found in in_forks([noting(path) for path in missing], jobs, [HUNG] * len(missing)):
        print(f"  {missing[number].relative_to(ROOT)}: {len(found.get('tests', ()))} tests", flush=True)
        if found.get("code") != 0:
            raise SystemExit(f"{missing[number].relative_to(ROOT)} fails as it is: repair that first")
        known[keys[missing[number]]] = found["tests"]
        write(cache, json.dumps({key: known[key] for key in keys.values() if key in known}))
    return {
        name: Test(test["seconds"], frozenset(test["functions"]))
        for path in files
        for name, test in known[keys[path]].items()
        if test["passed"] and test["seconds"] < LONGEST
    }


# The tests with a change


class _Replaced(importlib.machinery.SourceFileLoader):
    """Loads a module from given text instead of its file."""

    def __init__(self, name: str, path: str, source: bytes) -> None:
        super().__init__(name, path)
        self.source = source

    def get_code(self, fullname: str) -> CodeType:
        return compile(self.source, self.path, "exec", dont_inherit=True)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, file: str, source: bytes) -> None:
        self.name = "coterie." + file.removesuffix(".py").replace("/", ".")
        self.loader = _Replaced(self.name, str(PACKAGE / file), source)

    def find_spec(self, fullname: str, path: object, target: ModuleType | None = None) -> Any:
        return importlib.util.spec_from_loader(fullname, self.loader) if fullname == self.name else None


class _Failing:
    """A pytest plugin that notes the first test that fails."""

    def __init__(self) -> None:
        self.killer = ""
        self.words = ""

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and not self.killer:
            self.killer = report.nodeid
            crash = getattr(report.longrepr, "reprcrash", None)
            self.words = crash.message.splitlines()[0][:120] if crash and crash.message else ""


class _Chosen(_Failing):
    """Runs the given tests in the given order."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self.rank = {name: i for i, name in enumerate(names)}

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = sorted((item for item in items if item.nodeid in self.rank), key=lambda item: self.rank[item.nodeid])


class _Laws(_Failing):
    """Runs the laws of the given methods."""

    def __init__(self, methods: Sequence[str]) -> None:
        super().__init__()
        self.methods = methods

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = [
            item
            for item in items
            if item.originalname != COMPILED_LAWS
            and "slow" not in item.keywords
            and getattr(item, "callspec", None) is not None
            and item.callspec.params.get("method") in self.methods
        ]


def methods_with(file: str) -> list[str]:
    """Return the names of a few methods that a file belongs to: those with the shortest files."""
    imports = {path: path.read_text(encoding="utf-8") for path in PACKAGE.glob("[mp]*/*.py") if path.stem != "__init__"}
    reached, more = set[Path](), {PACKAGE / file}
    while more:
        reached |= more
        words = {rf"^from coterie\.{path.parent.name}(\.{path.stem} import| import .*\b{path.stem}\b)" for path in more}
        pattern = re.compile("|".join(words), re.MULTILINE)
        more = {path for path, text in imports.items() if pattern.search(text)} - reached
    known = {
        path: path.stem.replace("_", "-")
        for path in reached
        if f"{path.parent.name}/{path.name}" not in NOT_MATHEMATICS
    }
    methods = [path for path in known if path.parent.name == "methods"]
    return [known[path] for path in sorted(methods, key=lambda path: len(imports[path]))][:METHODS_OF_A_PART]


def relevant(mutant: Mutant, tests: Mapping[str, Test]) -> tuple[list[str], list[str]]:
    """Return the tests that may notice a mutant, those of its own test file and others, each quick ones first."""
    stem = Path(mutant.file).stem
    own_file = f"/test_{TESTED_IN.get(stem, stem)}.py"
    calls = f"{mutant.file} {mutant.function}"

    def reaches(test: Test) -> bool:
        if mutant.function:
            return calls in test.functions
        return any(function.startswith(f"{mutant.file} ") for function in test.functions)

    reached = {name for name in tests if reaches(tests[name]) or (own_file in name and not mutant.function)}
    own, others, total = [], [], 0.0
    for name in sorted(reached, key=lambda name: tests[name].seconds):
        if own_file in name:
            own.append(name)
        elif total < ENOUGH:
            others.append(name)
            total += tests[name].seconds
    return own, others


def trying(mutant: Mutant, names: Sequence[Sequence[str]]) -> Callable[[Path], None]:
    """Return what runs the tests `names` with the mutant in place of its file."""

    def work(out: Path) -> None:
        begin = time.process_time()
        sys.meta_path.insert(0, _Finder(mutant.file, mutant.apply((PACKAGE / mutant.file).read_bytes())))
        chosen = _Chosen([name for some in names for name in some])
        code, laws = 5, _Laws(methods_with(mutant.file))
        for some in names:  # what is not needed is not collected either
            if code in (0, 5):
                code = _pytest(list(dict.fromkeys(name.split("::")[0] for name in some)), chosen) if some else code
        if code in (0, 5) and laws.methods:
            code = _pytest([f"tests/{LAWS}"], laws)
        outcome = {0: "survived", 1: "killed", 5: "survived"}.get(code, "killed")
        killer = chosen.killer or laws.killer or ("" if outcome == "survived" else "it cannot be imported")
        result = {"outcome": outcome, "killer": killer, "words": chosen.words or laws.words}
        out.write_text(json.dumps({**result, "seconds": round(time.process_time() - begin, 2)}))

    return work


# The sample


def sample(count: int, seed: int, files: Sequence[str]) -> tuple[list[Mutant], dict[str, int]]:
    """Choose mutants, and count all there are in each file.

    Half of `count` is shared out equally over the files, half by their numbers of mutants. In a file, the kinds of
    mistakes take turns. Within a kind, a hash of the mutant's name decides, so that code elsewhere does not matter.
    """
    everything = {file: mutants(file, (PACKAGE / file).read_bytes()) for file in files}
    total = sum(map(len, everything.values()))
    chosen = []
    for all_of_them in everything.values():
        kinds = defaultdict(list)
        for mutant in all_of_them:
            kinds[mutant.kind].append((digest(f"{seed} {mutant.name}".encode()), mutant))
        turns = sorted(
            (turn, order, mutant)
            for same in kinds.values()
            for turn, (order, mutant) in enumerate(sorted(same, key=lambda each: each[0]))
        )
        share = round(count / 2 / len(files) + count / 2 * len(all_of_them) / total)
        chosen += [mutant for _, _, mutant in turns[:share]]
    return chosen, {file: len(found) for file, found in everything.items()}


# The journal and the page


def read_journal() -> dict[tuple[str, str], dict[str, Any]]:
    """Return the last line of every (file as it was, mutant)."""
    lines = JOURNAL.read_text(encoding="utf-8").splitlines() if JOURNAL.exists() else []
    return {(line["source"], line["mutant"]): line for line in map(json.loads, lines)}


def read_reasons() -> dict[str, dict[str, str]]:
    """Return the entries of mutation.toml by the mutants' names."""
    entries = tomllib.loads(REASONS.read_text(encoding="utf-8")).get("mutant", []) if REASONS.exists() else []
    return {f"{entry['file']} {entry['function']}: {entry['change']}": entry for entry in entries}


def verdict(line: Mapping[str, Any], reason: Mapping[str, str] | None) -> str:
    """Return killed, survived or equivalent."""
    if line["outcome"] != "survived":
        return "killed"
    return "equivalent" if reason is not None and reason["verdict"] == "equivalent" else "survived"


def page(lines: Mapping[str, Mapping[str, Any]], chosen: Sequence[Mutant], sizes: Mapping[str, int], seed: int) -> str:
    """Return the Markdown of docs/mutation.md, from the results by the mutants' names."""
    reasons = read_reasons()
    verdicts = {
        mutant.name: verdict(lines[mutant.name], reasons.get(mutant.name)) for mutant in chosen if mutant.name in lines
    }
    rows, sums = [], [0] * 5
    for file, size in sizes.items():
        found = [verdicts[mutant.name] for mutant in chosen if mutant.file == file and mutant.name in verdicts]
        numbers = [size, len(found), *(found.count(word) for word in ("killed", "survived", "equivalent"))]
        sums = [a + b for a, b in zip(sums, numbers, strict=True)]
        rows.append(_row(f"`{file}`", numbers))
    rows.append(_row("**all**", sums))
    killers = [str(lines[name]["killer"]) for name, word in verdicts.items() if word == "killed"]
    imports = sum(killer.startswith("it cannot") for killer in killers)
    slow = sum(lines[name]["outcome"] == "time" for name in verdicts)
    first = [lines[name].get("first") for name, word in verdicts.items() if word != "equivalent"]
    text = [
        "# Mutation testing\n",
        "Written by [`benchmarks/mutation.py`](../benchmarks/mutation.py); do not edit. A mutant is the source with",
        "one small mistake: another sign, constant, comparison or order of arguments, a term, a call, a keyword or an",
        "element left out, a condition turned round. It is killed if a test of `make test` fails, run in ordinary",
        f"PyTorch. Tests that call the function and take less than {LONGEST:.0f} seconds are tried, and if none",
        f"of them fails, laws 1 to 9 of at most {METHODS_OF_A_PART} methods that need the file. What is mutated:",
        "everything that functions compute in `methods/`, `parts/`, `core/training.py` and `core/optimizers.py`, and",
        "constants in capitals; not hyper-parameters' defaults.\n",
        f"Of {sums[1]} mutants, {sums[4]} are equivalent: no test could tell them from the program. Of the other",
        f"{sums[1] - sums[4]}, **{_share(sums)} are killed** ({imports} of them when they are imported, {slow} because",
        f"they take too long), and {sums[3]} survive.\n",
        f"The sample is that of seed {seed}. {_first_time(first)}\n",
        "| file | possible | tried | killed | survived | equivalent | score |\n|---|---|---|---|---|---|---|",
        *rows,
        "",
    ]
    for title, word in (("Survivors", "survived"), ("Equivalent", "equivalent")):
        text.append(f"## {title}\n")
        listed = [mutant for mutant in chosen if verdicts.get(mutant.name) == word]
        for mutant in listed:
            reason = reasons.get(mutant.name, {}).get("reason", "no reason is known yet")
            text.append(f"- `{mutant.file}`, `{mutant.function or 'constants'}`: `{mutant.change}`. {reason}")
        text += ["", ""] if listed else ["None.", ""]
    return "\n".join(text).rstrip() + "\n"


def _first_time(outcomes: Sequence[str | None]) -> str:
    """Say what a sample showed before tests were written for it; None is an outcome that was not kept."""
    if not outcomes or None in outcomes:
        return (
            "How many were killed when it was first run was not kept, and tests\n"
            "have been written for its survivors since: of other mistakes, expect that fewer are noticed."
        )
    killed = sum(outcome != "survived" for outcome in outcomes)
    return (
        "**When it was first run, before a test was written for any of its\n"
        f"survivors, {100 * killed / len(outcomes):.1f} % were killed** ({len(outcomes) - killed} survived): "
        f"this is what to expect of a mistake that nobody\nhas thought of. {ABOUT_FIRST}"
    )


def _share(numbers: Sequence[int]) -> str:
    _, tried, killed, _, equivalent = numbers
    return f"{100 * killed / (tried - equivalent):.1f} %" if tried > equivalent else ""


def _row(name: str, numbers: Sequence[int]) -> str:
    return f"| {name} | {' | '.join(map(str, numbers))} | {_share(numbers)} |"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--count", type=int, default=210, help="mutants in the sample (of all files)")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time")
    parser.add_argument("--only", nargs="+", default=(), metavar="NAME", help="files, such as fedprox or parts/priors")
    parser.add_argument("--fresh", action="store_true", help="run every mutant of the sample again")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no mutant after them; the next run does")
    parser.add_argument("--page", action="store_true", help="run nothing, write the page from the journal")
    parser.add_argument("--cache", type=Path, default=ROOT / ".mutation", help="folder for what can be made again")
    given = parser.parse_args(arguments)
    files = sorted(
        {str(path.relative_to(PACKAGE)) for pattern in TARGETS for path in PACKAGE.glob(pattern)} - NOT_MATHEMATICS
    )
    chosen, sizes = sample(given.count, given.seed, files)
    sources = {file: digest((PACKAGE / file).read_bytes()) for file in files}
    until = time.monotonic() + 60 * given.minutes
    journal = {} if given.fresh else read_journal()
    first = {line["mutant"]: line.get("first", line["outcome"]) for line in read_journal().values()}
    if not given.page:
        os.environ |= {"OMP_NUM_THREADS": "1", "COTERIE_BACKEND": "plain"}
        for module in HEAVY:
            with contextlib.suppress(ImportError):
                importlib.import_module(module)
        print("tests without a change", flush=True)
        given.cache.mkdir(exist_ok=True)
        sys.dont_write_bytecode, sys.pycache_prefix = False, str(given.cache / "pycache")
        tests = baseline(given.jobs, given.cache / "baseline.json")
        state = digest(*(path.read_bytes() for path in sorted((ROOT / "tests").rglob("*.py"))))
        reasons = read_reasons()

        def is_open(mutant: Mutant) -> bool:
            stem = mutant.file.removesuffix(".py")
            if given.only and not any(word in (stem, Path(stem).name) for word in given.only):
                return False
            line = journal.get((sources[mutant.file], mutant.name))
            if line is None:
                return True
            return verdict(line, reasons.get(mutant.name)) == "survived" and line["tests"] != state

        todo = [mutant for mutant in chosen if is_open(mutant)]
        names = [relevant(mutant, tests) for mutant in todo]
        limits = [GRACE + 3 * sum(tests[name].seconds for some in each for name in some) for each in names]
        print(f"{len(todo)} of {len(chosen)} mutants to run", flush=True)
        for mutant in todo:  # one that is no Python would die without having been tested
            compile(mutant.apply((PACKAGE / mutant.file).read_bytes()), mutant.name, "exec", dont_inherit=True)
        works = [trying(mutant, each) for mutant, each in zip(todo, names, strict=True)]
        for done, (number, found) in enumerate(in_forks(works, given.jobs, limits, until), 1):
            mutant = todo[number]
            defaults = {"killer": "it takes too long", "words": "", "seconds": round(limits[number])}
            line = {"mutant": mutant.name, "source": sources[mutant.file], "tests": state, **defaults, **found}
            line["first"] = first.get(mutant.name, line["outcome"])
            journal[line["source"], line["mutant"]] = line
            with JOURNAL.open("a", encoding="utf-8") as out:
                out.write(json.dumps(line) + "\n")
            print(f"{done}/{len(todo)} {line['outcome']} {line['seconds']:.1f} s  {mutant.name[:150]}", flush=True)
        kept = [journal[sources[m.file], m.name] for m in chosen if (sources[m.file], m.name) in journal]
        write(JOURNAL, "".join(json.dumps(line) + "\n" for line in kept))
    lines = {name: line for (source, name), line in journal.items() if source in sources.values()}
    write(PAGE, page(lines, chosen, sizes, given.seed))
    print(f"wrote {PAGE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
