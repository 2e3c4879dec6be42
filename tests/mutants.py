"""Mutants: one small change to a module that the guarantee stands on, and the fast test that notices it; `make mutants`.

mutmut supplies the operators; its own runner passes over every decorated function (properties, context managers, dataclasses), so the
changes are made here, each in a fork of one process that has the heavy imports behind it and in no file.
Left out: docstrings, annotations and type aliases, imports, `__all__`, `__repr__`, and the texts of errors and warnings.
"""

import argparse
import ast
import hashlib
import importlib
import json
import math
import os
import re
import resource
import signal
import sys
import time
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.machinery import SourceFileLoader
from importlib.util import spec_from_file_location
from itertools import islice
from pathlib import Path
from typing import Any

import libcst as cst
import pytest
from libcst.metadata import MetadataWrapper, PositionProvider
from mutmut.mutation.mutators import mutation_operators

ROOT = Path(__file__).resolve().parent.parent
MODULES = {  # each with the files of the tests that try it, fast ones only
    "privacy": ["privacy", "curve", "ledger"],
    "ledger": ["ledger"],
    "curve": ["curve"],
    "guarantee": ["guarantee"],
    "card": ["guarantee"],
    "noise": ["keystream", "secure_mode"],
    "clipping": ["clipping"],
    "oracle": ["gradients"],
    "forms": ["gradients", "units", "float_bound"],
    "layer_rules": ["gradients"],
    "norms": ["gradients", "units", "float_bound"],
    "hooks": ["gradients", "units"],
    "gradients": ["gradients", "units"],
    "checks": ["checks"],
    "settings": ["training"],
    "plan": ["training"],
    "method": ["training"],
    "step": ["training"],
    "engine": ["training"],
    "checkpoint": ["checkpoint"],
    "loop": ["training"],
    "account": ["training"],
    "updates": ["training"],
}
WARM = ["torch", "transformers", "zoo", "opacus.accountants", "scipy.stats", "hypothesis", "safetensors.torch", "tqdm.auto", "peft"]
SLOWEST, ENOUGH = 1.5, 20.0    # seconds of the processor: of one test, and of all that try one mutant
FACTOR, GRACE, WAIT = 4, 15, 8  # a fork has so many times what its tests took, and so many seconds more; by the clock so many times that
LEAST = 24                     # mutants of each module


@dataclass(frozen=True)
class Mutant:
    module: str
    function: str
    operator: str
    old: str
    new: str
    number: int                                     # of those that are alike in all of this
    lines: tuple[int, int] = field(compare=False)   # of the statement that is changed
    nodes: tuple[cst.CSTNode, cst.CSTNode] = field(compare=False, repr=False)
    place: Any = field(compare=False, repr=False)   # of the old node

    @property
    def key(self):
        "The same when something else in the module changes."
        return hashlib.sha256(repr((self.module, self.function, self.operator, self.old, self.new, self.number)).encode()).hexdigest()[:10]


class Changes(cst.CSTVisitor):
    "All changes that the operators make to a module, but for what is left out."
    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self, name, module):
        self.name, self.module = name, module
        self.found, self.alike, self.scope, self.spans, self.prose = [], Counter(), [], [], set()

    def on_visit(self, node):
        span = self.get_metadata(PositionProvider, node, None)
        inside = self.spans[-1][1] if self.spans else False
        self.spans.append(((span.start.line, span.end.line) if span and not inside else self.spans[-1][0],
                           inside or isinstance(node, cst.SimpleStatementLine)))
        if isinstance(node, cst.FunctionDef | cst.ClassDef):
            self.scope.append(node.name.value)
        if id(node) in self.prose or isinstance(node, cst.Annotation | cst.Raise | cst.Import | cst.ImportFrom):
            return False
        code = self.module.code_for_node(node) if isinstance(node, cst.Expr | cst.Assign | cst.FunctionDef | cst.Call) else ""
        docstring = isinstance(node, cst.Expr) and isinstance(node.value, cst.SimpleString)
        alias = isinstance(node, cst.Assign) and not self.scope and re.match(r"__all__|[A-Z]+[a-z]\w* =", code)
        if docstring or alias or (isinstance(node, cst.FunctionDef) and node.name.value == "__repr__"):
            return False
        if isinstance(node, cst.Call) and (says := re.match(r"check\(|warnings\.warn\(", code)):
            self.prose.add(id(node.args[1 if says[0] == "check(" else 0]))
            return True
        for kind, operator in mutation_operators:
            for new in operator(node) if isinstance(node, kind) else ():
                self.add(operator.__name__.removeprefix("operator_"), node, new)
        return True

    def add(self, operator, node, new):
        where = (self.name, ".".join(self.scope), operator, self.module.code_for_node(node), self.module.code_for_node(new))
        self.alike[where] += 1
        self.found.append(Mutant(*where, self.alike[where], self.spans[-1][0], (node, new), self.get_metadata(PositionProvider, node)))

    def on_leave(self, node):
        self.spans.pop()
        if isinstance(node, cst.FunctionDef | cst.ClassDef):
            self.scope.pop()


def changes(name, source):
    "The parsed module and its mutants."
    wrapper = MetadataWrapper(cst.parse_module(source))
    visitor = Changes(name, wrapper.module)
    wrapper.visit(visitor)
    return wrapper.module, visitor.found


def planted(module, source, mutant):
    "The changed source, or None when it is no Python."
    lines = source.splitlines(keepends=True)
    start, end = (sum(map(len, lines[:at.line - 1])) + at.column for at in (mutant.place.start, mutant.place.end))
    plain = source[start:end] == mutant.old         # else parentheses or semicolons are in the way
    code = source[:start] + mutant.new + source[end:] if plain else module.deep_replace(*mutant.nodes).code
    try:
        return compile(code, mutant.module, "exec", ast.PyCF_ONLY_AST) and code
    except SyntaxError:
        return None


def sample(mutants, seed=0):
    "In an order that only the seed and the mutants decide; of each operator as many as the square root of its number asks for."
    rank, number = Counter(), Counter(mutant.operator for mutant in mutants)
    ordered = []
    for mutant in sorted(mutants, key=lambda mutant: hashlib.sha256(f"{seed} {mutant.key}".encode()).hexdigest()):
        rank[mutant.operator] += 1
        ordered.append((rank[mutant.operator] / math.sqrt(number[mutant.operator]), mutant))
    return [mutant for _, mutant in sorted(ordered, key=lambda pair: pair[0])]


def forked(work, limit=0):
    "What `work()` returns in a process of its own, as JSON; else the number of the signal that ended it, as beyond `limit` seconds."
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setpgrp()                            # not a session: those come with a priority of their own
            signal.alarm(WAIT * limit)
            resource.setrlimit(resource.RLIMIT_CPU, (limit or resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            silence = os.open(os.devnull, os.O_RDWR)
            os.dup2(silence, 1)
            os.dup2(silence, 2)
            with open(write, "w") as pipe:
                json.dump(work(), pipe)
        finally:
            os._exit(0)
    os.close(write)
    with open(read) as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what a test has left running
    return json.loads(said) if said else status & 127


class Watch:
    "A plug-in of pytest: the chosen tests in this order, each test's time and lines, and what failed first."

    def __init__(self, only=None, coverage=None):
        self.only, self.coverage, self.seconds, self.failed, self.slow = only, coverage, {}, [], []

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self):
        from hypothesis import settings
        settings.register_profile("mutants", deadline=None, derandomize=True, database=None)
        settings.load_profile("mutants")

    def pytest_collection_modifyitems(self, items):
        if self.only is not None:
            items[:] = sorted((item for item in items if item.nodeid in self.only), key=lambda item: self.only.index(item.nodeid))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        if self.coverage:
            self.coverage.switch_context(item.nodeid)
            signal.setitimer(signal.ITIMER_PROF, 1.5 * SLOWEST)  # the measuring itself takes a while
        began = time.process_time()
        try:
            return (yield)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            self.seconds[item.nodeid] = round(time.process_time() - began, 2)

    def pytest_runtest_logreport(self, report):
        slow = report.failed and self.coverage and "not a fast test" in report.longreprtext
        (self.slow if slow else self.failed).extend([report.nodeid] if report.failed else [])

    def pytest_collectreport(self, report):
        self.failed += [f"import of {report.nodeid}"] if report.failed else []


def tested(root, files, watch, *flags):
    os.chdir(root)
    if os.path.isdir("/dev/shm"):
        os.environ["TMPDIR"] = "/dev/shm"           # nobody waits for a disk
    without = (word for name in ("cacheprovider", "unraisableexception", "threadexception", "xdist") for word in ("-p", f"no:{name}"))
    return pytest.main([*files, "-q", "--assert=plain", *without, *flags], plugins=[watch])


def too_slow(*_):
    raise TimeoutError("not a fast test")


def lines_of(root, package, file):
    "For one test file: seconds of each test that passes, and which lines each reaches, by module."
    from coverage import Coverage
    coverage = Coverage(data_file=None, include=[f"{root}/{package}/*"], config_file=False)
    coverage.start()
    watch = Watch(coverage=coverage)
    signal.signal(signal.SIGPROF, too_slow)
    tested(root, [file], watch)
    coverage.stop()
    data = coverage.get_data()
    reached = {Path(path).stem: {line: [test for test in tests if test in watch.seconds and test not in watch.failed + watch.slow]
                                 for line, tests in data.contexts_by_lineno(path).items()}
               for path in data.measured_files() if Path(path).parent == root / package}
    return {"seconds": watch.seconds, "failed": watch.failed, "slow": watch.slow, "reached": reached}


def reach(root, package, files):
    "What `lines_of` says of all test files, measured again only where something has changed."
    store = root / "build" / "mutants.json"
    known = json.loads(store.read_text()) if store.exists() else {}
    rest = [path.read_bytes() for path in [*sorted((root / package).rglob("*.py")), *sorted((root / "tests").glob("[!t]*.py"))]
            if path.name != "mutants.py"]
    for file in files:
        state = hashlib.sha256(b"".join([*rest, (root / file).read_bytes()])).hexdigest()
        if known.get(file, {}).get("state") != state:
            print(f"measuring {file}", flush=True)
            known[file] = {"state": state, **forked(lambda file=file: lines_of(root, package, file))}
            store.parent.mkdir(exist_ok=True)
            store.write_text(json.dumps(known))
        if known[file]["failed"]:
            print(f"left out, for they fail as it is: {', '.join(known[file]['failed'])}")
    return [known[file] for file in files]


def selection(mutant, source, measured):
    "The fast tests that reach the changed statement, else its function, else its module: those of its own file and quick ones first."
    spans, tree = [mutant.lines], ast.parse(source)
    spans += [(node.lineno, node.end_lineno) for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)
              and node.lineno - 5 <= mutant.lines[0] <= node.end_lineno][::-1]
    for first, last in [*spans, (0, 10**9)]:
        found = {}
        for part in measured:
            for line, tests in part["reached"].get(mutant.module, {}).items():
                if first <= int(line) <= last:
                    found.update({test: part["seconds"][test] for test in tests if part["seconds"][test] <= SLOWEST})
        if found:
            break
    total, chosen = 0.0, []
    for test in sorted(found, key=lambda test: (found[test] + 0.02) * (1 if f"test_{mutant.module}." in test else 4)):
        if total + found[test] <= ENOUGH:
            total += found[test]
            chosen.append(test)
    return chosen, total


class Planted(SourceFileLoader):
    "Finds one module, and loads it from a changed source."

    def __init__(self, name, path, source):
        super().__init__(name, path)
        self.source = source

    def find_spec(self, name, path=None, target=None):
        return spec_from_file_location(name, self.path, loader=self) if name == self.name else None

    def get_code(self, name):
        return compile(self.source, self.path, "exec", dont_inherit=True)


def judge(root, package, mutant, code, tests):
    "Import the changed module and run the tests until one fails: ['killed' or 'survived', the test]."
    sys.meta_path.insert(0, Planted(f"{package}.{mutant.module}", str(root / package / f"{mutant.module}.py"), code))
    watch = Watch(only=tests)
    ended = tested(root, list(dict.fromkeys(test.partition("::")[0] for test in tests)), watch, "-x")
    return ["killed", (watch.failed or [f"pytest ended with {int(ended)}"])[0]] if ended else ["survived", ""]


def tried(root, package, mutant, source, code, measured):
    "The record of a mutant: what it changes, what became of it, by which test, of how many that were chosen."
    tests, seconds = selection(mutant, source, measured)
    found = forked(lambda: judge(root, package, mutant, code, tests), round(FACTOR * seconds) + GRACE) if tests else ["survived", ""]
    if isinstance(found, int):
        found = ["timeout", ""] if found in (signal.SIGALRM, signal.SIGXCPU) else ["killed", f"ended by signal {found}"]
    before, after = next((old.strip(), new.strip()) for old, new in zip(source.splitlines(), code.splitlines()) if old != new)
    return {"id": mutant.key, "module": mutant.module, "line": mutant.place.start.line, "function": mutant.function,
            "operator": mutant.operator, "before": before, "after": after, "result": found[0], "test": found[1], "tests": len(tests)}


def table(records):
    "Markdown: of every module how many mutants, and what became of them; the score leaves out those judged equivalent."
    rows, total = defaultdict(Counter), Counter()
    for record in records:
        kind = "equivalent" if record.get("judgement", "").startswith("equivalent") else record["result"]
        rows[record["module"]][kind] += 1
        total[kind] += 1
    lines = ["| module | mutants | killed | by the time limit | equivalent | survived | score |", "|---|---|---|---|---|---|---|"]
    for name, row in [*rows.items(), ("all", total)]:
        caught = row["killed"] + row["timeout"]
        score = caught / max(1, row.total() - row["equivalent"])
        counts = " | ".join(str(row[kind]) for kind in ("killed", "timeout", "equivalent", "survived"))
        lines.append(f"| {name} | {row.total()} | {counts} | {score:.1%} |")
    return "\n".join(lines)


def main():
    ask = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ask.add_argument("--root", type=Path, default=ROOT)
    ask.add_argument("--package", default="dpft")
    ask.add_argument("--modules", nargs="+", default=list(MODULES))
    ask.add_argument("--tests", nargs="+", help="names of test files, instead of each module's own")
    ask.add_argument("--warm", nargs="*", default=WARM, help="imported once, before the forks")
    ask.add_argument("--count", type=int, default=300, help="mutants in all, in proportion to the modules' lines, at least 24 of each")
    ask.add_argument("--again", action="store_true", help="try those again that are known as killed")
    words = ask.parse_args()
    root, results = words.root.resolve(), words.root / "nbs" / "results"
    sys.path[:0] = [str(root), str(root / "tests")]
    for name in words.warm:
        importlib.import_module(name)
    for name in [name for name in sys.modules if name.partition(".")[0] in (words.package, "zoo")]:
        del sys.modules[name]                       # each fork imports these anew
    judged = json.loads((results / "mutants-judged.json").read_text()) if (results / "mutants-judged.json").exists() else {}
    file = results / "mutants.jsonl"
    known = {record["id"]: record for record in map(json.loads, file.read_text().splitlines())} if file.exists() else {}
    sources = {name: (root / words.package / f"{name}.py").read_text() for name in words.modules}
    whole = [root / words.package / f"{name}.py" for name in {*MODULES, *words.modules}]
    total = sum(path.read_text().count("\n") for path in whole if path.exists())
    records = [record for record in known.values() if record["module"] not in words.modules]
    for name, source in sources.items():
        files = [f"tests/test_{file}.py" for file in words.tests or MODULES[name]]
        measured = reach(root, words.package, [file for file in files if (root / file).exists()])
        module, found = changes(name, source)
        wanted = max(LEAST, round(words.count * source.count("\n") / total))
        for mutant in islice((mutant for mutant in sample(found) if mutant.key in known or planted(module, source, mutant)), wanted):
            record = known.get(mutant.key, {"result": ""})
            again = words.again or (record["result"] == "survived" and mutant.key not in judged)
            if not record["result"] or again:
                record = tried(root, words.package, mutant, source, planted(module, source, mutant), measured)
                print(f"{name}:{record['line']} {record['operator']}: {record['result']} {record['test']}", flush=True)
            record["line"] = mutant.place.start.line
            records.append(record)
            known[mutant.key] = record
            write(file, known.values())
    for record in records:
        record["judgement"] = judged.get(record["id"], "") if record["result"] == "survived" else ""
    write(file, records)
    print(table(records))


def write(file, records):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n"
                            for record in sorted(records, key=lambda record: (record["module"], record["line"], record["id"]))))


if __name__ == "__main__":
    main()
