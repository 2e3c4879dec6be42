"""The API reference: one page per module with signatures, parameters, docstrings and links to the source, generated when the book is built.

`python nbs/_reference.py` writes the pages to reference/, where Quarto finds them;
`python nbs/_reference.py lacking` lists the names and parameters that have no description yet."""

import ast
import io
import json
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from textwrap import wrap

from _book import HEADING, MADE, ROOT, outside_code, source

FOLDER = ROOT / MADE
PACKAGE = ROOT / "dpft"
BY_HAND = {"__init__.py", "__main__.py", "_modidx.py"}
FRONT = "---\nrepo-actions: false\ncode-tools: false\n---\n\n"  # the repository has no such page
CELL = re.compile(r"(?m)^# %% (?:\.\./)+(?:nbs/)?(\S+\.ipynb) #(\S+)")

SHARED = {  # descriptions of parameters by name, used where a parameter has none of its own
    "model": "the model; changed in place where the docstring says so",
    "loss_fn": "`loss_fn(model, batch)` returns one loss per example, (B,)",
    "batch": "a batch as a data loader yields it: a dictionary or tuple of tensors with one row per example",
    "batches": "physical batches, in order",
    "context: str | int": "texts and numbers that name one random stream of the run",
    "context": "the run's context: all that a method may read from its run or request of it (`dpft.method.Context`)",
    "t": "index of the next step, from 0",
    "state": "what the method's `state` returned before the run was interrupted",
    "among": "the partitions to choose from",
    "at_end": "called after the last step, before the ledger is closed, to make the final weights",
    "data": "a data set: any object with a length whose rows are read by index",
    "views": "whether to use the views of each picture that `augment` makes",
    "work": "a function whose result can be pickled",
    "method": "the fine-tuning method: which parameters train, and when",
    "steps": "number of training steps",
    "batch_size": "number of examples in a batch; in private training, the expected number of privacy units",
    "sample_rate": "probability with which each privacy unit is sampled in a step",
    "noise_multiplier": "standard deviation of the noise divided by the sensitivity",
    "learning_rate": "learning rate of the optimizer",
    "weight_decay": "weight decay of the optimizer",
    "clip": "clipping bound on the norm of one privacy unit's contribution",
    "order": "order of the norm: 1 or 2",
    "epsilon": "privacy budget epsilon, at `delta`",
    "target_epsilon": "privacy budget epsilon for the whole plan, at `delta`",
    "delta": "the delta of (epsilon, delta)-differential privacy",
    "accountant": 'privacy accountant: "prv" or "rdp"',
    "mechanisms": "the mechanisms that were run on the private data (`dpft.privacy.SampledGaussian`)",
    "ledger": "the ledger that records what has been spent: a `Ledger` or its path",
    "run": "identifier of the run in the ledger",
    "seed": "makes the result reproducible; a run is not private against anyone who knows its seed",
    "device": "device on which to compute",
    "precision": '"bf16" for mixed precision; None: the precision of the model',
    "dropout": "whether the layers that train keep their dropout",
    "progress": "whether to show a progress bar",
    "tokenizer": "the tokenizer of the texts; None: the model's own",
    "columns": "names of the columns that hold the inputs and the labels; None: found by name and type",
    "collate_fn": "turns a list of examples into a batch; None: chosen by the type of the data",
    "physical_batch_size": "number of rows processed at once",
    "parameters": "the parameters of the model",
    "sums": "tensors by name",
    "what": "a description in words, for the report",
    "partitions": "groups of parameters (`dpft.norms.Partition`)",
    "settings": "the settings of one run",
    "full": "whether to use the full grid instead of the reduced one",
    "records": "records of experiments, one dictionary per run",
    "folder": "folder of the files to read or write",
    "output": "folder to which files are written",
}
OF_TYPE = {  # types that these descriptions are for, where parameters of one name differ in type
    "columns": r"tuple|Sequence", "context": "Context", "data": r"^(?!str|DataShape)", "dropout": "bool", "order": "^int",
    "output": "Path|str", "run": "^str", "t": "^int", "views": "bool"}


@dataclass
class Parameter:
    "One row of a table."

    name: str
    type: str
    default: str
    meaning: str
    own: bool  # whether the description is its own


@dataclass
class Entry:
    "A function, class, method or constant, and how its page describes it."

    name: str  # BiTFiT.adapt
    node: ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign
    module: "Module"
    owner: ast.ClassDef | None = None

    @property
    def docstring(self) -> str:
        return "" if isinstance(self.node, ast.Assign | ast.AnnAssign) else ast.get_docstring(self.node) or ""

    @cached_property
    def maker(self) -> ast.FunctionDef | None:
        "The function whose parameters are shown; for a class, its `__init__`."
        if isinstance(self.node, ast.FunctionDef):
            return self.node
        body = getattr(self.node, "body", [])
        return next((node for node in body if isinstance(node, ast.FunctionDef) and node.name == "__init__"), None)

    @cached_property
    def parameters(self) -> list[Parameter]:
        "The arguments, or the fields of a data class."
        if self.maker:
            rows = [self._row(*pair) for pair in _arguments(self.maker) if pair[0].arg not in ("self", "cls")]
            return [row for one in rows for row in ([one] if one.name != "further" else self._knobs([row.name for row in rows]))]
        if not isinstance(self.node, ast.ClassDef) or not (self.node.decorator_list or self.node.bases):
            return []
        fields = [node for node in self.node.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)]
        return [self._field(node) for node in fields if node.target.id[0] != "_" and "ClassVar" not in ast.unparse(node.annotation)]

    def _field(self, node: ast.AnnAssign) -> Parameter:
        value, words = node.value, self.module.words_at(node.end_lineno, node.lineno)
        if isinstance(value, ast.Call) and ast.unparse(value.func) == "setting":         # a setting carries its own description
            value, words = value.args[0], ast.literal_eval(value.args[1])
        return self._described(node.target.id, node.annotation, value, words)

    def _knobs(self, known: list[str]) -> list[Parameter]:
        "The knobs that a function takes, each declared once, in `Settings`."
        decorator = next((d for d in self.maker.decorator_list if ast.unparse(d).startswith("takes_settings")), None)
        if decorator is None:
            return []
        readers = [ast.literal_eval(reader) for reader in decorator.args]
        settings = next(entry for module in modules() for entry in module.entries if entry.name == "Settings")
        def reader(node: ast.AnnAssign) -> str:
            return ast.literal_eval(node.value.args[2]) if len(node.value.args) > 2 else "engine"
        chosen = [node for node in settings.node.body if isinstance(node, ast.AnnAssign) and reader(node) in readers]
        return [settings._field(node) for node in chosen if node.target.id not in known]

    def _row(self, argument: ast.arg, default: ast.expr | None) -> Parameter:
        line = (default or argument).end_lineno
        alone = [other for other, value in _arguments(self.maker) if (value or other).end_lineno == line] == [argument]
        last = self.maker.returns is not None and self.maker.returns.lineno == line    # then the comment describes the returned value
        words = self.module.words_at(line, argument.lineno) if alone and not last else ""
        return self._described(argument.arg, argument.annotation, default, words)

    def _described(self, name: str, annotation: ast.expr | None, default: ast.expr | None, words: str) -> Parameter:
        kind, value = (ast.unparse(node) if node else "" for node in (annotation, default))
        return Parameter(name, kind.strip("'"), value, words or _shared(name, kind), bool(words))

    @property
    def returns(self) -> tuple[str, str] | None:
        "The type that a function returns, and its description."
        if not isinstance(self.node, ast.FunctionDef) or self.node.returns is None or ast.unparse(self.node.returns) == "None":
            return None
        return ast.unparse(self.node.returns).strip("'"), self.module.comments.get(self.node.returns.end_lineno, "")

    @property
    def signature(self) -> str:
        "The call without types, which are in the table."
        if isinstance(self.node, ast.FunctionDef) and any(ast.unparse(d).endswith("property") for d in self.node.decorator_list):
            return self.name
        given = list(_bare(self.maker)) if self.maker else [_with_default(p.name, p.default) for p in self.parameters]
        head, kept = f"{self.name}(", [name for name in given if name not in ("self", "cls")]
        lines = wrap(", ".join(name.replace(" ", "\0") for name in kept) + ")", 92, subsequent_indent=" " * 4, break_long_words=False)
        return (head + "\n".join(lines)).replace("\0", " ")

    @property
    def source(self) -> str:
        "The address of the cell that defines it."
        cell = [name for line, name in self.module.cells if line < self.node.lineno][-1]
        return f"../nbs/{self.module.chapter}#{cell}"

    @property
    def anchor(self) -> str:
        return f"ref-{self.module.stem}-{self.name}".replace(".", "-")


def _shared(name: str, kind: str) -> str:
    "The description that parameters of a name share, if it fits the type."
    kind = kind.strip("'")
    fits = not kind or re.search(OF_TYPE.get(name, ""), kind)
    return SHARED.get(f"{name}: {kind}") or (SHARED.get(name, "") if fits else "")


def _arguments(function: ast.FunctionDef) -> list[tuple[ast.arg, ast.expr | None]]:
    "All arguments in order, with their defaults."
    a = function.args
    plain = [*a.posonlyargs, *a.args]
    pairs = [*zip(plain, [*[None] * (len(plain) - len(a.defaults)), *a.defaults], strict=True)]
    return [*pairs, *([(a.vararg, None)] if a.vararg else []), *zip(a.kwonlyargs, a.kw_defaults, strict=True),
            *([(a.kwarg, None)] if a.kwarg else [])]


def _with_default(name: str, default: str) -> str:
    return f"{name}={default}" if default else name


def _bare(function: ast.FunctionDef) -> Iterator[str]:
    "The arguments of a call, without their types."
    a = function.args
    for argument, default in _arguments(function):
        if argument is a.vararg or (a.kwonlyargs and argument is a.kwonlyargs[0] and not a.vararg):
            yield f"*{argument.arg}" if argument is a.vararg else "*"
        if argument is not a.vararg:
            yield f"**{argument.arg}" if argument is a.kwarg else _with_default(argument.arg, ast.unparse(default) if default else "")


class Module:
    "A module, as its page describes it."

    def __init__(self, path: Path):
        self.text = path.read_text(encoding="utf-8")
        self.tree = ast.parse(self.text)
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        self.name, self.stem = ".".join(parts), "_".join(parts[1:])
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline)
        self.comments = {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}

    def words_at(self, line: int, first: int) -> str:
        "The comment at the end of a line, or on lines of its own above the first."
        if line in self.comments:
            return self.comments[line]
        lines, above = self.text.splitlines(), []
        while first > 1 and lines[first - 2].lstrip().startswith("# ") and not lines[first - 2].startswith("# %%"):
            first -= 1
            above.insert(0, self.comments[first])
        return " ".join(above)

    @cached_property
    def cells(self) -> list[tuple[int, str]]:
        "The lines at which the cells of the notebook begin, with their names."
        return [(line, match[2]) for line, text in enumerate(self.text.splitlines(), 1) if (match := CELL.match(text))]

    @cached_property
    def public(self) -> list[str]:
        "The names in `__all__`."
        lists = (node for node in self.tree.body if isinstance(node, ast.Assign) and _targets(node) == ["__all__"])
        return ast.literal_eval(next(lists).value)

    @cached_property
    def entries(self) -> list[Entry]:
        "Public names in the order of the source, a class before its methods."
        found = []
        for node in self.tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in self.public:
                found.append(Entry(node.name, node, self))
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                found += [Entry(name, node, self) for name in _targets(node) if name in self.public]
            if isinstance(node, ast.ClassDef) and node.name in self.public:
                methods = [m for m in node.body if isinstance(m, ast.FunctionDef) and m.name[0] != "_" and ast.get_docstring(m)]
                found += [Entry(f"{node.name}.{method.name}", method, self, node) for method in methods]
        return found

    @property
    def chapter(self) -> str:
        "The notebook that exports the module, relative to nbs/."
        return CELL.search(self.text)[1]

    @property
    def title(self) -> str:
        "The title of that chapter."
        path = PACKAGE.parent / "nbs" / self.chapter
        first = source(json.loads(path.read_text(encoding="utf-8"))["cells"][0]) if path.exists() else ""
        return HEADING.match(first.splitlines()[0])[2] if first.startswith("# ") else "its chapter"


def _targets(node: ast.Assign | ast.AnnAssign) -> list[str]:
    "The names that an assignment defines."
    target = node.targets[0] if isinstance(node, ast.Assign) else node.target
    return [name.id for name in (target.elts if isinstance(target, ast.Tuple) else [target]) if isinstance(name, ast.Name)]


def _code(text: str) -> str:
    "Text as code, in which the bars of a table need no backslash."
    return f"`{text}`" if text else ""


def _cell(text: str) -> str:
    return _plain(text).replace("|", "\\|")


def _plain(text: str) -> str:
    "Text with `^`, `~` and `__` escaped, which a docstring uses without their meaning in Markdown."
    return outside_code(text, lambda piece: re.sub(r"([\^~]|_(?=_)|(?<=_)_)", r"\\\1", piece))


def described(entry: Entry) -> str:
    "The section of a page that describes one name."
    level = "###" if entry.owner else "##"
    kind = "class " if isinstance(entry.node, ast.ClassDef) else ""
    gives, rows = entry.returns, [(_code(p.name), _code(p.type), _code(p.default), _cell(p.meaning)) for p in entry.parameters]
    alone = f" -> {gives[0]}" if gives and not rows else ""                        # one type needs no table
    lines = [f"{level} {entry.name} {{#{entry.anchor} .unnumbered}}", "", "```python", kind + entry.signature + alone, "```", "",
             f"{_plain(entry.docstring)} [[source]({entry.source})]", ""]
    if alone and gives[1]:
        lines += [f"*Returns* {_plain(gives[1])}.", ""]
    elif gives and rows:
        rows.append(("*returns*", _code(gives[0]), "", _cell(gives[1])))
    if any(row[1] or row[3] for row in rows):
        lines += ["::: {.parameters}", "| parameter | type | default | meaning |", "|:----|:------|:----|:----------|"]
        lines += [*(f"| {' | '.join(row)} |" for row in rows), ":::", ""]
    return "\n".join(lines)


def constants(entries: list[Entry]) -> str:
    "The constants of a module as one table."
    if not entries:
        return ""
    rows = []
    for entry in entries:
        value = " ".join(ast.unparse(entry.node.value).split()) if entry.node.value else ""
        value = value if len(value) <= 60 else value[:57] + "…"
        words = entry.module.comments.get(entry.node.end_lineno, "") or entry.module.comments.get(entry.node.lineno, "")
        rows.append(f"| `{entry.name}` | {_code(value.replace('`', ''))} | {_cell(words)} |")
    return "\n".join(["## Constants {.unnumbered}", "", "| name | value | meaning |", "|:---|:-----|:-----|", *rows, ""])


def page(module: Module, first: frozenset[str] = frozenset()) -> str:
    "The page of a module: first the names that `offered` lists, then the others, both in the order of the source."
    values = [entry for entry in module.entries if isinstance(entry.node, ast.Assign | ast.AnnAssign)]
    others = sorted((entry for entry in module.entries if entry not in values), key=lambda entry: entry.name.split(".")[0] not in first)
    words = _plain(ast.get_docstring(module.tree) or "")
    head = [f"# {module.name} {{#sec-ref-{module.stem.replace('_', '-')} .unnumbered}}", "", f"> {words}", "",
            f"Derived in [{module.title}](../nbs/{module.chapter}).", ""]
    return "\n".join([*head, *map(described, others), constants(values)])


@cache
def modules() -> list[Module]:
    "All modules that a notebook exports, in the order of their chapters."
    found = [Module(path) for path in sorted(PACKAGE.rglob("*.py")) if path.name not in BY_HAND]
    return sorted(found, key=lambda module: int(Path(module.chapter).name.partition("_")[0]))


def offered() -> list[tuple[str, Entry]]:
    "The names in `dpft`, `dpft.frost`, `dpft.freezing` and `dpft.rapft`, each with the package to import it from."
    entries = {(module.name, entry.name): entry for module in modules() for entry in module.entries}
    found: dict[str, tuple[str, Entry]] = {}
    for path in (PACKAGE / "__init__.py", *sorted(PACKAGE.glob("[fr]*/__init__.py"))):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for name in node.names if isinstance(node, ast.ImportFrom) else ():
                if entry := entries.get((node.module or "", name.name)):
                    found.setdefault(entry.anchor, (".".join(path.relative_to(ROOT).parts[:-1]), entry))
    top = {name.name for node in ast.walk(ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8")))
           if isinstance(node, ast.ImportFrom) for name in node.names}
    return [("dpft" if entry.name in top else package, entry) for package, entry in found.values()]


def overview() -> str:
    "The first page: the names that most programs need, and the modules."
    lines = ["# Overview {#sec-reference .unnumbered}", "", "> Every public name, generated from the source when the book is built.", "",
             "Most programs need only the names below, which are grouped by the chapter that defines them.",
             "Import them from `dpft`, or from the package that is named in parentheses.",
             "The page of each module lists all of its names.",
             "A parameter without a description of its own has the description that parameters of its name share.", ""]
    names = offered()
    for module in modules():
        own = sorted((pair for pair in names if pair[1].module is module), key=lambda pair: pair[1].node.lineno)
        lines += [f"## [{module.title}]({module.stem}.qmd) {{.unnumbered}}", "", "| name | what it is |", "|:---|:-------|"] if own else []
        for package, entry in own:
            words = _cell(" ".join(entry.docstring.partition("\n\n")[0].split())) + ("" if package == "dpft" else f" (`{package}`)")
            lines.append(f"| [`{entry.name}`]({entry.module.stem}.qmd#{entry.anchor}) | {words} |")
        lines += [""] if own else []
    lines += ["", "## Modules {.unnumbered}", "", "| module | contents |", "|:---|:-------|"]
    lines += [f"| [`{m.name}`]({m.stem}.qmd) | {_cell(ast.get_docstring(m.tree) or '')} |" for m in modules()]
    return "\n".join([*lines, ""])


def architectures() -> str:
    "The table of models and methods, each pair of which tests/test_table.py tests."
    table = json.loads((ROOT / "nbs" / "results" / "models.json").read_text(encoding="utf-8"))
    methods, said = table["methods"], {(one["model"], one["method"]): one["sentence"] for one in table["refused"]}
    pairs = len(methods) * len(table["models"])
    lines = ["# Models and methods {#sec-ref-architectures .unnumbered}", "", "> Which methods can train which architectures.", "",
             f"Of {pairs} pairs, {pairs - len(said)} work and {len(said)} are refused with a message that says what to do instead.",
             "Each pair is tested on a small model of the class with its default loss: private steps are taken, and the sum of",
             "clipped gradients must agree with one backward pass per example to within 1/100,000 of the clipping bound.", "",
             f"| model | class | {' | '.join(methods)} |", f"|:---|:---|{':---|' * len(methods)}"]
    for name, kind in table["models"].items():
        cells = ["no" if (name, method) in said else "yes" for method in methods]
        lines.append(f"| {name}{' (slow)' if name in table['slow'] else ''} | `{kind}` | {' | '.join(cells)} |")
    lines += ["", "Slow: for some parameters of the model no fast rule gives the norms of per-example gradients, so these gradients",
              "are materialised, and a warning names the parameters.", "", "## Refused pairs and their messages {.unnumbered}", ""]
    lines += [f"- {name}, {method}: {_code(sentence)}" for (name, method), sentence in said.items()]
    return "\n".join([*lines, ""])


def write() -> None:
    "Write all pages to reference/."
    FOLDER.mkdir(exist_ok=True)
    first = {module.stem: frozenset(entry.name for _, entry in offered() if entry.module is module) for module in modules()}
    pages = {"overview": overview(), "architectures": architectures()}
    pages |= {module.stem: page(module, first[module.stem]) for module in modules()}
    for stem, text in pages.items():
        (FOLDER / f"{stem}.qmd").write_text(FRONT + text, encoding="utf-8")
    for path in FOLDER.glob("*.qmd"):
        if path.stem not in pages:
            path.unlink()


def lacking(entries: list[Entry]) -> list[str]:
    "Names without a docstring, and parameters without a description."
    found = [f"{entry.module.name}: {entry.name} has no docstring" for entry in entries
             if not entry.docstring and not isinstance(entry.node, ast.Assign | ast.AnnAssign)]
    return found + [f"{entry.module.name}: {entry.name} does not say what {p.name} is"
                    for entry in entries for p in entry.parameters if not p.meaning]


def promised() -> list[Entry]:
    "The names that `offered` lists, and the methods of their classes."
    chosen = [entry for _, entry in offered()]
    own = [entry for module in {id(e.module): e.module for e in chosen}.values() for entry in module.entries if entry.owner]
    return [*chosen, *(method for method in own if any(method.owner is entry.node for entry in chosen))]


if __name__ == "__main__":
    if sys.argv[1:] == ["lacking"]:
        print(*lacking([entry for module in modules() for entry in module.entries]), sep="\n")
    else:
        write()
