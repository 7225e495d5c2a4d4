"""What `make check` holds the layout to, as figures: entries, import levels, lengths.

    python scripts/check_budgets.py

It fails beyond 500 lines a file, 60 lines a function, 100 columns a line, 16 entries of flowrl/,
10 levels of imports between folders, and at any cycle or import of another module's private name.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("flowrl", "samplers", "rewards", "configs", "scripts", "tests")
FILE, FUNCTION, COLUMNS, ENTRIES, LEVELS = 500, 60, 100, 16, 10


def python_files(folders: tuple[str, ...] = SOURCES) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def module_of(path: Path) -> str:
    """rewards/core/score.py -> flowrl.rewards.core.score."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    name = ".".join(parts if parts[0] == "flowrl" else ("flowrl", *parts))
    return name.removesuffix(".__init__")


def modules() -> dict[str, Path]:
    """Every module that imports as flowrl, and its file."""
    return {module_of(path): path for path in python_files(("flowrl", "samplers", "rewards"))}


def imports(path: Path) -> Iterator[tuple[str, str]]:
    """(module, name) of our imports in a file, also inside functions; `import x` has name ""."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if alias.name.startswith("flowrl"))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "flowrl":
            yield from ((node.module or "", alias.name) for alias in node.names)


def graph(files: dict[str, Path]) -> dict[str, set[str]]:
    """Module -> modules of ours that it needs: what it imports, and the packages on the way there,
    whose __init__ runs first (but for those that the module itself lies in, which run already).

    `from package import module` needs the package, from inside it too.
    """
    out: dict[str, set[str]] = {}
    for module, path in files.items():
        found: set[str] = set()
        for base, name in imports(path):
            parts = base.split(".")
            above = {".".join(parts[:n]) for n in range(1, len(parts))}
            found |= {base, f"{base}.{name}"} | {p for p in above if not within(module, p)}
        out[module] = found & files.keys() - {module}
    out.pop("flowrl", None)  # its names load lazily
    return out


def within(module: str, package: str) -> bool:
    return module.startswith(f"{package}.")


def folder_of(module: str) -> str:
    """flowrl.rewards.core.score -> rewards; flowrl.types -> types; flowrl and __main__ -> cli."""
    parts = module.split(".")
    return "cli" if len(parts) == 1 or parts[1] == "__main__" else parts[1]


def levels(edges: dict[str, set[str]]) -> tuple[int, list[str]]:
    """(number of levels, a cycle or []) of a graph: a node stands above all that it imports."""
    try:
        order = list(TopologicalSorter(edges).static_order())
    except CycleError as error:
        return 0, list(error.args[1])
    level: dict[str, int] = {}
    for name in order:
        level[name] = 1 + max((level[other] for other in edges.get(name, ())), default=0)
    return max(level.values()), []


def folder_graph(files: dict[str, Path]) -> dict[str, set[str]]:
    """Top-level folder -> others that its files import. flowrl/__init__ names them all, lazily."""
    out: dict[str, set[str]] = {}
    for module, found in graph(files).items():
        here = folder_of(module)
        out.setdefault(here, set()).update({folder_of(m) for m in found - {"flowrl"}} - {here})
    return out


def private_imports(files: dict[str, Path]) -> list[str]:
    """`from module import _name`, of our modules."""
    return [
        f"{module} imports {base}.{name}"
        for module, path in files.items()
        for base, name in imports(path)
        if any(
            part.startswith("_") and not part.startswith("__") for part in (*base.split("."), name)
        )
    ]


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """(place and name, lines) of each function of a file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            where = f"{path.relative_to(ROOT).as_posix()}:{node.lineno} {node.name}"
            yield where, (node.end_lineno or node.lineno) - node.lineno + 1


def p90(values: list[int]) -> int:
    return sorted(values)[int(0.9 * len(values))]


def main() -> int:
    files, problems = modules(), []
    sources = {path: path.read_text(encoding="utf-8").splitlines() for path in python_files()}
    entries = [e.name for e in (ROOT / "flowrl").iterdir() if e.name != "__pycache__"]
    cycle = levels(graph(files))[1]
    height, folder_cycle = levels(folder_graph(files))
    private = private_imports(files)
    wide = [
        f"{p.relative_to(ROOT)}:{i}"
        for p, lines in sources.items()
        for i, line in enumerate(lines, 1)
        if len(line) > COLUMNS
    ]
    lengths = {p.relative_to(ROOT).as_posix(): len(lines) for p, lines in sources.items()}
    shipped = [f for p in files.values() for f in functions(p)]
    every = [f for p in sources for f in functions(p)]

    problems += [f"flowrl/ has {len(entries)} entries, the budget is {ENTRIES}"] * (
        len(entries) > ENTRIES
    )
    problems += [f"cycle of imports: {' -> '.join(c)}" for c in (cycle, folder_cycle) if c]
    problems += [f"{height} levels of folders, the budget is {LEVELS}"] * (height > LEVELS)
    problems += private + [f"{where}: more than {COLUMNS} columns" for where in wide]
    problems += [f"{n}: {k} lines, the budget is {FILE}" for n, k in lengths.items() if k > FILE]
    problems += [
        f"{where}: {k} lines, the budget is {FUNCTION}" for where, k in every if k > FUNCTION
    ]

    file, lines = max(lengths.items(), key=lambda entry: entry[1])
    function, length = max(every, key=lambda entry: entry[1])
    between_files = levels(graph(files))[0]
    usual_file, usual = p90(list(lengths.values())), p90([k for _, k in shipped])
    print(f"entries of flowrl/       {len(entries)}")
    print(f"levels of imports        {height} between folders, {between_files} between files")
    print(f"cycles                   {sum(map(bool, (cycle, folder_cycle)))}")
    print(f"private imports          {len(private)}")
    print(f"lines over {COLUMNS} columns   {len(wide)}")
    print(f"files                    p90 {usual_file} lines, longest {lines}: {file}")
    print(f"functions                p90 {usual} lines, longest {length}: {function}")
    print("\n".join(problems))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
