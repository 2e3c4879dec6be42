"""The two ends of the ranges in settings.ini, each tried in an environment of its own; `make ranges`.

The lowest has exactly the lower bound of every requirement, the highest what the package index gives when nobody reads constraints.txt.
In both, pip must find that all requirements agree, and a quick selection of the tests must pass.
"""

import argparse
import configparser
import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GROUPS = ["requirements", "lora_requirements", "book_requirements", "text_requirements"]
TOOLS = ["pytest", "hypothesis"]
QUICK = ["core_imports", "privacy", "keystream", "clipping", "gradients", "ledger", "saving", "cli", "models"]


def requirements(settings: Path) -> list[str]:
    "All that the package and its extras ask for, each once."
    parser = configparser.ConfigParser(interpolation=None)
    parser.read(settings, encoding="utf-8")
    return list(dict.fromkeys(word for group in GROUPS for word in parser["DEFAULT"][group].split()))


def lowest(requirement: str) -> str:
    "`name>=1.2,<2` as `name==1.2`."
    name, bound = re.match(r"([\w.-]+)>=([\w.]+)", requirement).groups()
    return f"{name}=={bound}"


def tried(folder: Path, wanted: list[str], tests: list[str]) -> bool:
    "Install, check and test in a fresh environment; whether all of it went well."
    venv.create(folder, clear=True, with_pip=True)
    python = folder / "bin" / "python"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PIP_CONSTRAINT": "", "DPFT_TESTING": "1", "MPLBACKEND": "agg"}
    steps = [["pip", "install", "--quiet", "--no-cache-dir", *wanted, *TOOLS], ["pip", "check"],
             ["pytest", "-q", "-p", "no:cacheprovider", *(str(ROOT / "tests" / f"test_{name}.py") for name in tests)]]
    return all(subprocess.run([python, "-m", *step], cwd=ROOT, env=environment).returncode == 0 for step in steps)


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ask.add_argument("--ends", nargs="+", choices=["lowest", "highest"], default=["lowest", "highest"])
    ask.add_argument("--tests", nargs="+", default=QUICK, help="names of test files")
    ask.add_argument("--keep", action="store_true", help="leave the environments, some gigabytes, under build/ranges")
    words = ask.parse_args()
    ranges, failed = requirements(ROOT / "settings.ini"), []
    for end in words.ends:
        folder = ROOT / "build" / "ranges" / end
        print(f"-- {end}", flush=True)
        if not tried(folder, [lowest(one) for one in ranges] if end == "lowest" else ranges, words.tests):
            failed.append(end)
        if not words.keep:
            shutil.rmtree(folder)
    sys.exit(f"failed: {' '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
