"""A part of a module of flowrl, run without the rest of its file.

A plugin's settings stand in its file, beside what computes with torch, which takes two seconds to
import. `declared("flowrl.algorithms.grpo", "ALGORITHM", "Config")` runs only the statements that
this class needs, in this module and in others of flowrl. So the command line judges words by the
same classes as a run, before torch is there. A module that is imported already is taken as it is.
"""

from __future__ import annotations

import ast
import dis
import importlib.util
import sys
from collections.abc import Iterator
from copy import copy
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

PACKAGE = "flowrl"


def declared(module: str, plugin: str, attribute: str) -> Any:
    """What the class that a module calls `plugin` states as an attribute; None: nothing."""
    if (found := _taken(module)) is None:
        return None
    if isinstance(found, ModuleType):
        return getattr(getattr(found, plugin, None), attribute, None)
    return found.stated(plugin, attribute)


def part(module: str, name: str) -> Any:
    """What `from module import name` gives."""
    return _taken(f"{module}.{name}") or getattr(_taken(module), name)


class Excerpt:
    """A module whose statements run when what they define is asked for."""

    def __init__(self, name: str, path: Path):
        self.name, self.path = name, path
        self.running: list[ast.AST] = []  # a function may call itself
        self.names = ModuleType(f"{name} (excerpt)")
        self.names.__file__ = str(path)
        sys.modules[self.names.__name__] = self.names  # pydantic looks annotations up there
        body = ast.parse(path.read_text(encoding="utf-8")).body
        self.statements = {name: node for node in body for name in _defined(node)}

    def __getattr__(self, name: str) -> Any:
        if name not in vars(self.names):
            if name not in self.statements:
                raise AttributeError(f"{self.name} has no {name}")
            self.define(name, self.statements[name])
        return getattr(self.names, name)

    def define(self, name: str, statement: ast.stmt) -> None:
        """Run the statement that defines a name; of an import, only what gives this name."""
        if isinstance(statement, ast.Import | ast.ImportFrom):
            (alias,) = (a for a in statement.names if name == _bound(a))
            if isinstance(statement, ast.ImportFrom) and str(statement.module).startswith(PACKAGE):
                setattr(self.names, name, part(str(statement.module), alias.name))
                return
            statement = copy(statement)
            statement.names = [alias]
        self.run(statement, ast.Module([statement], []), "exec")

    def run(self, node: ast.AST, whole: Any, mode: str) -> Any:
        """Run or evaluate code in the module, after the statements that define what it reads."""
        self.running.append(node)
        # compile() goes by the __future__ of this file, as all of flowrl does
        code = compile(whole, str(self.path), mode)
        for name in [*_read(code), *_annotated(node)]:
            if name in self.statements and self.statements[name] not in self.running:
                getattr(self, name)
        return eval(code, vars(self.names))

    def stated(self, name: str, attribute: str) -> Any:
        """What the class of a name, or which a name stands for, states as an attribute."""
        node = self.statements.get(name)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name):
            return self.stated(node.value.id, attribute)
        for part in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(part, ast.Assign) and attribute in _defined(part):
                return self.run(part.value, ast.Expression(part.value), "eval")
        return None


def _taken(module: str) -> ModuleType | Excerpt | None:
    return sys.modules.get(module) or _excerpt(module)


@cache
def _excerpt(module: str) -> Excerpt | None:
    """None: there is no such module, or no source of it."""
    path = _source(module)
    return Excerpt(module, path) if path else None


def _source(module: str) -> Path | None:
    """The file of a module, whose packages are not imported; None: there is none."""
    first, second, *rest = module.split(".")
    name = f"{first}.{second}"
    spec = importlib.util.find_spec(name)
    for part in rest:
        found = sys.modules.get(name, spec and spec.submodule_search_locations)
        folders, name = getattr(found, "__path__", found), f"{name}.{part}"
        spec = PathFinder.find_spec(name, folders) if isinstance(folders, list) else None
    return Path(spec.origin) if spec and str(spec.origin).endswith(".py") else None


def _bound(alias: ast.alias) -> str:
    return alias.asname or alias.name.partition(".")[0]


def _defined(node: ast.stmt) -> Iterator[str]:
    """Names that a statement gives to its module, or its class."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        yield from map(_bound, node.names)
    elif isinstance(node, ast.ClassDef | ast.FunctionDef):
        yield node.name
    else:
        written = (n for n in ast.walk(node) if isinstance(n, ast.Name))
        yield from (n.id for n in written if isinstance(n.ctx, ast.Store))


def _read(code: CodeType) -> Iterator[str]:
    """Names of the module that code reads as it runs or is called."""
    for step in dis.get_instructions(code):
        if isinstance(step.argval, CodeType):
            yield from _read(step.argval)
        elif step.opname in ("LOAD_NAME", "LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS"):
            yield step.argval


def _annotated(node: ast.AST) -> Iterator[str]:
    """Names in the annotations of a class, which pydantic evaluates."""
    for field in node.body if isinstance(node, ast.ClassDef) else ():
        if isinstance(field, ast.AnnAssign):
            yield from (n.id for n in ast.walk(field.annotation) if isinstance(n, ast.Name))
