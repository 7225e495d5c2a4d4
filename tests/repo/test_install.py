"""How flowrl is installed: by lines that name no package of somebody else's, from wherever it runs;
and what is said where a foreign package has the same import name."""

import ast
import importlib.metadata
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import flowrl
from flowrl.config.load import load_config
from flowrl.runtime import install
from flowrl.runtime.store.run_folder import environment
from flowrl.training import identity

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
PYTHON = [
    path
    for top in ("flowrl", "rewards", "samplers", "scripts")
    for path in ROOT.glob(f"{top}/**/*.py")
]
TEXTS = [
    *ROOT.glob("*.md"),
    *ROOT.glob("*.cff"),
    *ROOT.glob("docs/**/*.md"),
    *ROOT.glob(".github/**/*.*"),
    *ROOT.glob("configs/**/*.yaml"),
    *ROOT.glob("scripts/**/*.jinja"),
    *(ROOT / name for name in ("Makefile", "mkdocs.yml", "pyproject.toml", ".ci/run")),
]
INSTALLS = re.compile(
    r"\b(?:(?:pip3?|pipx|conda|mamba|uv tool) install|(?:uv|poetry|pdm) add|uvx)\b([^\n`;|&#]*)"
)
INSTALLER = re.compile(r"install|\buvx|\b(?:uv|poetry|pdm)\b|flowrl(?:[-_]align)?\[")
TAKE_A_VALUE = {"-r", "--requirement", "-c", "--python", "-f", "--find-links", "--index-url"}
# what make release, make lock and scripts/embedded/draw_stickers.py use
TOOLS = {"build", "cyclonedx-bom", "pip-audit", "resvg-py", "uv"}


def names(line):
    """Names of packages in the words behind `pip install`; paths are none."""
    words = iter(shlex.split(line.replace("'", "").replace('"', "")))
    for word in words:
        if word in TAKE_A_VALUE:
            next(words, None)
        elif re.match(r"[\w.-]+(\[[\w,]+\])?([<>=!~].*)?$", word) and word[0] not in "-.":
            yield canonicalize_name(re.split(r"[\[<>=!~]", word)[0])


def known():
    """Packages that this project depends on."""
    asked = [*PROJECT["dependencies"], *sum(EXTRAS.values(), [])]
    locked = re.findall(r"^([\w.-]+)==", (ROOT / "requirements.lock").read_text(), re.M)
    found = {canonicalize_name(Requirement(word).name) for word in asked}
    return (found | {canonicalize_name(name) for name in locked} | TOOLS) - {PROJECT["name"]}


def strange(text):
    """Install lines of a text that name a package which is neither ours nor one that we need; and
    extras of flowrl by name, which pip would look up."""
    lines = [found for found in INSTALLS.finditer(text) if set(names(found[1])) - known()]
    by_name = re.finditer(r"(?<![\w./-])flowrl(?:[-_]align)?\[[a-z]", text)
    return [found[0].strip() for found in (*lines, *by_name)]


def strings(path):
    """The texts of a Python file, those of several lines joined."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.JoinedStr):
            yield "".join(v.value if isinstance(v, ast.Constant) else "{}" for v in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_no_install_line_names_a_distribution_that_is_not_ours():
    read = {path: path.read_text(encoding="utf-8") for path in TEXTS}
    own = read[ROOT / "pyproject.toml"].replace('"flowrl-align[', "")  # dev's other extras
    read |= {ROOT / "pyproject.toml": own}
    sources = {path: path.read_text(encoding="utf-8") for path in PYTHON}
    maybe = {path for path, text in sources.items() if INSTALLER.search(text)}  # parsing takes time
    read |= {path: "\n".join(strings(path)) for path in maybe}
    assert sum(len(INSTALLS.findall(text)) for text in read.values()) > 15
    assert {path.name: found for path, text in read.items() if (found := strange(text))} == {}


@pytest.mark.parametrize(
    "line",
    [
        "pip install flowrl",
        "pip install 'flowrl[server]'",
        "run `python -m pip install -U flowrl-align`",
        "uv pip install --python .venv flowrl==0.2.0",
        "uv add flowrl",
        "pipx install flowrl_align",
        "conda install -c somewhere flowrl",
        "pip install -r requirements.lock torchh",
        "Needs flowrl[quantize].",
    ],
)
def test_a_line_that_fetches_by_name_is_found(line):
    assert strange(line)


@pytest.mark.parametrize(
    "line",
    [
        "pip install -e '.[server]'",
        "pip install --no-deps .   # in a clone of flowrl",
        "pip install 'path/to/flowrl_align-0.1.0-py3-none-any.whl[video]'",
        "pip install transformers==4.36.1 torch",
        "pip install --require-hashes --requirement requirements.lock",
    ],
)
def test_a_line_that_installs_from_here_is_none(line):
    assert strange(line) == []


# --- the helper behind messages


def test_messages_name_the_checkout_that_runs(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no pip here" / "python"))
    monkeypatch.chdir(ROOT)
    python = shlex.quote(sys.executable)
    assert install.install_line("server") == f"{python} -m pip install -e '.[server]'"
    monkeypatch.chdir(tmp_path)
    assert install.install_line("server").endswith(f"-m pip install -e '{ROOT}[server]'")


def test_messages_of_a_wheel_name_its_file(monkeypatch, tmp_path):
    monkeypatch.setattr(install, "ROOT", tmp_path)  # site-packages
    pip = tmp_path / "pip"
    pip.write_text("#!/bin/sh\n")
    pip.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    wheel = f"path/to/flowrl_align-{flowrl.__version__}-py3-none-any.whl"
    assert install.install_line("ocr") == f"pip install '{wheel}[ocr]'"
    assert PROJECT["version"] == flowrl.__version__


def test_a_package_is_brought_by_the_extra_that_messages_name():
    brings = importlib.metadata.packages_distributions()
    for package, extra in install.EXTRAS.items():
        wanted = {canonicalize_name(Requirement(word).name) for word in EXTRAS[extra]}
        given = map(canonicalize_name, brings.get(package, [package]))
        assert wanted & set(given), f"{package} is not in the extra {extra}"
    assert install.line_for("lpips.pretrained") == install.install_line("lpips")
    assert install.line_for("nowhere") is install.line_for(None) is None


def test_the_page_of_installation_holds_what_is_built_and_every_extra():
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    table = re.findall(r"^\| `(\w+)` \|", page.split("\n## Extras")[1], re.M)
    assert sorted(table) == sorted(EXTRAS)
    wheel = (ROOT / "docs" / "install_wheel.md").read_text(encoding="utf-8")
    wheels = re.findall(r"flowrl_align-([\d.]+)-py3-none-any\.whl", wheel)
    assert set(wheels) == {flowrl.__version__}
    with_dev = set(re.findall(r"\w+", EXTRAS["dev"][0].partition("[")[2]))
    row = next(line for line in page.splitlines() if line.startswith("| `dev` |"))
    assert with_dev <= set(re.findall(r"\w+", row))


def test_make_alone_lists_its_targets():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.search(r"^\.PHONY: (.*)$", makefile, re.M)[1].split()) - {"help"}
    head = makefile.partition("\nPYTHON")[0]
    assert set(re.findall(r"^# make (\w+)", head, re.M)) == targets
    assert re.search(r"^(\w+):", makefile, re.M)[1] == "help"


def test_make_installs_the_lock_by_uv_and_without_its_success_by_pip(tmp_path):
    """Both show their progress; uv itself comes from the lock file, too."""
    (tmp_path / ".venv").mkdir()
    for name in ("Makefile", "pyproject.toml", "requirements.lock"):
        shutil.copy(ROOT / name, tmp_path)
    words = ["make", "-n", "LOCK=requirements.lock", "install"]
    said = subprocess.run(words, cwd=tmp_path, text=True, check=True, capture_output=True).stdout
    lines = said.replace("\\\n", " ").splitlines()
    (line,) = [line for line in lines if "--requirement requirements.lock ||" in line]
    uv, pip = line.split(" || ")
    for command in (uv, pip):
        assert "--require-hashes --requirement requirements.lock" in command
        assert "--quiet" not in command
    assert uv.startswith(".venv/bin/uv pip install") and "-m pip install --no-compile" in pip
    (awk,) = [line for line in lines if "/^uv==/" in line]
    subprocess.run(awk, shell=True, cwd=tmp_path, check=True)
    own = (tmp_path / ".venv" / "uv.txt").read_text().splitlines()
    assert own[0].startswith("uv==") and len(own) > 1
    assert all(line.strip().startswith("--hash=sha256:") for line in own[1:])


# --- the name of the distribution


def test_old_runs_are_compared_with_the_version_that_they_recorded():
    """Runs from when the distribution was called flowrl hold {"flowrl": its version}."""
    assert identity.of_config(load_config("quickstart"))["code"] == {"flowrl": flowrl.__version__}
    assert environment()["flowrl"] == flowrl.__version__


def test_nothing_asks_the_installation_for_its_own_version():
    """A leftover of the old name, or the foreign package, would answer."""
    asked = [
        path.name
        for path in PYTHON
        if re.search(r"(version|distribution)\(\"flowrl", path.read_text(encoding="utf-8"))
    ]
    assert asked == ["install.py"]


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """Install a distribution called flowrl, with these entry points."""

    def plant(entry_points):
        info = tmp_path / "flowrl-0.2.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flowrl\nVersion: 0.2.0\n")
        (info / "entry_points.txt").write_text(entry_points)
        monkeypatch.syspath_prepend(str(tmp_path))

    return plant


@pytest.mark.parametrize("theirs", [False, True], ids=["beside ours", "over ours"])
def test_the_command_line_says_that_a_foreign_flowrl_is_installed(planted, tmp_path, theirs):
    """Where its __init__ took the place of ours, an import of ours fails right behind that."""
    planted("")
    paths = [str(tmp_path)] if theirs else [str(tmp_path), *sys.path[1:]]
    if theirs:
        (tmp_path / "flowrl").mkdir()
        (tmp_path / "flowrl" / "__init__.py").write_text("")
        for name in ("cli", "runtime"):
            (tmp_path / "flowrl" / name).symlink_to(ROOT / "flowrl" / name)
    code = f"import sys; sys.path[:0] = {paths}; from flowrl.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "--version"], cwd=tmp_path, capture_output=True, text=True
    )
    first, *rest = done.stderr.splitlines()
    assert f"flowrl 0.2.0 in {tmp_path / 'flowrl'} is another project's" in first
    assert "pip uninstall flowrl flowrl-align" in first
    assert (done.returncode, done.stdout) == (
        (1, "") if theirs else (0, f"flowrl {flowrl.__version__}\n")
    )
    assert "ImportError" in rest[-1] if theirs else not rest


def test_an_installation_of_ours_under_the_old_name_is_not_foreign(planted):
    planted("[console_scripts]\nflowrl = flowrl.cli.main:main\n")
    assert install.foreign() is None
    assert PROJECT["scripts"] == {"flowrl": install.COMMAND}
