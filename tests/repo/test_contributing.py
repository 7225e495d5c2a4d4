"""What a contributor reads holds: CONTRIBUTING.md's change works, and AGENTS.md, CITATION.cff and
the issue templates name what exists."""

import re
import runpy
import sys
import tomllib

import pytest
import typer
import yaml
from pages import ROOT, blocks, started

import flowrl
import flowrl.rewards
from flowrl.cli.main import app
from flowrl.runtime.registry import shipped

GUIDES = {
    name: (ROOT / name).read_text(encoding="utf-8") for name in ("CONTRIBUTING.md", "AGENTS.md")
}
FORMS = {
    path.stem: yaml.safe_load(path.read_text(encoding="utf-8"))
    for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")
}
INVENTED = {"rewards/contrast.py", "tests/rewards/test_contrast.py"}  # by the first change


def test_the_first_change_is_a_reward_whose_test_passes(tmp_path, monkeypatch):
    """The two files as they stand on the page, found by the name alone."""
    page = GUIDES["CONTRIBUTING.md"]
    reward, test = (code for _, language, code, _ in blocks("", page) if language == "python")
    (tmp_path / "contrast.py").write_text(reward)
    (tmp_path / "test_contrast.py").write_text(test)
    monkeypatch.setattr(flowrl.rewards, "__path__", [*flowrl.rewards.__path__, str(tmp_path)])
    assert "contrast" in shipped("flowrl.rewards")
    tests = runpy.run_path(str(tmp_path / "test_contrast.py"))
    (own,) = [value for name, value in tests.items() if name.startswith("test_")]
    try:
        own()
    finally:
        sys.modules.pop("flowrl.rewards.contrast", None)
        vars(flowrl.rewards).pop("contrast", None)


@pytest.mark.parametrize("name", GUIDES)
def test_guides_name_what_exists(name):
    text = GUIDES[name]
    links = re.findall(r"\]\(([^)#]+)", text)
    files = re.findall(r"\b((?:docs|scripts|tests|configs|flowrl|rewards)/[\w./]*\w)", text)
    named = [path for path in (*links, *files) if "FOLDER" not in path and path not in INVENTED]
    assert len(named) > 5 and [path for path in named if not (ROOT / path).exists()] == []
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"(?:`|^ +|\n)make ([a-z]+)\b", text)) <= targets
    group = typer.main.get_command(app)
    for _, words, _ in started(name, text):
        group.commands[words[0]].make_context(words[0], words[1:])


def test_agents_are_told_in_sixty_lines_and_of_every_folder():
    text = GUIDES["AGENTS.md"]
    assert len(text.splitlines()) <= 60
    folders = {path.parent.name for path in ROOT.glob("flowrl/*/__init__.py")}
    assert {f for f in folders if f"`flowrl/{f}`" not in text} == set()
    assert "100 columns" in text and "60 lines" in text  # as scripts/check_budgets.py has it


def test_the_citation_is_of_this_version():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {"cff-version", "message", "title", "authors"} <= cited.keys()
    assert cited["version"] == project["version"] and cited["license"] == project["license"]


def test_issue_templates_are_forms_that_ask_for_the_environment():
    assert FORMS.pop("config") == {"blank_issues_enabled": True} and set(FORMS) == {"bug", "method"}
    for form in FORMS.values():
        assert {"name", "description", "body"} <= form.keys()
        ids = [field["id"] for field in form["body"] if field["type"] != "markdown"]
        assert len(set(ids)) == len(ids) >= 3
        text = yaml.safe_dump(form, width=10**6)
        assert "flowrl env" in text and "env" in typer.main.get_command(app).commands
        named = re.findall(r"\b((?:docs/)?[\w/]+\.md)\b", text)
        assert [path for path in named if not (ROOT / path).exists()] == []
    required = {
        field["id"]
        for field in FORMS["bug"]["body"]
        if field.get("validations", {}).get("required")
    }
    assert required == {"ran", "happened", "env"}
