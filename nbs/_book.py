"""The book as a whole: chapters and labels, whether it is consistent (`check`, `exported`), how it is run (`run`)."""

import ast
import hashlib
import importlib
import json
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
BIBLIOGRAPHY = ROOT / "nbs" / "references.bib"
SOURCE = "source"  # the folder of notebooks that export a module
MADE = "reference"  # the folder of pages that `_reference.py` makes from the package

KINDS = ("lem", "thm", "def", "cor", "prp", "exm", "fig", "tbl", "eq", "sec")  # of what can be referred to

CODE = re.compile(r"(?ms)^(`{3,})[^\n]*\n.*?^\1[ \t]*$|(?<!`)`[^`\n]+`(?!`)")
REFERENCE = re.compile(rf"(?<![\w@])@((?:{'|'.join(KINDS)})-[\w-]*\w)")
CITATION = re.compile(rf"(?<![\w@./])@(?!(?:{'|'.join(KINDS)})-)([a-zA-Z][\w:-]*\w)")
OPTIONS = re.compile(r"(?m)^#\| .*\n")  # of a cell, in an exported module
LABEL = re.compile(rf"\{{#((?:{'|'.join(KINDS)})-[\w-]+)")
READ = re.compile(  # a name of records: read as such, of a file, or a quoted name with a hyphen
    r"""(?:records_of|results_file)\(["']([\w-]+)["']|(?:results/|glob\(["'])([\w*-]+)\.jsonl|["']([a-z0-9]+(?:-[a-z0-9]+)+)["']""")
DRAWN = re.compile(r"""["']([\w-]+)["']: Drawing\(((?:.(?!Drawing\())*)""", re.DOTALL)
HEADER = "takes"  # id of the cell that says how long a chapter runs
MACHINE_PATH = re.compile(r"(?<![\w.:/])/[\w.-]+/[\w.-]+/|/tmp/|site-packages")


@dataclass
class Chapter:
    "One chapter: a notebook, or a page of text."

    path: Path

    @property
    def cells(self) -> list[dict]:
        if self.path.suffix == ".ipynb":
            return json.loads(self.path.read_text(encoding="utf-8"))["cells"]
        text = re.sub(r"\{\{< include (\S+) >\}\}", self._included, self.path.read_text(encoding="utf-8"))
        return [{"cell_type": "markdown", "source": text}]

    def _included(self, match: re.Match) -> str:
        "The text of an included file; the page's own title stands for the file's."
        path = self.path.parent / match[1]
        return re.sub(r"\A# .*\n", "", path.read_text(encoding="utf-8")) if path.exists() else ""

    @property
    def labels(self) -> list[str]:
        "What can be referred to: sections, lemmas, equations, figures and tables, in order."
        found = []
        for cell in self.cells:
            if cell["cell_type"] == "markdown":
                found += LABEL.findall(CODE.sub("", source(cell)))
            elif label := directives(source(cell))[0].get("label"):
                found.append(label)
        return found


def chapters() -> list[Chapter]:
    "Every chapter of _quarto.yml in order."
    book = yaml.safe_load((ROOT / "_quarto.yml").read_text(encoding="utf-8"))["book"]
    listed = [name for entry in [*book["chapters"], *book.get("appendices", [])]
              for name in (entry["chapters"] if isinstance(entry, dict) else [entry])]
    return [Chapter(ROOT / name) for name in listed]


def source(cell: dict) -> str:
    "A cell's text, stored as a string or as lines."
    return "".join(cell["source"])


def directives(text: str) -> tuple[dict[str, str], str]:
    "The `#| name: value` lines at the top of a code cell, and the code below them."
    lines, found = text.splitlines(), {}
    while lines and (lines[0].startswith("#|") or not lines[0].strip()):
        name, _, value = lines.pop(0).removeprefix("#|").strip().partition(" ")
        found[name.rstrip(":")] = value.strip().strip("\"'").replace("\\\\", "\\")
    return found, "\n".join(lines)


def unreadable(text: str) -> str:
    "The options of a code cell that are no YAML, which ends the making of the site; empty when they are."
    options = [line.removeprefix("#|").strip() for line in text.splitlines() if re.match(r"#\| *[\w-]+: ", line)]
    try:
        yaml.safe_load("\n".join(options))
    except yaml.YAMLError as error:
        return getattr(error, "problem", None) or str(error)
    return ""


def outside_code(text: str, change: Callable[[str], str]) -> str:
    "Apply `change` to what is neither a fenced block nor inline code."
    pieces, end = [], 0
    for match in CODE.finditer(text):
        pieces += [change(text[end : match.start()]), match.group()]
        end = match.end()
    return "".join([*pieces, change(text[end:])])


def docstrings(text: str) -> Iterator[str]:
    "The docstrings of one code cell."
    try:
        tree = ast.parse(text)
    except SyntaxError:  # a magic
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield ast.get_docstring(node) or ""


def prose(chapter: Chapter) -> Iterator[str]:
    "Everything in a chapter that may refer: text without its code, captions, docstrings."
    for cell in chapter.cells:
        if cell["cell_type"] == "markdown":
            yield CODE.sub("", source(cell))
        else:
            options, body = directives(source(cell))
            yield from (value for name, value in options.items() if name.endswith("-cap"))
            yield from docstrings(body)


def devices(chapter: Chapter) -> list[str]:
    "On what the records were made that a chapter shows: those under nbs/results that its code names, but not in what it exports."
    cells = [source(cell) for cell in chapter.cells if cell["cell_type"] == "code"]
    code = "\n".join(cell for cell in cells if not re.match(r"#\|\s*export", cell))
    figures = ROOT / "dpft" / "book" / "drawings.py"
    if "DRAWINGS[" in code and figures.exists():                                  # what a figure stands on is written there
        drawn = dict(DRAWN.findall(figures.read_text(encoding="utf-8")))
        code += "".join(drawn[name] for name in re.findall(r"[\"']([\w-]+)[\"']", code) if name in drawn)
    named = {name for found in READ.findall(code) for name in found if name}
    files = sorted({path for name in named for path in (ROOT / "nbs" / "results").glob(f"{name}.jsonl")})
    lines = [json.loads(line) for path in files for line in path.read_text(encoding="utf-8").splitlines()]
    return sorted({re.sub(r"\b1 threads$", "1 thread", entry["device"]) for entry in lines if "device" in entry})


def header(chapter: Chapter, seconds: float) -> str:
    "How long a chapter runs, and on what its records were made, in one line."
    known = devices(chapter)
    made = f"; its records were made on {' and on '.join(known)}" if known else ""
    return f"*Runs in about {5 * max(1, round(seconds / 5))} s on an idle core{made}.*"


def problems() -> list[str]:
    "What is wrong with the book, one sentence each; an empty list when nothing is."
    book = chapters()
    listed = [chapter.path for chapter in book]
    written = [path for path in listed if path.parent.name != MADE]
    found = [f"_quarto.yml lists {path.relative_to(ROOT)}, which does not exist" for path in written if not path.exists()]
    found += [f"{path.relative_to(ROOT)} is listed twice in _quarto.yml" for path, times in Counter(listed).items() if times > 1]
    notebooks = sorted((ROOT / "nbs").glob("**/*.ipynb"))
    found += [f"{path.relative_to(ROOT)} is no chapter of _quarto.yml" for path in notebooks if path not in listed]
    book = [chapter for chapter in book if chapter.path.exists()]
    labels = Counter(label for chapter in book for label in chapter.labels)
    found += [f"{times} things have the label {name}" for name, times in labels.items() if times > 1]
    keys = set(re.findall(r"(?m)^@\w+\{([^,\s]+),", BIBLIOGRAPHY.read_text(encoding="utf-8")))
    for chapter in book:
        for text in prose(chapter):
            found += [f"{chapter.path.name}: @{name} is no label of the book" for name in REFERENCE.findall(text) if name not in labels]
            found += [f"{chapter.path.name}: @{key} is not in references.bib" for key in CITATION.findall(text) if key not in keys]
        found += notebook_problems(chapter)
    return found


def notebook_problems(chapter: Chapter) -> Iterator[str]:
    "What must not be in a notebook: repeated or missing cell ids, stored errors, paths of a machine."
    if chapter.path.suffix != ".ipynb":
        return
    told = next((source(cell) for cell in chapter.cells if cell.get("id") == HEADER), "")
    if told and any(device not in told for device in devices(chapter)):
        yield f"{chapter.path.name}: the header does not name every device of its records; `make notebooks` writes it anew"
    identifiers = Counter(cell.get("id") for cell in chapter.cells)
    yield from (f"{chapter.path.name}: {times} cells have the id {name}" for name, times in identifiers.items() if times > 1 or not name)
    for cell in chapter.cells:
        if cell["cell_type"] == "code" and (why := unreadable(source(cell))):
            yield f"{chapter.path.name}: the options of cell {cell['id']} are no YAML ({why}); escape quotation marks within a caption"
        stored = cell.get("outputs", [])
        if any(result["output_type"] == "error" for result in stored):
            yield f"{chapter.path.name}: the stored output of cell {cell['id']} is an error"
        for result in stored:
            shown = json.dumps(result.get("text", [])) + json.dumps(result.get("data", {}).get("text/plain", []))
            if path := MACHINE_PATH.search(shown):
                yield f"{chapter.path.name}: the output of cell {cell['id']} shows a path of the machine ({path[0]})"


def digests() -> dict[str, str]:
    "A hash of every notebook and every module."
    files = [*(ROOT / "nbs").glob("**/*.ipynb"), *(ROOT / "dpft").glob("**/*.py")]
    return {str(path.relative_to(ROOT)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files if "checkpoint" not in str(path)}


def export() -> list[str]:
    """Notebooks to package, without the cells' options for a page, which nbdev leaves there; nothing to say.

    Then what does not belong in the notebooks is stripped from them.
    """
    from nbdev.clean import nbdev_clean
    from nbdev.doclinks import nbdev_export

    os.chdir(ROOT)
    nbdev_export()
    for module in (ROOT / "dpft").glob("**/*.py"):
        text = module.read_text(encoding="utf-8")
        if (plain := OPTIONS.sub("", text)) != text:
            module.write_text(plain, encoding="utf-8")
    nbdev_clean()
    return []


def exported() -> list[str]:
    "Files that exporting and cleaning changed: the package was not what the notebooks say."
    before = digests()
    export()
    after = digests()
    changed = sorted(name for name in before | after if before.get(name) != after.get(name))
    return [f"{name} was not what `make export` writes; it is now, so look at the change and keep it" for name in changed]


def test(path: Path) -> list[str]:
    "Run a notebook and store nothing; under DPFT_SALT its cells marked `pinned`, which hold for one stream by value, are left out."
    from nbdev.config import get_config
    from nbdev.test import test_nb

    left_out = [*get_config().tst_flags.split(), *(["pinned"] if os.environ.get("DPFT_SALT") else [])]
    passed, _ = test_nb(path, skip_flags=left_out, basepath=ROOT)
    return [] if passed else [f"FAILED {path.relative_to(ROOT)}"]


LOADED = ("torch", "torch._dynamo", "transformers", *(f"transformers.models.{name}.modeling_{name}" for name in
          ("auto", "bert", "distilbert", "gpt2", "llama", "roberta", "vit")), "transformers.generation.utils", "peft", "datasets", "opacus",
          "dp_accounting.pld.privacy_loss_mechanism", "scipy.stats", "sklearn.datasets", "sklearn.model_selection", "pandas", "seaborn",
          "matplotlib.pyplot", "nbdev.test", "nbdev.showdoc", "IPython.core.interactiveshell", "IPython.core.magics", "dpft.auditing",
          "dpft.loop", "dpft.book.bench", "dpft.book.evidence")


def test_all(paths: list[Path], workers: int) -> list[str]:
    "Run notebooks side by side, the longest first, each in a process of its own that begins with the libraries loaded."
    for name in LOADED:
        importlib.import_module(name)
    waiting, running, failed = sorted(paths, key=takes), {}, []
    with tempfile.TemporaryDirectory() as folder:
        while waiting or running:
            if waiting and len(running) < workers:
                path = waiting.pop()
                running[test_aside(path, Path(folder) / path.stem)] = path, time.perf_counter()
                continue
            pid, status = os.wait()
            path, began = running.pop(pid)
            print(f"{path.relative_to(ROOT)} {time.perf_counter() - began:.0f} s", flush=True)
            if status:
                print((Path(folder) / path.stem).read_text(encoding="utf-8", errors="replace"), flush=True)
                failed.append(f"FAILED {path.relative_to(ROOT)}")
    return failed


def test_aside(path: Path, log: Path) -> int:
    "The number of a process that runs a notebook, and fails if it does; what it prints goes into the file."
    sys.stdout.flush()
    if pid := os.fork():
        return pid
    with log.open("wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    try:
        found = test(path)
    except BaseException as error:      # whatever a cell does, this process ends here
        found = [f"FAILED {path.relative_to(ROOT)}: {error!r}"]
    print("\n".join(found), flush=True)
    os._exit(bool(found))


def takes(path: Path) -> int:
    "Seconds that a notebook says it runs."
    found = re.search(r"Runs in about (\d+) s", path.read_text(encoding="utf-8"))
    return int(found[1]) if found else 0


def run(path: Path, flags: set[str]) -> list[str]:
    "Run a notebook in this process and store its outputs; cells marked `gpu` or `slow` keep theirs unless named in `flags`."
    from execnb.nbio import read_nb, write_nb
    from execnb.shell import CaptureShell

    notebook, shell = read_nb(path), CaptureShell(path)
    os.chdir(path.parent)
    skipped = {"gpu", "slow"} - flags

    def skip(cell: dict) -> bool:
        return cell["cell_type"] != "code" or bool(skipped & directives(source(cell))[0].keys())

    began = processor_time()
    try:
        shell.run_all(notebook, exc_stop=True, preproc=skip)
    except Exception:
        return [shell.prettytb(fname=path.name)]
    write_nb(notebook, path)
    if not flags and path.parent.name != SOURCE:
        write_header(path, processor_time() - began)
    return []


def processor_time() -> float:
    "Seconds that this process and those it waited for have computed, whatever else the machine does."
    return sum(os.times()[:4])


def write_header(path: Path, seconds: float) -> None:
    "The line on time and devices into the cell below the title, which is made where there is none."
    notebook = json.loads(path.read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["id"] != HEADER]
    if any(cell["cell_type"] == "code" for cell in cells):
        line = header(Chapter(path), seconds)
        cells.insert(1, {"cell_type": "markdown", "id": HEADER, "metadata": {}, "source": [line]})
    notebook["cells"] = cells
    path.write_text(json.dumps(notebook, sort_keys=True, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def print_pinned() -> list[str]:
    "The cells that are left out under a salt; nothing to say."
    for chapter in chapters():
        for cell in chapter.cells if chapter.path.suffix == ".ipynb" else ():
            if cell["cell_type"] == "code" and "pinned" in directives(source(cell))[0]:
                print(f"{chapter.path.relative_to(ROOT)}::{cell['id']}")
    return []


def main(command: str, *arguments: str) -> int:
    "check | export | exported | pinned | test [WORKERS] NOTEBOOK … | run NOTEBOOK [FLAG …]"
    if command == "test":
        workers, *paths = arguments if arguments[0].isdigit() else ("1", *arguments)
        found = test_all([Path(path).resolve() for path in paths], int(workers))
    elif command == "run":
        found = run(Path(arguments[0]).resolve(), set(arguments[1:]))
    else:
        found = {"check": problems, "export": export, "exported": exported, "pinned": print_pinned}[command]()
    for sentence in found:
        print(sentence, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
