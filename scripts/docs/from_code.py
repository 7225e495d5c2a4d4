"""Write what pages take from the code: the table of other trainers' words in docs/coming_from.md,
docs/metrics.md, and under the equations of every method's page the files that compute them.

python scripts/docs/from_code.py    # a test checks that the pages are up to date
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import yaml

from flowrl.config import build, schema
from flowrl.config.load import FILE_OF_SYNONYMS, load_config
from flowrl.report import described

METRICS = """\
Every line of `metrics.jsonl` holds the metrics of an iteration, and reports and trackers show them
under the same names. Words in capitals stand for any text. Means are over trained rows, unless said
otherwise. [The page of a method](algorithms/index.md) says which ones it logs.

<!-- written by scripts/docs/from_code.py from flowrl/report/templates/metrics.yaml -->"""
ROOT = Path(__file__).resolve().parents[2]
TABLE = re.compile(r"(?<=<!-- words -->\n).*(?=<!-- /words -->)", re.S)
CODE = re.compile(r"(?:^Code: [^\n]*\n\n)?(?=^## Logged metrics$)", re.M)


def words() -> str:
    """The table of configs' keys elsewhere, those with one answer together."""
    known = yaml.safe_load(FILE_OF_SYNONYMS.read_text(encoding="utf-8"))["settings"]
    lines = ["| elsewhere | here |", "|---|---|"]
    for here in dict.fromkeys(known.values()):
        names = ", ".join(f"`{name}`" for name, said in known.items() if said == here)
        lines.append(f"| {names} | {here.replace('|', chr(92) + '|')} |")
    return "\n".join(lines) + "\n"


def code(name: str) -> str:
    """The line of a method's page: its config, its classes of algorithms, and its SDE step."""
    cfg = load_config(None, [f"algorithm={name}"])
    method = build.make_algorithm(cfg)
    own = [cls for cls in type(method).__mro__ if cls.__module__.startswith("flowrl.algorithms.")]
    files = [f"configs/algorithm/{name}.yaml"]
    files += dict.fromkeys(Path(inspect.getfile(cls)).relative_to(ROOT).as_posix() for cls in own)
    step = f"samplers/{cfg.algorithm.get('sde')}.py"
    files += [step] * (ROOT / step).is_file()
    files.remove("flowrl/algorithms/common/base.py")  # the contract of all
    return "Code: " + ", ".join(f"`{file}`" for file in files) + ".\n\n"


def metrics() -> str:
    """The page of all metrics, from the table that reports read."""
    lines = ["# Metrics", "", METRICS]
    for heading, entries in described.table().items():
        lines += ["", f"## {heading}", "", "| metric | meaning |", "|---|---|"]
        lines += [f"| `{name}` | {said} |" for name, said in entries.items()]
    return "\n".join(lines) + "\n"


def pages() -> dict[Path, str]:
    """Every page that holds such a part -> its text as it should be."""
    page = ROOT / "docs" / "coming_from.md"
    out = {page: TABLE.sub(lambda _: words(), page.read_text(encoding="utf-8"))}
    out[ROOT / "docs" / "metrics.md"] = metrics()
    for name in schema.options("algorithm"):
        page, line = ROOT / "docs" / "algorithms" / f"{name}.md", code(name)
        out[page] = CODE.sub(line, page.read_text(encoding="utf-8"), count=1)
    return out


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
