"""What is installed: the lock file fits pyproject.toml, every package in it has hashes, and every
download names a revision."""

import ast
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from setuptools.command.egg_info import FileList

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCK = (ROOT / "requirements.lock").read_text()
FETCHERS = ("hf_hub_download", "snapshot_download")


def needed(words):
    """Requirements, with those of our own extras in their place."""
    for word in words:
        requirement = Requirement(word)
        if requirement.name == "flowrl-align":
            for extra in requirement.extras:
                yield from needed(PROJECT["optional-dependencies"][extra])
        else:
            yield requirement


def locked():
    """Package -> its versions; another Python may have another one."""
    out = {}
    for name, version in re.findall(r"^([\w.-]+)==([^\s;]+)", LOCK, re.M):
        out.setdefault(name.lower(), []).append(version)
    return out


def test_the_lock_holds_what_pyproject_asks_for():
    found = locked()
    asked = list(needed([*PROJECT["dependencies"], "flowrl-align[dev]"]))
    assert len(asked) > 30
    wrong = [
        str(requirement)
        for requirement in asked
        for version in found.get(requirement.name.lower(), ["none"])
        if version == "none" or not requirement.specifier.contains(version, prereleases=True)
    ]
    assert not wrong, "run make lock"


def test_every_locked_package_has_hashes_and_no_line_names_a_host():
    entries = re.split(r"^(?=\S)", LOCK, flags=re.M)[1:]
    assert len(entries) > 100
    assert [e.split()[0] for e in entries if not re.search(r"--hash=sha256:[0-9a-f]{64}", e)] == []
    assert "://" not in LOCK and "index-url" not in LOCK


@pytest.mark.parametrize("target", ["lock", "lowest", "release"])
def test_make_knows_what_security_md_says(target):
    makefile, security = (ROOT / "Makefile").read_text(), (ROOT / "SECURITY.md").read_text()
    assert f"`make {target}`" in security and f"\n{target}:" in makefile
    assert "--require-hashes --requirement $(LOCK)" in makefile


def test_every_download_names_a_revision():
    calls = [
        (path.name, call)
        for folder in ("flowrl", "rewards", "samplers", "scripts")
        for path in (ROOT / folder).rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") in FETCHERS
    ]
    assert len(calls) > 2
    assert not [
        name for name, call in calls if "revision" not in {word.arg for word in call.keywords}
    ]


def test_the_sdist_lists_what_git_holds(monkeypatch):
    """scripts/bench/installed.py builds it; this reads MANIFEST.in alone."""
    if not (ROOT / ".git").exists():
        pytest.skip("an unpacked sdist has no list of git's to compare with")
    told = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, stdout=subprocess.PIPE, check=True)
    known = {name for name in told.stdout.decode().split("\0") if name and (ROOT / name).exists()}
    monkeypatch.chdir(ROOT)
    listed = FileList()
    for line in (ROOT / "MANIFEST.in").read_text().splitlines():
        if line and not line.startswith("#"):
            listed.process_template_line(line)
    always = {"LICENSE", "MANIFEST.in", "pyproject.toml"}  # put in by setuptools
    assert len(known) > 1000 and not known - set(listed.files) - always
