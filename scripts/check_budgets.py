"""Fail when a file or a function outgrows its budget: files under 400 lines (policy under 250),
functions at most 80."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILE, POLICY_FILE, FUNCTION = 400, 250, 80
FOLDERS = ("flowrl", "samplers", "rewards", "configs", "scripts", "tests")


def excesses(path: Path, name: str) -> Iterator[str]:
    """Sentences about what is too long in a source file; name: its path from the root."""
    text = path.read_text(encoding="utf-8")
    length = text.count("\n")
    budget = POLICY_FILE if name.startswith("flowrl/policy/") else FILE
    if length >= budget:
        yield f"{name}: {length} lines, the budget is under {budget}; split it by idea"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > FUNCTION:
                yield (
                    f"{name}:{node.lineno}: {node.name} has {lines} lines, the budget is"
                    f" {FUNCTION}; name a part of it"
                )


def main() -> int:
    found = [
        problem
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        for problem in excesses(path, path.relative_to(ROOT).as_posix())
    ]
    print("\n".join(found) or "budgets: ok")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
