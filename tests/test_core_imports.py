"""What a private run needs to be installed, and what only the book needs."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import dpft

BLOCK = '''
import sys
sys.modules.update(dict.fromkeys({blocked}))   # as if they were not installed
'''
ACCOUNTANTS = ("opacus", "dp_accounting")  # second opinions: in tests, in `verify` and in the book
BOOK = ("matplotlib", "seaborn", "pandas", "sklearn", "pyarrow", "PIL", "peft", "typer", "nbdev", "fastcore", "IPython")
RUN = '''
import torch
import dpft
from dpft import BiTFiT, Engine, Full, fine_tune, epsilon, noise_multiplier, Public
rows = [(torch.eye(4)[i % 4], i % 4) for i in range(40)]
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
run = fine_tune(model, rows, Full(), 8.0, steps=2, batch_size=10, accountant="rdp", progress=False)
assert run.epsilon <= 8 and "differentially private" in run.report()
assert not [name for name in {blocked} if sys.modules.get(name)]
print("done")
'''


def in_a_fresh_process(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_a_run_needs_nothing_of_what_only_the_book_needs():
    said = in_a_fresh_process(BLOCK.format(blocked=set(BOOK)) + RUN.format(blocked=set(BOOK)))
    assert said.strip() == "done"


@pytest.mark.parametrize("accountant", ["prv", "rdp"])
def test_a_run_imports_no_other_accountant(accountant):
    code = RUN.replace('accountant="rdp"', f'accountant="{accountant}"')
    assert in_a_fresh_process(BLOCK.format(blocked=set(ACCOUNTANTS)) + code.format(blocked=set(ACCOUNTANTS))).strip() == "done"


def test_the_core_does_not_import_the_book():
    said = in_a_fresh_process("import sys, dpft\nfor name in dpft.__all__: getattr(dpft, name)\n"
                              "import dpft.registry, dpft.auditing, dpft.planning\n"
                              "print(sorted(name for name in sys.modules if name.startswith('dpft.book')))")
    assert said.strip() == "[]"


def test_every_public_name_is_there_and_few_are_public():
    import dpft
    assert all(getattr(dpft, name) is not None for name in dpft.__all__) and len(dpft.__all__) <= 50
    assert {"fine_tune", "Engine", "Method", "Context", "Request", "epsilon", "noise_multiplier", "partitions"} <= set(dpft.__all__)
    assert dpft.relevance_map is not None and "relevance_map" not in dpft.__all__      # rare, and still callable
    with pytest.raises(AttributeError, match="no attribute 'fine_tuen'"):
        _ = dpft.fine_tuen


def test_a_module_that_a_message_names_is_there_after_import_dpft():
    """As in "use dpft.models.freeze_batchnorm(model)", typed after the one import that everybody has."""
    said = in_a_fresh_process("import dpft\nprint(dpft.baselines.Trainable.__name__, dpft.models.replace_batchnorm.__name__, "
                              "dpft.saving.restores.__name__, hasattr(dpft, 'modles'), hasattr(dpft, '_modules'))")
    assert said.split() == ["Trainable", "replace_batchnorm", "restores", "False", "False"]


def test_a_command_that_needs_the_book_says_so_in_a_sentence(tmp_path):
    code = BLOCK.format(blocked={"matplotlib"}) + (
        f"sys.argv = ['dpft', 'quickstart', '--output', {str(tmp_path / 'out')!r}]\nfrom dpft.cli import main\nmain()")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.strip().splitlines()[-1].startswith("dpft: this needs matplotlib")
    assert "Traceback" not in done.stderr


def place(statement: ast.Import | ast.ImportFrom) -> tuple[int, bool, int, str]:
    "Where isort puts it: the future, the standard library, others, dpft from afar to near; `import` before `from`, then by name."
    name = (statement.module or "") if isinstance(statement, ast.ImportFrom) else statement.names[0].name
    level = getattr(statement, "level", 0)
    own = level > 0 or name.partition(".")[0] == "dpft"
    section = 2 if own else name.partition(".")[0] not in sys.stdlib_module_names
    return -1 if name == "__future__" else section, isinstance(statement, ast.ImportFrom), -level, name.lower()


def kind(name: str) -> tuple[int, str]:
    "Where isort puts a name: constants, classes, functions."
    return 0 if name.isupper() and len(name) > 1 else 1 if name[0].isupper() else 2, name.lower()


def misplaced(tree: ast.Module) -> list[str]:
    "The imports of a module that do not stand where isort puts them, among those that follow each other."
    found, before = [], None
    for statement in tree.body:
        if not isinstance(statement, ast.Import | ast.ImportFrom):
            before = None
            continue
        names = [alias.name for alias in statement.names]
        if names != sorted(names, key=kind) or (before is not None and before > place(statement)):
            found.append(ast.unparse(statement))
        before = place(statement)
    return found


def test_imports_are_in_order():
    "As ruff's I001 has it, but for its layout: the chapters wrap at 88 characters, with several names to a line."
    package = Path(dpft.__file__).parent
    texts = {str(path.relative_to(package)): path.read_text() for path in package.rglob("*.py")}
    found = {name: misplaced(ast.parse(text)) for name, text in texts.items() if "isort: skip" not in text}
    assert {name: imports for name, imports in found.items() if imports} == {}
    assert misplaced(ast.parse("import os\nfrom math import pi, cos, Inf\nimport torch\nfrom .a import b\nfrom ..c import d\n")) \
        == ["from math import pi, cos, Inf", "from ..c import d"]
