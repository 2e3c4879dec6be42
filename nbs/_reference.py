"""The reference: a page for each module, made from its source when the book is built: signatures, parameters, docstrings, where they stand.

`python nbs/_reference.py` writes the pages under reference/, where Quarto looks for them; `… lacking` lists what has no words yet."""

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

SHARED = {  # what parameters of these names mean wherever they have no words of their own
    "model": "the model; changed in place where the docstring says so",
    "loss_fn": "`loss_fn(model, batch)` gives one loss per example, (B,)",
    "batch": "what a data loader yields: a dictionary or tuple of tensors, a row for each example",
    "batches": "physical batches, one after the other",
    "context": "what a method sees of its run and may ask of it (`dpft.method.Context`)",
    "t": "the step that is about to be taken, from 0",
    "state": "what the method's `state` gave before the run was interrupted",
    "among": "the partitions to choose from",
    "at_end": "called after the last step, before the ledger is closed: it makes the final weights",
    "data": "a data set: anything with a length that gives a row for a number",
    "views": "whether pictures come in the views of `augment`",
    "work": "a function; what it gives must be picklable",
    "method": "what trains, and when",
    "steps": "logical steps: draws, noise and one update each",
    "batch_size": "expected number of units in a logical step",
    "sample_rate": "probability with which each unit is drawn",
    "noise_multiplier": "standard deviation of the noise over the sensitivity",
    "learning_rate": "of the optimizer",
    "weight_decay": "of the optimizer",
    "clip": "bound on one unit's contribution, in the norm of `order`",
    "order": "of the norm: 1 or 2",
    "epsilon": "the budget, at `delta`",
    "target_epsilon": "the budget that the whole plan must meet, at `delta`",
    "delta": "probability that the bound by epsilon does not cover",
    "accountant": '"prv" or "rdp"',
    "mechanisms": "what was run on the private data (`dpft.privacy.SampledGaussian`)",
    "ledger": "path of the record of what has been spent, or a `Ledger`",
    "run": "identity of a run in the ledger",
    "seed": "makes the run reproducible, and not private against whoever knows it",
    "device": "where to compute",
    "precision": '"bf16" for mixed precision; None: as the model is',
    "dropout": "whether layers that train keep their dropout",
    "progress": "whether a progress bar is shown",
    "tokenizer": "turns texts into tokens; None: the model's own",
    "columns": "which columns of the data are inputs and labels; None: by their names",
    "collate_fn": "makes a batch of examples; None: by the type of the data",
    "physical_batch_size": "examples that are computed at once; None: what fits",
    "parameters": "parameters of the model",
    "sums": "tensors by name",
    "what": "in words, for the report",
    "partitions": "groups of parameters (`dpft.gradients.Partition`)",
    "settings": "of one run, as its record keeps them",
    "full": "the whole grid rather than the reduced one",
    "records": "of experiments, one dictionary a run",
    "folder": "where the files are, or go",
    "output": "where the files go",
}


@dataclass
class Parameter:
    "One row of a table."

    name: str
    type: str
    default: str
    meaning: str
    own: bool  # whether the words are its own


@dataclass
class Entry:
    "A function, class, method or constant with what its page says of it."

    name: str  # BiTFiT.adapt
    node: ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign
    module: "Module"
    owner: ast.ClassDef | None = None

    @property
    def docstring(self) -> str:
        return "" if isinstance(self.node, ast.Assign | ast.AnnAssign) else ast.get_docstring(self.node) or ""

    @cached_property
    def maker(self) -> ast.FunctionDef | None:
        "The function whose parameters these are: a class is called like its `__init__`."
        if isinstance(self.node, ast.FunctionDef):
            return self.node
        body = getattr(self.node, "body", [])
        return next((node for node in body if isinstance(node, ast.FunctionDef) and node.name == "__init__"), None)

    @cached_property
    def parameters(self) -> list[Parameter]:
        "Arguments, or the fields of a data class."
        if self.maker:
            rows = [self._row(*pair) for pair in _arguments(self.maker) if pair[0].arg not in ("self", "cls")]
            return [row for one in rows for row in ([one] if one.name != "knobs" else self._knobs([row.name for row in rows]))]
        if not isinstance(self.node, ast.ClassDef) or not (self.node.decorator_list or self.node.bases):
            return []
        fields = [node for node in self.node.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)]
        return [self._field(node) for node in fields if node.target.id[0] != "_" and "ClassVar" not in ast.unparse(node.annotation)]

    def _field(self, node: ast.AnnAssign) -> Parameter:
        value, words = node.value, self.module.words_at(node.end_lineno, node.lineno)
        if isinstance(value, ast.Call) and ast.unparse(value.func) == "knob":            # a knob says itself what it is
            value, words = value.args[0], ast.literal_eval(value.args[1])
        return self._described(node.target.id, node.annotation, value, words)

    def _knobs(self, known: list[str]) -> list[Parameter]:
        "The knobs that a function takes: those of `Settings`, each declared there once."
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
        last = self.maker.returns is not None and self.maker.returns.lineno == line    # its words are those of what comes back
        words = self.module.words_at(line, argument.lineno) if alone and not last else ""
        return self._described(argument.arg, argument.annotation, default, words)

    def _described(self, name: str, annotation: ast.expr | None, default: ast.expr | None, words: str) -> Parameter:
        kind, value = (ast.unparse(node) if node else "" for node in (annotation, default))
        return Parameter(name, kind.strip("'"), value, words or SHARED.get(name, ""), bool(words))

    @property
    def returns(self) -> tuple[str, str] | None:
        "What a function gives, and the words for it."
        if not isinstance(self.node, ast.FunctionDef) or self.node.returns is None or ast.unparse(self.node.returns) == "None":
            return None
        return ast.unparse(self.node.returns).strip("'"), self.module.comments.get(self.node.returns.end_lineno, "")

    @property
    def signature(self) -> str:
        "How it is called; types stand in the table."
        if isinstance(self.node, ast.FunctionDef) and any(ast.unparse(d).endswith("property") for d in self.node.decorator_list):
            return self.name
        given = list(_bare(self.maker)) if self.maker else [_with_default(p.name, p.default) for p in self.parameters]
        head, kept = f"{self.name}(", [name for name in given if name not in ("self", "cls")]
        lines = wrap(", ".join(name.replace(" ", "\0") for name in kept) + ")", 92, subsequent_indent=" " * 4, break_long_words=False)
        return (head + "\n".join(lines)).replace("\0", " ")

    @property
    def source(self) -> str:
        "A link to the cell that defines it."
        cell = [name for line, name in self.module.cells if line < self.node.lineno][-1]
        return f"../nbs/{self.module.chapter}#{cell}"

    @property
    def anchor(self) -> str:
        return f"ref-{self.module.stem}-{self.name}".replace(".", "-")


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
    "A module as its page shows it."

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
        "The notebook that it comes from, as nbs/ holds it."
        return CELL.search(self.text)[1]

    @property
    def title(self) -> str:
        "What that chapter is called."
        path = PACKAGE.parent / "nbs" / self.chapter
        first = source(json.loads(path.read_text(encoding="utf-8"))["cells"][0]) if path.exists() else ""
        return HEADING.match(first.splitlines()[0])[2] if first.startswith("# ") else "its chapter"


def _targets(node: ast.Assign | ast.AnnAssign) -> list[str]:
    "The names that an assignment makes."
    target = node.targets[0] if isinstance(node, ast.Assign) else node.target
    return [name.id for name in (target.elts if isinstance(target, ast.Tuple) else [target]) if isinstance(name, ast.Name)]


def _code(text: str) -> str:
    "As code, in which a table's bars need no backslash."
    return f"`{text}`" if text else ""


def _cell(text: str) -> str:
    return _plain(text).replace("|", "\\|")


def _plain(text: str) -> str:
    "Words as they stand: in a docstring `^` raises nothing, `~` lowers nothing, and `__len__` is a name."
    return outside_code(text, lambda piece: re.sub(r"([\^~]|_(?=_)|(?<=_)_)", r"\\\1", piece))


def described(entry: Entry) -> str:
    "One name of a page."
    level = "###" if entry.owner else "##"
    kind = "class " if isinstance(entry.node, ast.ClassDef) else ""
    gives, rows = entry.returns, [(_code(p.name), _code(p.type), _code(p.default), _cell(p.meaning)) for p in entry.parameters]
    alone = f" -> {gives[0]}" if gives and not rows else ""                        # a table for one type would be too much
    lines = [f"{level} {entry.name} {{#{entry.anchor} .unnumbered}}", "", "```python", kind + entry.signature + alone, "```", "",
             f"{_plain(entry.docstring)} [[source]({entry.source})]", ""]
    if alone and gives[1]:
        lines += [f"*Gives* {_plain(gives[1])}.", ""]
    elif gives and rows:
        rows.append(("*gives*", _code(gives[0]), "", _cell(gives[1])))
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
    "A module's page; what a user meets first stands first, then the order of the source."
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
    "What a user meets first, with the package to import it from: the names of `dpft`, `dpft.frost`, `dpft.freezing` and `dpft.rapft`."
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
    "The first page: what `dpft` itself offers, and the modules."
    lines = ["# Overview {#sec-reference .unnumbered}", "", "> Every public name, made from the source when the book is built.", "",
             "The names below are what most uses need, by the chapter that they come from; each can be imported from `dpft`,",
             "unless another package stands beside it. All names of a module are on the module's page.",
             "Where a parameter has no words of its own, those of its name are shown: the same name means the same everywhere.", ""]
    names = offered()
    for module in modules():
        own = sorted((pair for pair in names if pair[1].module is module), key=lambda pair: pair[1].node.lineno)
        lines += [f"## [{module.title}]({module.stem}.qmd) {{.unnumbered}}", "", "| name | what it is |", "|:---|:-------|"] if own else []
        for package, entry in own:
            words = _cell(" ".join(entry.docstring.partition("\n\n")[0].split())) + ("" if package == "dpft" else f" (`{package}`)")
            lines.append(f"| [`{entry.name}`]({entry.module.stem}.qmd#{entry.anchor}) | {words} |")
        lines += [""] if own else []
    lines += ["", "## Modules {.unnumbered}", "", "| module | what lives there |", "|:---|:-------|"]
    lines += [f"| [`{m.name}`]({m.stem}.qmd) | {_cell(ast.get_docstring(m.tree) or '')} |" for m in modules()]
    return "\n".join([*lines, ""])


def architectures() -> str:
    "Which models train by which methods: the table that tests/test_table.py tries pair by pair."
    table = json.loads((ROOT / "nbs" / "results" / "models.json").read_text(encoding="utf-8"))
    methods, said = table["methods"], {(one["model"], one["method"]): one["sentence"] for one in table["refused"]}
    pairs = len(methods) * len(table["models"])
    lines = ["# Models and methods {#sec-ref-architectures .unnumbered}", "", "> Which architectures train by which methods.", "",
             f"Of {pairs} pairs, {pairs - len(said)} work and {len(said)} are refused by a sentence that names the way out.",
             "Each pair is tried on a small model of the class with its default loss: the sum of clipped gradients agrees with one",
             "backward pass for each example to a part in 100,000 of the bound, and private steps are taken.", "",
             f"| model | class | {' | '.join(methods)} |", f"|:---|:---|{':---|' * len(methods)}"]
    for name, kind in table["models"].items():
        cells = ["no" if (name, method) in said else "yes" for method in methods]
        lines.append(f"| {name}{' (slow)' if name in table['slow'] else ''} | `{kind}` | {' | '.join(cells)} |")
    lines += ["", "Slow: for some of its parameters no fast rule gives the gradients' lengths, so their per-example gradients are",
              "written out, and a warning names them.", "", "## What is refused, and how {.unnumbered}", ""]
    lines += [f"- {name}, {method}: {_code(sentence)}" for (name, method), sentence in said.items()]
    return "\n".join([*lines, ""])


def write() -> None:
    "All pages, under reference/."
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
    "Names without a docstring, and parameters without words."
    found = [f"{entry.module.name}: {entry.name} has no docstring" for entry in entries
             if not entry.docstring and not isinstance(entry.node, ast.Assign | ast.AnnAssign)]
    return found + [f"{entry.module.name}: {entry.name} does not say what {p.name} is"
                    for entry in entries for p in entry.parameters if not p.meaning]


def promised() -> list[Entry]:
    "What is offered, and the methods of its classes."
    chosen = [entry for _, entry in offered()]
    own = [entry for module in {id(e.module): e.module for e in chosen}.values() for entry in module.entries if entry.owner]
    return [*chosen, *(method for method in own if any(method.owner is entry.node for entry in chosen))]


if __name__ == "__main__":
    if sys.argv[1:] == ["lacking"]:
        print(*lacking([entry for module in modules() for entry in module.entries]), sep="\n")
    else:
        write()
