"""The API reference, made when the book is built: signature, parameters and docstring of each public name.

Parameters are read as nbdev's `show_doc` reads them, by fastcore's docments; what is added are the descriptions that parameters of one
name share. `python nbs/_reference.py` writes what stands above each exported cell to build/reference.json, where `_filter.py` finds it,
and the first pages to reference/; `python nbs/_reference.py lacking` lists the names and parameters that have no description yet."""

import importlib
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from types import ModuleType
from typing import Any

from _book import MADE, ROOT, outside_code
from _filter import DOCUMENTED

FOLDER = ROOT / MADE
PACKAGE = ROOT / "dpft"
BY_HAND = {"__init__.py", "__main__.py", "_modidx.py"}
FRONT = "---\nrepo-actions: false\ncode-tools: false\n---\n\n"  # the repository has no such page
CELL = re.compile(r"^# %% (?:\.\./)+(?:nbs/)?(\S+\.ipynb) #(\S+)")
SPELLED = re.compile(r"\b(?:[a-z_]\w*\.)+(?=[A-Za-z])|<class '|'>")  # a module before a type's name

SHARED = {  # descriptions of parameters by name, used where a parameter has none of its own
    "model": "the model; changed in place where the docstring says so",
    "options": "options of `relevance_map` and of `relevance_mask`",
    "loss_fn": "`loss_fn(model, batch)` returns one loss per example, (B,)",
    "batch": "a batch as a data loader yields it: a dictionary or tuple of tensors with one row per example",
    "batches": "physical batches, in order",
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
    "named": "further arguments, by name",
    "full": "whether to use the full grid instead of the reduced one",
    "records": "records of experiments, one dictionary per run",
    "folder": "folder of the files to read or write",
    "output": "folder to which files are written",
}
OF_TYPE = {  # types that these descriptions are for, where parameters of one name differ in type
    "columns": r"tuple|Sequence", "context": "Context", "data": r"^(?!str|DataShape)", "dropout": "bool", "order": "^int",
    "output": "Path|str", "run": "^str", "t": "^int", "views": "bool"}


def names(module: ModuleType) -> Iterator[tuple[str, Any]]:
    "Public names in the order of the source, a class before its methods; constants too."
    for name in module.__all__:
        its = getattr(module, name)
        yield name, its
        for inner, method in vars(its).items() if inspect.isclass(its) else ():
            method = getattr(method, "fget", None) or getattr(method, "__func__", method)
            if inspect.isfunction(method) and inner[0] != "_" and method.__doc__ and method.__module__ == module.__name__:
                yield f"{name}.{inner}", method


def described(its: Any) -> bool:
    "Whether it has a section of its own; else it is a constant."
    return (inspect.isclass(its) or inspect.isfunction(its)) and getattr(its, "__module__", "").startswith("dpft")


def notebook(module: ModuleType) -> str:
    "The notebook that exports a module, relative to nbs/."
    return next(match[1] for line in inspect.getsource(module).splitlines() if (match := CELL.match(line)))


@cache
def cells(module: ModuleType) -> list[tuple[int, str]]:
    "The lines at which the cells of the notebook begin, with their names."
    return [(line, match[2]) for line, text in enumerate(inspect.getsource(module).splitlines(), 1) if (match := CELL.match(text))]


def address(module: ModuleType) -> str:
    "Where the page of a module lies, as the overview links to it."
    return f"../nbs/{notebook(module)}"


def stem(module: ModuleType) -> str:
    return module.__name__.removeprefix("dpft.").replace(".", "_")


def spelled(annotation: Any) -> str:
    "A type as one writes it."
    return "" if annotation is inspect.Parameter.empty else SPELLED.sub("", inspect.formatannotation(annotation)).strip("'")


def parameters(its: Any) -> list[tuple[str, str, str, str]]:
    "Name, type, default and meaning of each parameter; the last row is what a function returns."
    from fastcore.docments import docments

    from dpft.settings import Settings

    settings = {field.name: field.metadata.get("help", "") for field in fields(Settings)}
    try:
        taken = {*inspect.signature(its).parameters, "return"}    # a class without __init__ takes none
    except ValueError:    # Python's own, of an exception
        taken = set()
    found = {name: one for name, one in docments(its, full=True, returns=True).items() if name in taken}
    rows = []
    for name, one in found.items():
        kind, default = spelled(one["anno"]), one["default"]
        if name in ("self", "cls") or (name == "return" and (inspect.isclass(its) or kind in ("", "None"))):
            continue
        own = one["docment"] or settings.get(name, "") or (SHARED.get(name, "") if re.search(OF_TYPE.get(name, ""), kind) else "")
        rows.append((name, kind, "" if default is inspect.Parameter.empty else repr(default), " ".join(own.split())))
    return rows


def _code(text: str) -> str:
    "Text as code, in which the bars of a table need no backslash."
    return f"`{text}`" if text else ""


def _plain(text: str) -> str:
    "Text with `^`, `~` and `__` escaped, which a docstring uses without their meaning in Markdown."
    return outside_code(text, lambda piece: re.sub(r"([\^~]|_(?=_)|(?<=_)_)", r"\\\1", piece))


def _cell(text: str) -> str:
    return _plain(text).replace("|", "\\|")


def section(module: ModuleType, name: str, its: Any) -> str:
    "What a reader needs to call one name."
    rows = parameters(its)
    call = ", ".join(f"{name}={default}" if default else name for name, _, default, _ in rows if name != "return")
    first = f"{'class ' * inspect.isclass(its)}{name}("
    if len(first + call) > 87:
        call = "\n    " + "\n    ".join(textwrap.wrap(call, 84, break_long_words=False, break_on_hyphens=False))
    lines = [f"{'####' if '.' in name else '###'} {name} {{#ref-{stem(module)}-{name.replace('.', '-')} .unnumbered}}", "", "```python",
             f"{first}{call})", "```", "", _plain(inspect.getdoc(its) or ""), ""]
    if any(kind or words for _, kind, _, words in rows):
        lines += ["::: {.parameters}", "| parameter | type | default | meaning |", "|:----|:------|:----|:----------|"]
        lines += [f"| {'*returns*' if name == 'return' else _code(name)} | {_code(kind)} | {_code(default)} | {_cell(words)} |"
                  for name, kind, default, words in rows]
        lines += [":::", ""]
    return "\n".join(lines)


def sections(module: ModuleType) -> dict[str, str]:
    "What stands above each cell of a module's notebook, by the cell's id."
    found = dict[str, str]()
    for name, its in names(module):
        if described(its) and its.__module__ == module.__name__:
            line = inspect.getsourcelines(inspect.unwrap(its))[1]
            cell = [cell for start, cell in cells(module) if start <= line][-1]
            found[cell] = found.get(cell, "") + section(module, name, its)
    return found


@cache
def modules() -> list[ModuleType]:
    "All modules that a notebook exports."
    paths = [path for path in sorted(PACKAGE.rglob("*.py")) if path.name not in BY_HAND]
    return [importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts)) for path in paths]


def offered() -> list[tuple[str, str, Any]]:
    "The names in `dpft`, `dpft.frost`, `dpft.freezing` and `dpft.rapft`: the package to import it from, the name, and what it is."
    found: dict[int, tuple[str, str, Any]] = {}
    for package in ("dpft", "dpft.frost", "dpft.freezing", "dpft.rapft"):
        room = importlib.import_module(package)
        for name in room.__all__:
            if described(its := getattr(room, name)):
                found.setdefault(id(its), (package, name, its))
    return [*found.values()]


def overview() -> str:
    "The first page: the names that most programs need, and the modules."
    lines = ["# Overview {#sec-reference .unnumbered}", "", "> Every public name, generated from the source when the book is built.", "",
             "Most programs need only the names below.",
             "Import them from `dpft`, or from the package that is named in parentheses.",
             "The page of each module has all of its names, with their source.",
             "A parameter without a description of its own has the description that parameters of its name share.", ""]
    for module in modules():
        own = [(package, name, its) for package, name, its in offered() if its.__module__ == module.__name__]
        if own:
            lines += [f"## [{module.__name__}]({address(module)}) {{.unnumbered}}", "", "| name | what it is |", "|:---|:-------|"]
        for package, name, its in own:
            words = _cell(" ".join((inspect.getdoc(its) or "").partition("\n\n")[0].split()))
            words += "" if package == "dpft" else f" (`{package}`)"
            lines.append(f"| [`{name}`]({address(module)}#ref-{stem(module)}-{name}) | {words} |")
        lines += [""] if own else []
    lines += ["", "## Modules {.unnumbered}", "", "| module | contents |", "|:---|:-------|"]
    lines += [f"| [`{m.__name__}`]({address(m)}) | {_cell(m.__doc__ or '')} |" for m in modules()]
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
    "Write the two pages, and what the filter puts above exported cells."
    FOLDER.mkdir(exist_ok=True)
    for name, text in {"overview": overview(), "architectures": architectures()}.items():
        (FOLDER / f"{name}.qmd").write_text(FRONT + text, encoding="utf-8")
    DOCUMENTED.parent.mkdir(exist_ok=True)
    documented = {module.__name__.removeprefix("dpft."): sections(module) for module in modules()}
    DOCUMENTED.write_text(json.dumps(documented), encoding="utf-8")


def lacking(entries: list[tuple[str, Any]]) -> list[str]:
    "Names without a docstring, and parameters without a description."
    found = [f"{name} has no docstring" for name, its in entries if not inspect.getdoc(its)]
    return found + [f"{name} does not say what {parameter} is" for name, its in entries
                    for parameter, _, _, words in parameters(its) if not words and parameter != "return"]


if __name__ == "__main__":
    if sys.argv[1:] == ["lacking"]:
        print(*lacking([(f"{module.__name__}: {name}", its) for module in modules() for name, its in names(module) if described(its)]),
              sep="\n")
    else:
        write()
