"""The house plan holds: imports point downwards, the wheel carries everything, every module says
what it is."""

import ast
import doctest
import importlib
import pkgutil
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import check_budgets as budgets
import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FOLDERS = {
    name: ROOT / folder for name, folder in PROJECT["tool"]["setuptools"]["package-dir"].items()
}
PACKAGES = PROJECT["tool"]["setuptools"]["packages"]


# Folders, top first. A folder imports from those below it, and from those beside it in BESIDE.
FLOORS = [
    {"cli"},
    {"export"},
    {"training"},
    {"evaluation"},
    {"rollouts"},
    {"config"},
    {"rewards", "report"},
    {"algorithms", "data"},
    {"scenes"},
    {"policy", "samplers", "shapes"},
    {"runtime", "advantages"},
    {"types", "configs"},
]
FLOOR = {name: height for height, names in enumerate(reversed(FLOORS)) for name in names}
BESIDE = {("policy", "samplers"), ("data", "algorithms")}


def wrong_arrows(edges):
    """Folder -> folders it imports; those that do not lie below it."""
    return sorted(
        f"{here} imports {there}"
        for here, found in edges.items()
        for there in found
        if FLOOR[there] >= FLOOR[here] and (here, there) not in BESIDE
    )


def test_imports_point_downwards_folder_by_folder():
    edges = budgets.folder_graph(budgets.modules())
    assert set(edges) <= set(FLOOR) and not wrong_arrows(edges)


def test_the_rule_itself_refuses_upward_and_sideways_imports():
    assert wrong_arrows({"rewards": {"config"}, "report": {"rewards"}, "types": {"runtime"}}) == [
        "report imports rewards",
        "rewards imports config",
        "types imports runtime",
    ]
    assert not wrong_arrows({"cli": {"training", "types"}, "rollouts": {"rewards", "policy"}})


def test_no_file_imports_itself_through_others():
    assert budgets.levels(budgets.graph(budgets.modules()))[1] == []
    assert budgets.levels({"a": {"b"}, "b": {"c"}, "c": {"a"}})[1] and budgets.levels(
        {"a": {"b"}, "b": {"c"}}
    ) == (3, [])


CYCLES = {
    "a package whose __init__ imports back": {
        "flowrl.p": "from flowrl.p.base import Base",
        "flowrl.p.base": "from flowrl.p import other",
        "flowrl.p.other": "",
    },
    "the same through a neighbour": {
        "flowrl.p": "import flowrl.p.base",
        "flowrl.p.base": "import flowrl.p.load",
        "flowrl.p.load": "def late():\n    from flowrl.p import base",
    },
    "a package on the way to what is imported": {
        "flowrl.p": "from flowrl.q import one",
        "flowrl.p.other": "",
        "flowrl.q": "",
        "flowrl.q.one": "from flowrl.p.other import name",
    },
    "a package above": {
        "flowrl.p": "from flowrl.p.inner.base import Base",
        "flowrl.p.inner": "",
        "flowrl.p.inner.base": "from flowrl.p import Base",
    },
}


def edges_of(folder, texts):
    files = {name: folder / f"{name}.py" for name in texts}
    for name, path in files.items():
        path.write_text(texts[name])
    return budgets.graph(files)


@pytest.mark.parametrize("kind", CYCLES)
def test_a_cycle_through_the_init_of_a_package_is_seen(tmp_path, kind):
    assert "flowrl.p" in budgets.levels(edges_of(tmp_path, CYCLES[kind]))[1]


WORDS = {  # a check of words, a source with one fault, the same source without it
    "headless": ('class A:\n    """Of the denoiser."""', 'class A:\n    """Offers bytes."""'),
    "headless beside code": (
        "f(2)  # of the batch",
        "f(2)  # offset: the third\nx = '# of '",
    ),
    "headless above code": (
        "x = 1\n# Of one row,\n# of all rows\nf(2)",
        "# The number of rows, and the number\n# of prompts.\nf(2)",
    ),
    "unexplained": (
        "@dataclass(frozen=True)\nclass A:\n    rows: int\n",
        "@dataclass\nclass A:\n    rows: int  # in a batch\n\n    # seconds\n    time: float\n"
        '    seed: int = 0\n    """Any whole number."""\n',
    ),
    "silent": (
        "def f():\n" + "    x = 1\n" * 29,
        "def f():\n    # once is not enough: rounding\n" + "    x = 1\n" * 29,
    ),
}


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Write a file of the house that is checked."""
    monkeypatch.setattr(budgets, "ROOT", tmp_path)

    def write(name, text):
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return write


@pytest.mark.parametrize("kind", WORDS)
def test_each_check_of_words_finds_its_fault_and_nothing_else(kind, written):
    def found(text, name):
        path = written(name, text)
        checks = (budgets.headless, budgets.unexplained, budgets.silent)
        return [said for check in checks for said in check(path, text.splitlines())]

    bad, good = WORDS[kind]
    said = {
        "headless": 'docstring begins with "Of"',
        "headless beside code": 'a.py:1: a comment begins with "Of"',
        "headless above code": 'a.py:2: a comment begins with "Of"',
        "unexplained": "nothing explains A.rows",
        "silent": "no comment",
    }
    (only,) = found(bad, "a.py")
    assert said[kind] in only and not found(good, "b.py")


def test_a_class_name_in_two_files_is_found(written):
    run = "class Run: pass\nclass Settings: pass"
    one, two, walk = (
        written(*file) for file in (("a.py", run), ("b.py", run), ("c.py", "class Walk: pass"))
    )
    assert budgets.class_names([one, walk]) == []
    assert budgets.class_names([one, two]) == ["class Run is defined in a.py, b.py"]


def test_tokens_a_line_counts_neither_comments_nor_lines_without_code(written):
    text = "# words\n\nx = 1  # why\ny = (\n    2,\n)\n"
    assert budgets.tokens_a_line([written("a.py", text)]) == 9 / 4


def test_a_package_that_imports_its_own_modules_is_no_cycle(tmp_path):
    own = {
        "flowrl": "from flowrl.p import Base",
        "flowrl.p": "from flowrl.p.base import Base",
        "flowrl.p.base": "import flowrl.p.other as other\nfrom flowrl.p.inner.more import most",
        "flowrl.p.inner": "",
        "flowrl.p.inner.more": "from flowrl.p.other import name",
        "flowrl.p.other": "",
    }
    assert budgets.levels(edges_of(tmp_path, own)) == (4, [])


def test_no_file_imports_a_private_name_of_another():
    assert not budgets.private_imports(budgets.modules())


def test_what_scripts_and_tests_import_is_there():
    """Also inside functions, which run only at real size, say."""
    files = budgets.modules()
    lacking = []
    for path in budgets.python_files(("scripts", "tests")):
        for module, name in budgets.imports(path):
            if module == "flowrl" or f"{module}.{name}" in files or not name:
                continue  # flowrl's names load lazily, and tests ask for each
            text = files[module].read_text(encoding="utf-8") if module in files else ""
            if not re.search(rf"^(\s*|.*\W){name}\W", text, re.MULTILINE):
                lacking.append(f"{path.name}: {name} of {module}")
    assert not lacking


# the first two load their names when these are used; check --data reads files without torch
LAZY = {"flowrl", "flowrl.rewards", "flowrl.data.conditions", "flowrl.data.media"}


def test_imports_are_absolute_and_none_hides_under_type_checking():
    for module, path in budgets.modules().items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            assert not isinstance(node, ast.ImportFrom) or node.level == 0, module
            named = isinstance(node, ast.Name) and node.id == "TYPE_CHECKING"
            assert not named or module in LAZY, f"{module} imports under TYPE_CHECKING"


def test_the_loop_imports_no_particular_reward_and_no_plotting():
    code = "import sys, flowrl.training.loop; print(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    plugins = {f"flowrl.rewards.{path.stem}" for path in (ROOT / "rewards").glob("*.py")}
    assert not loaded & (plugins - {"flowrl.rewards.__init__"})
    assert "matplotlib" not in loaded and "flowrl.report.charts" not in loaded


def test_accelerate_is_imported_in_training_and_one_file_of_runtime_only():
    users = {name for name, path in budgets.modules().items() if _imports(path, "accelerate")}
    assert {name.split(".")[1] for name in users} == {"runtime", "training"}
    assert {name for name in users if "runtime" in name} == {"flowrl.runtime.processes.world"}


def _imports(path, package):
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom)]
    return any(name.split(".")[0] == package for name in names)


def test_every_folder_with_modules_is_a_declared_package():
    inits = [
        p for top in ("flowrl", "samplers", "rewards") for p in ROOT.glob(f"{top}/**/__init__.py")
    ]
    assert {budgets.module_of(path) for path in inits} | {"flowrl.configs"} == set(PACKAGES)


def test_the_wheel_carries_every_module_config_template_and_weight(tmp_path):
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
    expected = {
        f"{name.replace('.', '/')}.py" for name in budgets.modules() if name not in PACKAGES
    }
    expected |= {f"{package.replace('.', '/')}/__init__.py" for package in PACKAGES}
    expected |= {
        f"flowrl/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / "configs").rglob("*.yaml")
    }
    expected |= {
        p.relative_to(ROOT).as_posix()
        for pattern in (
            "shapes/edit/**/*",
            "shapes/masked/**/*",
            "shapes/sd/**/*",
            "shapes/wan/**/*",
            "shapes/weights/**/*",
            "scenes/stickers/*.png",
            "scenes/stickers/NOTICE",
            "report/templates/*",
            "data/*.jsonl",
        )
        for p in (ROOT / "flowrl").glob(pattern)
        if p.is_file()
    }
    assert expected >= {
        "flowrl/configs/model/shapes-sd3.yaml",
        "flowrl/shapes/weights/LICENSE",
        "flowrl/scenes/stickers/NOTICE",
        "flowrl/scenes/stickers/sprites.png",
        "flowrl/report/templates/style.css",
        "flowrl/data/everyday.jsonl",
    }
    assert not expected - wheel


def test_samplers_and_rewards_import_under_one_name():
    for package in PACKAGES:
        folder = Path(next(iter(importlib.import_module(package).__path__))).resolve()
        top, _, rest = package.removeprefix("flowrl.").partition(".")
        root = (
            FOLDERS.get(f"flowrl.{top}", ROOT / "flowrl" / top)
            if package != "flowrl"
            else ROOT / "flowrl"
        )
        assert folder == root / rest.replace(".", "/")


@pytest.mark.parametrize("package", PACKAGES)
def test_modules_say_what_they_are_and_their_examples_hold(package):
    found = [
        info
        for info in pkgutil.iter_modules(importlib.import_module(package).__path__)
        if not info.ispkg
    ]
    for info in found:
        if info.name == "__main__":  # importing it runs the command
            continue
        module = importlib.import_module(f"{package}.{info.name}")
        assert module.__doc__ and module.__doc__.strip(), f"{module.__name__} has no docstring"
        assert doctest.testmod(module).failed == 0


def test_no_two_test_files_have_one_name():
    """pytest imports a test file by its name alone."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


def test_every_test_file_that_starts_first_exists(pytestconfig):
    conftest = pytestconfig.pluginmanager.get_plugin(str(ROOT / "tests" / "conftest.py"))
    for name in conftest.LONGEST_FIRST:
        assert len(list((ROOT / "tests").rglob(name))) == 1, name
