"""Objects, files and packages of docs/extending.md: its blocks, in a folder outside the repository,
run as the page says."""

import importlib
import json
import re
import runpy
import shlex
import sys
import tomllib

import pytest
import small
from pages import PAGES

import flowrl
from flowrl.config import load
from flowrl.config.compose import ConfigError
from flowrl.runtime import registry
from flowrl.runtime.store import history
from flowrl.samplers import sde

PAGE = PAGES["docs/extending.md"].partition("\n## A new algorithm in the repository\n")[0]
FILES = {m[1]: m[2] for m in re.finditer(r"^`([\w/.]+)`:\n\n```\w+\n(.*?)^```$", PAGE, re.M | re.S)}
BASH = re.findall(r"^```bash\n(.*?)^```$", PAGE, re.M | re.S)
COMMANDS = [shlex.split(line)[1:] for block in BASH for line in block.splitlines()]
TINY = ["batch.prompts=2", "batch.group=2", "batch.updates=1", "sampler.steps=4", "iterations=2"]
TINY += ["eval.every=0", "eval.images=2", "eval.steps=2", "ema.every=1", "trackers=[]"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The page's files, and the present folder."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def package(folder, monkeypatch):
    """The page's package, as pip leaves it in site-packages."""
    project = tomllib.loads(FILES["package/pyproject.toml"])["project"]
    info = folder / "package" / "flowrl_mine-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Name: {project['name']}\nVersion: 0.1\n")
    lines = [
        f"[{group}]\n" + "\n".join(f"{name} = {value}" for name, value in entries.items())
        for group, entries in project["entry-points"].items()
    ]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    monkeypatch.syspath_prepend(str(folder / "package"))
    importlib.invalidate_caches()
    registry.installed.cache_clear()
    sde.find.cache_clear()
    yield folder / "package"
    registry.installed.cache_clear()
    sde.find.cache_clear()
    sys.modules.pop("flowrl_mine", None)


def test_the_page_holds_the_files_that_it_talks_about():
    assert list(FILES) == [
        *(f"mine/{name}.py" for name in ("run", "go_on", "red", "reinforce", "steps", "prompts")),
        "mine/model.py",
        "mine/soft.py",
        "package/pyproject.toml",
        "package/flowrl_mine.py",
    ]
    assert len(COMMANDS) == 9


def test_the_script_with_objects_runs_goes_on_and_is_evaluated(folder, monkeypatch):
    monkeypatch.syspath_prepend(str(folder / "mine"))
    runpy.run_path("mine/run.py", run_name="__main__")
    run = folder / "runs" / "objects"
    assert len(small.lines(run)) == 2 and (run / "report.html").is_file()
    assert "source: live:Net" in (run / "config.yaml").read_text()
    environment = json.loads((run / "environment.json").read_text())
    assert environment["live policy"] == "Net" and environment["live rewards"] == "red"

    said = "this run's policy (Net), rewards (red) and prompts (2 prompts, 1 prompt) were live"
    for words in (["train", "--resume", run], ["evaluate", run]):
        result = small.invoke(*words)
        assert result.exit_code == 2 and said in result.output.replace("\n", " ")
    assert small.invoke("report", run).exit_code == 0

    try:
        runpy.run_path("mine/go_on.py")
    finally:
        sys.modules.pop("run", None)
    assert [line["iteration"] for line in small.lines(run)] == [1, 2, 3]
    assert [line["event"] for line in history.read(run)].count("resumed") == 1
    rows = json.loads((run / "evaluation.json").read_text())["rows"]
    assert rows[-1]["name"] == "evaluate, 4 steps, guidance none, seed 0"


@pytest.mark.parametrize("words", COMMANDS[:6], ids=" ".join)
def test_each_command_composes_alone(folder, words):
    cfg = load.load_config(None, words[1:])
    named = [value for value in load.flatten(cfg.model_dump()).values() if registry.is_place(value)]
    assert named and all(value.startswith(f"{folder}/mine/") for value in named)


def test_the_variant_of_flow_grpo_has_all_its_settings(folder):
    names = dict.fromkeys(("algorithm.name", "algorithm.label"))
    variant, flow_grpo = (
        load.flatten(load.load_config(None, words).model_dump()) | names
        for words in (COMMANDS[5][1:], ["algorithm=flow_grpo"])
    )
    assert variant == flow_grpo


def test_files_train_together_and_an_edited_one_is_noticed(folder):
    words = dict.fromkeys(word for command in COMMANDS[:5] for word in command[1:])
    words = [word for word in words if word not in ("algorithm=flow_grpo", "reward=jpeg")]
    result = small.invoke("train", *words, *TINY, "output=runs/files")
    assert result.exit_code == 0, result.output
    lines = small.lines("runs/files")
    assert len(lines) == 2 and "reward/red/mean" in lines[0] and "policy/log_prob" in lines[0]
    rows = json.loads((folder / "runs/files/evaluation.json").read_text())["rows"]
    assert {row["name"] for row in rows} >= {"before", "after"}

    steps = folder / "mine" / "steps.py"
    steps.write_text(steps.read_text() + "# edited\n")
    result = small.invoke("train", "--resume", "runs/files", "iterations=3")
    assert result.exit_code == 2 and f"changed since its newest checkpoint: {steps}" in (
        result.output.replace("\n", "")
    )


def test_a_package_is_listed_composes_and_gives_what_it_names(package):
    listed = json.loads(small.invoke("list", "--json", "-").output)
    found = {"models": "tiny-shapes", "rewards": "redness", "algorithms": "plain"}
    for kind, name in (found | {"samplers": "dance"}).items():
        assert name in listed[kind] and name in small.invoke("list", kind).output
    cfg = load.load_config(None, COMMANDS[-1][1:])
    assert (cfg.model.source, cfg.algorithm["name"]) == ("tiny-shapes", "plain")
    assert (cfg.algorithm["sde"], list(cfg.reward)) == ("dance", ["redness"])
    assert flowrl.rewards.load("redness").scale == "mean of the red channel"
    with pytest.raises(ConfigError, match='unknown algorithm "plane"; did you mean "plain"'):
        load.load_config(None, ["algorithm=plane"])


def test_a_package_that_cannot_be_imported_is_one_sentence(package):
    (package / "flowrl_mine.py").write_text("import nowhere_to_be_found\n")
    for word in ("reward=redness", "algorithm=plain", "algorithm.sde=dance"):
        with pytest.raises(ConfigError, match="the entry point flowrl_mine.*cannot be imported"):
            load.load_config(None, ["algorithm=flow_grpo", word])
    with pytest.raises(ValueError, match="of the package flowrl-mine cannot be imported: Module"):
        flowrl.load_policy("tiny-shapes")
