"""The house plan holds: imports point downwards, the wheel carries everything, every module says
what it is."""

import ast
import doctest
import importlib
import pkgutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FOLDERS = {
    name: ROOT / folder for name, folder in PROJECT["tool"]["setuptools"]["package-dir"].items()
}
PACKAGES = PROJECT["tool"]["setuptools"]["packages"]

# A module imports from rows above its own here and from its own package; modules of one row never
# import one another, but for the last two rows. A module that is not listed belongs to the loop's
# row.
LAYERS = [
    ["types", "registry", "configs", "ema", "ledger", "log", "checkpoint", "stats"],
    ["media", "shapes", "prompts"],
    ["samplers", "rewards", "policy", "advantages"],
    ["rollout", "algorithms", "data", "distributed", "compose"],
    ["config", "objective"],
    ["loop", "evaluation", "generation"],
    ["__init__", "cli", "__main__"],
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
LOOP = LEVEL["loop"]


def modules():
    """Module name -> source file, of everything that imports as flowrl."""
    out = {}
    for package in PACKAGES:
        folder = FOLDERS.get(package) or ROOT / package.replace(".", "/")
        out |= {
            f"{package}.{path.stem}".removesuffix(".__init__"): path for path in folder.glob("*.py")
        }
    return out


def part(module):
    """flowrl.policy.replay -> policy, flowrl -> __init__."""
    return module.split(".")[1] if "." in module else "__init__"


def imported(path, module):
    """Modules of ours that a file imports, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively, in line {node.lineno}"
            found |= (
                {f"{node.module}.{alias.name}" for alias in node.names}
                if node.module == "flowrl"
                else {node.module}
            )
    return {name for name in found if name == "flowrl" or name.startswith("flowrl.")}


def allowed(importer, target):
    here, there = LEVEL.get(importer, LOOP), LEVEL.get(target, LOOP)
    return importer == target or there < here or (there == here and here >= LOOP)


def test_imports_point_downwards():
    files = modules()
    wrong = [
        f"{m} imports {t}"
        for m, path in files.items()
        for t in sorted(imported(path, m))
        if not allowed(part(m), part(t))
    ]
    assert not wrong, "\n".join(wrong)


def test_the_rule_itself_refuses_upward_and_sideways_imports():
    assert (
        allowed("loop", "config")
        and allowed("policy", "policy")
        and allowed("cli", "loop")
        and allowed("loop", "evaluation")
    )
    assert (
        not allowed("samplers", "rewards")
        and not allowed("rewards", "policy")
        and not allowed("types", "registry")
    )
    assert (
        not allowed("algorithms", "config")
        and not allowed("config", "loop")
        and not allowed("loop", "cli")
    )
    assert allowed("cli", "a new module") and not allowed("policy", "a new module")


def test_accelerate_is_imported_in_two_files_only():
    users = {
        name
        for name, path in modules().items()
        if "accelerate" in path.read_text(encoding="utf-8") and _imports(path, "accelerate")
    }
    assert users <= {"flowrl.distributed", "flowrl.loop"}


def _imports(path, package):
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom)]
    return any(name.split(".")[0] == package for name in names)


def test_every_folder_with_modules_is_a_declared_package():
    inits = [
        p
        for top in ("flowrl/*", "samplers", "rewards", "configs")
        for p in ROOT.glob(f"{top}/__init__.py")
    ]
    assert {"flowrl", *(f"flowrl.{p.parent.name}" for p in inits)} == set(PACKAGES)


def test_the_wheel_carries_every_module_config_and_weight(tmp_path):
    code = (
        "import setuptools, sys; d = setuptools.Distribution({'script_name': 'setup.py',"
        " 'script_args': []}); d.parse_config_files();c = d.get_command_obj('build_py');"
        " c.build_lib = sys.argv[1]; c.ensure_finalized(); print('\\n'.join(c.get_outputs(False)))"
    )
    listed = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    wheel = {
        Path(line).relative_to(tmp_path).as_posix()
        for line in listed.splitlines()
        if line.startswith(str(tmp_path))
    }
    expected = {f"{name.replace('.', '/')}.py" for name in modules() if name not in PACKAGES}
    expected |= {f"{package.replace('.', '/')}/__init__.py" for package in PACKAGES}
    expected |= {
        f"flowrl/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / "configs").rglob("*.yaml")
    }
    expected |= {
        p.relative_to(ROOT).as_posix()
        for p in (ROOT / "flowrl/shapes/weights").rglob("*")
        if p.is_file()
    }
    assert "flowrl/configs/model/shapes-sd3.yaml" in expected
    assert not expected - wheel


def test_samplers_and_rewards_import_under_one_name():
    for package in PACKAGES:
        folder = Path(next(iter(importlib.import_module(package).__path__))).resolve()
        assert folder == FOLDERS.get(package, ROOT / package.replace(".", "/"))


@pytest.mark.parametrize("package", PACKAGES)
def test_modules_say_what_they_are_and_their_examples_hold(package):
    found = [
        info
        for info in pkgutil.iter_modules(importlib.import_module(package).__path__)
        if not info.ispkg
    ]
    for info in found:
        module = importlib.import_module(f"{package}.{info.name}")
        assert module.__doc__ and module.__doc__.strip(), f"{module.__name__} has no docstring"
        assert doctest.testmod(module).failed == 0
