"""What Quarto asks of each notebook before it renders it: nbdev's directives go, and what a source notebook exports is folded under
its documentation, which `_reference.py` leaves in build/reference.json by the cell's id."""

import json
import re
import sys
from pathlib import Path
from typing import Any

DOCUMENTED = Path(__file__).resolve().parent.parent / "build" / "reference.json"
OPTION = re.compile(r"^#\|.*\n?", re.MULTILINE)
DIRECTIVE = re.compile(r"^#\| *(?:default_exp\b.*|hide|exports?|slow|gpu|pinned) *\n?", re.MULTILINE)  # nbdev's; Quarto's have a colon


def filtered(notebook: dict[str, Any], documented: dict[str, dict[str, str]]) -> dict[str, Any]:
    "The notebook as a reader sees it."
    text = "\n".join("".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code")
    module = re.search(r"#\| *default_exp (\S+)", text)
    sections, cells = documented.get(module[1], {}) if module else {}, []
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            source = "".join(cell["source"])
            names = {line.removeprefix("#|").strip().split(" ")[0] for line in source.splitlines() if line.startswith("#|")}
            source = DIRECTIVE.sub("", source)
            if names & {"hide", "default_exp"} or not source.strip():
                continue
            if names & {"export", "exports"}:
                if section := sections.get(cell["id"]):
                    above = {"cell_type": "markdown", "id": f"{cell['id']}-doc", "metadata": {}}
                    cells.append(above | {"source": section.splitlines(keepends=True)})
                summary = "Imports" if "export" in names else "Source"
                source = f"#| code-fold: true\n#| code-summary: {summary}\n{OPTION.sub('', source).lstrip()}"
            cell = cell | {"source": source.splitlines(keepends=True)}
        cells.append(cell)
    return notebook | {"cells": cells}


if __name__ == "__main__":
    sections = json.loads(DOCUMENTED.read_text(encoding="utf-8")) if DOCUMENTED.exists() else {}
    json.dump(filtered(json.load(sys.stdin), sections), sys.stdout)
