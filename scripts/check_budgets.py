"""What `make check` holds the code to, as figures: imports, lengths, names and words.

    python scripts/check_budgets.py              # figures, and what is beyond a limit
    python scripts/check_budgets.py --against 85045ac

The second adds how many lines the library, scripts and tests lost since a commit.

It fails where a function is longer than 60 lines or one in ten of the library's is longer than 22,
at a line over 100 columns, a cycle of imports, an import of another module's private name, a class
name that two modules define, a docstring or a comment that begins with "Of", a field of a record
that nothing at the field explains, a function of 30 lines or more without a comment, and a commit
subject of 72 letters or more. The rest is printed alone: nobody should cut code to reach a count.
"""

from __future__ import annotations

import argparse
import ast
import functools
import gc
import io
import re
import subprocess
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = ("flowrl", "samplers", "rewards")
SOURCES = (*LIBRARY, "configs", "scripts", "tests")
FUNCTION, USUAL, COLUMNS, LONG, SUBJECT = 60, 22, 100, 30, 72
SUBJECTS_SINCE = "b2e39ef"  # earlier commits have longer subjects
TWICE = {"Settings"}  # each reward has a class of this name: registry.py looks for it


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


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    """Every node of a file that some check looks at; a file is parsed and walked once."""
    looked = ast.Import | ast.ImportFrom | ast.Module | ast.ClassDef
    tree = ast.parse(path.read_text(encoding="utf-8"))
    every = ast.walk(tree)
    return [n for n in every if isinstance(n, looked | ast.FunctionDef | ast.AsyncFunctionDef)]


@functools.cache
def tokens(path: Path) -> list[tokenize.TokenInfo]:
    """Every token of a file."""
    return list(tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline))


def imports(path: Path) -> Iterator[tuple[str, str]]:
    """(module, name) of our imports in a file, also inside functions; `import x` has name ""."""
    for node in nodes(path):
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
    for node in nodes(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            where = f"{path.relative_to(ROOT).as_posix()}:{node.lineno} {node.name}"
            yield where, (node.end_lineno or node.lineno) - node.lineno + 1


def p90(values: list[int]) -> int:
    return sorted(values)[int(0.9 * len(values))]


# --- words


def class_names(paths: list[Path]) -> list[str]:
    """Names of classes that two files or more define."""
    homes: dict[str, set[str]] = defaultdict(set)
    for path in paths:
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                homes[node.name].add(relative(path))
    return [
        f"class {name} is defined in {', '.join(sorted(paths))}"
        for name, paths in sorted(homes.items())
        if len(paths) > 1 and name not in TWICE
    ]


def headless(path: Path, lines: list[str]) -> Iterator[str]:
    """Docstrings and comments that begin with "Of", and so have no subject."""
    found: list[tuple[int, str]] = []
    for node in nodes(path):
        documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        if isinstance(node, documented) and re.match(r"Of\b", ast.get_docstring(node) or ""):
            found.append((getattr(node, "lineno", 1), "docstring"))
    for token in tokens(path):
        if token.type == tokenize.COMMENT and re.match("#+ *of ", token.string, re.IGNORECASE):
            line = token.start[0]
            # the second line of a block may begin so: it continues a sentence
            both = ["", *lines][line - 1], token.line
            if not all(text.lstrip().startswith("#") for text in both):
                found.append((line, "comment"))
    for line, kind in found:
        yield f'{relative(path)}:{line}: a {kind} begins with "Of"'


def unexplained(path: Path, lines: list[str]) -> Iterator[str]:
    """Fields of dataclasses and named tuples with neither a comment nor a string at the field."""
    for node in nodes(path):
        if not isinstance(node, ast.ClassDef) or not is_record(node):
            continue
        for field, after in zip(node.body, [*node.body[1:], None], strict=True):
            if not isinstance(field, ast.AnnAssign):
                continue
            own = lines[field.lineno - 1 : field.end_lineno]
            above = lines[field.lineno - 2].lstrip()
            string = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            if not (any("#" in line for line in own) or above.startswith("#") or string):
                name = f"{node.name}.{ast.unparse(field.target)}"
                yield f"{relative(path)}:{field.lineno}: nothing explains {name}"


def is_record(node: ast.ClassDef) -> bool:
    decorators = any("dataclass" in ast.unparse(name) for name in node.decorator_list)
    return decorators or any(
        ast.unparse(base) in ("NamedTuple", "TypedDict") for base in node.bases
    )


def silent(path: Path, lines: list[str]) -> Iterator[str]:
    """Long functions without a comment that gives a reason."""
    for node in nodes(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            own = lines[node.lineno - 1 : node.end_lineno]
            if len(own) >= LONG and not any(re.search(r"(^|\s)# ", line) for line in own):
                where = f"{relative(path)}:{node.lineno}"
                yield f"{where}: {node.name} has {len(own)} lines and no comment"


def subjects() -> list[str]:
    """Subjects of commits that are too long; a shallow clone has none to look at."""
    words = ["git", "log", "--format=%s", f"{SUBJECTS_SINCE}..HEAD"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    return [f"commit subject: {line}" for line in done.stdout.splitlines() if len(line) >= SUBJECT]


# --- figures


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def tokens_a_line(paths: list[Path]) -> float:
    """Tokens for each line that holds code: how densely it is written."""
    quiet = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    count, lines = 0, 0
    for path in paths:
        found = [
            token
            for token in tokens(path)
            if token.type not in quiet and token.type != tokenize.ENDMARKER
        ]
        count += len(found)
        lines += len({line for t in found for line in range(t.start[0], t.end[0] + 1)})
    return count / lines


def lost(commit: str, folder: str) -> int:
    """Lines of a folder's Python files now, less those at a commit."""
    words = ["git", "diff", "--numstat", "--no-renames", commit, "--", f"{folder}/*.py"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    rows = [line.split("\t") for line in done.stdout.splitlines()]
    return sum(int(added) - int(gone) for added, gone, _ in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--against", help="a commit to count lines from")
    args = parser.parse_args()

    gc.disable()  # trees are kept to the end, and would be looked through again and again
    files = modules()
    texts = {path: path.read_text(encoding="utf-8") for path in python_files()}
    sources = {path: text.splitlines() for path, text in texts.items()}
    every = [f for p in sources for f in functions(p)]
    usual = p90([k for p in files.values() for _, k in functions(p)])
    between_files, file_cycle = levels(graph(files))
    height, folder_cycle = levels(folder_graph(files))
    private = private_imports(files)

    problems = [f"cycle of imports: {' -> '.join(c)}" for c in (file_cycle, folder_cycle) if c]
    problems += private + class_names([*files.values()]) + subjects()
    problems += [
        f"{relative(path)}:{i}: more than {COLUMNS} columns"
        for path, lines in sources.items()
        for i, line in enumerate(lines, 1)
        if len(line) > COLUMNS
    ]
    problems += [f"{where}: {k} lines, at most {FUNCTION}" for where, k in every if k > FUNCTION]
    problems += [f"one function in ten has more than {usual} lines"] * (usual > USUAL)
    for path in files.values():
        for check in (headless, unexplained, silent):
            problems += check(path, sources[path])

    lines = {
        folder: sum(len(sources[path]) for path in python_files((folder,))) for folder in SOURCES
    }
    library = sum(lines[folder] for folder in LIBRARY)
    longest = max(sources, key=lambda path: len(sources[path]))
    function, length = max(every, key=lambda entry: entry[1])
    dense = tokens_a_line([*files.values()])
    print("lines                    " + ", ".join(f"{name} {n}" for name, n in lines.items()))
    print(f"tests to library         {lines['tests'] / library:.2f}")
    print(f"tokens a code line       {dense:.2f}")
    print(f"levels of imports        {height} between folders, {between_files} between files")
    print(f"longest file             {len(sources[longest])} lines: {relative(longest)}")
    print(f"functions                p90 {usual} lines, longest {length}: {function}")
    if args.against:
        gone = {folder: lost(args.against, folder) for folder in SOURCES}
        print(f"since {args.against:18} library {sum(gone[f] for f in LIBRARY):+d}, ", end="")
        print(f"scripts {gone['scripts']:+d}, tests {gone['tests']:+d} lines")
    print("\n".join(problems))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
