"""The command line says what it can, before torch is imported."""

import json
import subprocess
import sys

import pytest
import small
import typer
import yaml

from flowrl import __version__
from flowrl.cli.common import HELP
from flowrl.cli.main import COMMANDS, app

NAMES = [name for commands in COMMANDS.values() for name in commands]
SAID = yaml.safe_load(HELP.read_text(encoding="utf-8"))

# what a shell asks when Tab is pressed after these words, and one of the answers
TABS = {
    "flowrl ge": "generate",
    "flowrl train batch.gr": "batch.group=",
    "flowrl train algorithm = n": "nft",  # bash parts words at "="
    "flowrl budget reward = picks": "pickscore",
    "flowrl show experiment = qui": "quickstart",
    "flowrl score a.png --keep": "--keep-top",
}
CODE = f"""
import json, os, sys
from typer.testing import CliRunner
from flowrl.cli.main import app

def said(*words, **env):
    return CliRunner(env=env).invoke(app, words, prog_name="flowrl").output

out = {{name: [said(name, "-h"), said(name, "--help")] for name in {NAMES}}}
out["-h"], out["--version"] = said("-h"), said("--version")
out["init"] += [said("init", sys.argv[1], "--yes", "--model", "sdxl")]
out["show"] += [said("show", sys.argv[1])]
for line in {[*TABS]}:
    os.environ["COMP_WORDS"], os.environ["COMP_CWORD"] = line, str(len(line.split()) - 1)
    out[line] = said(_FLOWRL_COMPLETE="complete_bash").split()
out["heavy"] = [name for name in ("torch", "diffusers", "transformers") if name in sys.modules]
print(json.dumps(out))
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What commands print in one process that stands for many."""
    file = tmp_path_factory.mktemp("help") / "a.yaml"
    words = [sys.executable, "-c", CODE, str(file)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_help_completion_init_and_show_import_no_torch(said):
    assert said["heavy"] == []
    assert said["--version"] == f"flowrl {__version__}\n"
    assert "source: stabilityai/stable-diffusion-xl-base-1.0" in said["show"][-1]


def test_the_first_help_has_every_command_under_a_heading(said):
    for heading, names in COMMANDS.items():
        rest = said["-h"].partition(f"\n{heading}:\n")[2]
        under = rest.partition("\n\n")[0].splitlines()
        listed = [line.split()[0] for line in under if not line.startswith("   ")]
        assert listed == [*names] and "..." not in rest


@pytest.mark.parametrize("name", NAMES)
def test_the_help_of_a_command_has_examples_and_says_what_values_are(said, name):
    short, long = said[name][:2]
    assert short == long and short.startswith(f"Usage: flowrl {name}")
    panels = SAID[name]
    for heading in panels:
        assert f"\n{heading}:\n" in short
    assert 2 <= len(panels["Examples"]) <= 3
    for words in panels["Examples"]:
        assert f"\n  flowrl {words}" in f"{short}\n" and words.split()[0] == name
    assert "<list[str]>" not in short


def test_headings_name_options_that_there_are():
    assert [*SAID] == NAMES
    for name, command in typer.main.get_command(app).commands.items():
        own = {param.name for param in command.params}
        named = [
            o for heading, options in SAID[name].items() if heading != "Examples" for o in options
        ]
        assert set(named) <= own and len(named) == len(set(named)), name


@pytest.mark.parametrize("line", TABS)
def test_tab_completes_commands_keys_and_names(said, line):
    assert TABS[line] in said[line], said[line]
    begun = line.rpartition(" ")[2]
    assert all(word.startswith(begun) for word in said[line])


def test_words_are_explained_where_they_are_used():
    shown = small.invoke("evaluate", "--help").output
    assert "as the run did, with --suite 0" in " ".join(shown.split())
