"""Write what pages take from the code or from another page: the table of other trainers' words in
docs/coming_from.md, docs/metrics.md, docs/papers.md, docs/api.md, docs/commands.md, the rows of
docs/recipes.md on the pages of docs/train, and on every method's page its plan and, under the
equations, the files that compute them.

python scripts/docs/from_code.py    # a test checks that the pages are up to date
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import plans
import reference_pages
import yaml

from flowrl.config import build, schema
from flowrl.config.load import FILE_OF_SYNONYMS, load_config
from flowrl.report import described

METRICS = """\
Every line of `metrics.jsonl` holds the metrics of an iteration, and reports and trackers show them
under the same names. Words in capitals stand for any text. Means are over trained rows, unless said
otherwise. [The page of a method](algorithms/index.md) says which ones it logs.

<!-- written by scripts/docs/from_code.py from flowrl/report/templates/metrics.yaml -->"""
PAPERS = """\
Every method that ships, by the number of its paper, the oldest first. The command is the first of
the method's page and trains the embedded model; the page has one for a model of the hub, too.
*Gain* is the row of [Results](results.md#what-each-method-buys): how much the share of right
held-out pictures rises on the embedded model, at an equal budget; "–" is a method that has no row
in that table. *Departures* says where the default settings differ from the paper and from the
authors' code. What the papers claim, and what we measured of it, is in
[What papers claim](results.md#what-papers-claim).

If you use flowrl in a paper, please cite it (`CITATION.cff` in the repository, and the end of its
README) and the papers of the method and of the rewards that you used.

<!-- written by scripts/docs/from_code.py from the methods' pages and docs/results.md -->"""
ROOT = Path(__file__).resolve().parents[2]
TABLE = re.compile(r"(?<=<!-- words -->\n).*(?=<!-- /words -->)", re.S)
ROWS = re.compile(r"(?<=<!-- recipes: )(.+?) -->\n.*?(?=<!-- /recipes -->)", re.S)
PLAN = re.compile(r"(?:^!\[Plan of [^\n]*\n\n\*[^\n]*\n\n)?(?=^## Usage$)", re.M)
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


def recipes(page: str) -> str:
    """A page of docs/train with the rows of its models, taken from the table of all recipes."""
    table = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")

    def filled(block: re.Match[str]) -> str:
        lines = ["| card | command | GB | h:min of the run |", "|---|---|---|---|"]
        for model in block[1].split(", "):
            rows = re.findall(rf"^\| {re.escape(model)} \| (\d+ GB .+)$", table, re.M)
            lines += [f"| {' | '.join(row.split(' | ')[:4])} |" for row in rows]
        return f"{block[1]} -->\n" + "\n".join(lines) + "\n"

    return ROWS.sub(filled, page)


def papers() -> str:
    """The page of all papers: for each method its number, command, gain and departures."""
    results = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    gains = dict(re.findall(r"^\| \[(\w+)\]\(algorithms[^|]*\| ([^ |]+) \|", results, re.M))
    rows = []
    for name in schema.options("algorithm"):
        page = (ROOT / "docs" / "algorithms" / f"{name}.md").read_text(encoding="utf-8")
        title, number = (
            page.splitlines()[0].removeprefix("# "),
            re.search(r"arXiv:([\d.]+\d)", page),
        )
        assert number, f"docs/algorithms/{name}.md names no paper"
        place = f"algorithms/{name}.md"
        cells = [f"[{number[1]}](https://arxiv.org/abs/{number[1]})", f"[{title}]({place})"]
        first = re.search(r"^flowrl train [^#\n]*algorithm=" + name + r"\b[^#\n]*", page, re.M)
        assert first, f"docs/algorithms/{name}.md has no command"
        cells += [f"`{first[0].strip()}`", gains.get(name, "–")]
        cells += [f"[departures]({place}#departures-from-paper-and-code)"]
        rows.append(f"| {' | '.join(cells)} |")
    head = ["| arXiv | method | command | gain | |", "|---|---|---|---|---|"]
    return "\n".join(["# Papers", "", PAPERS, "", *head, *sorted(rows)]) + "\n"


def pages() -> dict[Path, str]:
    """Every page that holds such a part -> its text as it should be."""
    page = ROOT / "docs" / "coming_from.md"
    out = {page: TABLE.sub(lambda _: words(), page.read_text(encoding="utf-8"))}
    out[ROOT / "docs" / "metrics.md"] = metrics()
    out[ROOT / "docs" / "papers.md"] = papers()
    out[ROOT / "docs" / "api.md"] = reference_pages.api()
    out[ROOT / "docs" / "commands.md"] = reference_pages.commands()
    for page in sorted((ROOT / "docs" / "train").glob("*.md")):
        out[page] = recipes(page.read_text(encoding="utf-8"))
    for name in schema.options("algorithm"):
        page, line, plan = (
            ROOT / "docs" / "algorithms" / f"{name}.md",
            code(name),
            plans.figure(name),
        )
        text = PLAN.sub(lambda _, plan=plan: plan, page.read_text(encoding="utf-8"), count=1)
        out[page] = CODE.sub(line, text, count=1)
    return out


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
