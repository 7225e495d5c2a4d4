"""The commands of the documentation exist, take their options, and could start."""

import re
import shlex
from types import SimpleNamespace

import pytest
import typer
import yaml
from pages import OURS, PAGES, ROOT, shell, started

from flowrl.cli.common import HELP, parse_config
from flowrl.cli.main import app
from flowrl.config import build
from flowrl.config.facts import of_config
from flowrl.rewards import reward_class
from flowrl.runtime.processes.launcher import check_teams
from flowrl.samplers import sigmas
from flowrl.training.budget import roofline

COMMANDS = [command for page, text in OURS.items() for command in shell(page, text)]
FLOWRL = [command for page, text in OURS.items() for command in started(page, text)]
for panels in yaml.safe_load(HELP.read_text(encoding="utf-8")).values():
    FLOWRL += [("help.yaml", shlex.split(words), 1) for words in panels["Examples"]]


def test_there_are_commands_of_each_kind():
    assert len(FLOWRL) > 100 and {processes for *_, processes in FLOWRL} >= {1, 2, 8, 16}


def check_run(where, words, processes=1):
    """A command exists and takes its options; one that trains could start."""
    group = typer.main.get_command(app)
    assert words[0] in group.commands, f"{where}: flowrl has no command {words[0]}"
    command = group.commands[words[0]]
    context = command.make_context(words[0], words[1:])  # parses and checks options; runs nothing
    if words[0] in ("train", "show", "budget"):
        cfg = parse_config(context.params["overrides"])
        if not context.params.get("resume"):  # else the run has other settings beside
            check_start(where, cfg, context.params.get("gpus", processes))
    if words[0] == "budget":
        assert context.params["device"] in roofline.NAMES, where


def check_start(where, cfg, processes):
    """The prompts carry what rewards read, and plans fit the batch all through the run."""
    classes = [reward_class(entry.get("name", label)) for label, entry in cfg.reward.items()]
    reads = {key for cls in classes for key in cls.reads}
    carried = not reads or cfg.data.train.startswith("shapes:") or ".jsonl" in cfg.data.train
    assert carried, f"{where}: a text file does not carry {reads}"
    check_teams(processes, cfg.train.sequence_parallel)
    teams = processes // cfg.train.sequence_parallel
    algorithm, grid = build.make_algorithm(cfg), sigmas.linear(cfg.sampler.steps)
    rewards = SimpleNamespace(needs=frozenset().union(*(cls.needs for cls in classes)))
    for iteration in {0, 1, cfg.iterations // 2, cfg.iterations - 1}:
        plan = algorithm.plan(grid, sampler=cfg.sampler, iteration=iteration, seed=cfg.seed)
        algorithm.check(plan)
        of_config(cfg, method=algorithm, processes=teams, plan=plan, rewards=rewards)


@pytest.mark.parametrize(
    ("where", "words", "processes"), FLOWRL, ids=[" ".join(words) for _, words, _ in FLOWRL]
)
def test_commands_exist_take_their_options_compose_and_fit_their_plans(
    where, words, processes, monkeypatch, tmp_path
):
    (tmp_path / "path/to/model").mkdir(parents=True)
    for own in ("docs", "scripts"):
        (tmp_path / own).symlink_to(ROOT / own)
    for teacher in re.findall(r"\.adapter=(\S+)", " ".join(words)):
        (tmp_path / teacher).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REWARD_SERVER", "http://127.0.0.1:8000")
    check_run(where, words, processes)


INLINE = re.compile(r"`(flowrl (?:train|show|budget) [^`]*)`")  # also over the end of a line


def test_commands_of_another_model_name_its_prompts_and_its_reward():
    fenced = [" ".join(words) for page in PAGES.items() for _, words, _ in started(*page)]
    inline = [text for page in PAGES.values() for text in INLINE.findall(page)]
    runs = [
        text
        for text in (*fenced, *inline)
        if re.search(r"(?<!\.)model=(?!shapes-|package:flowrl)", text)
    ]
    runs = [text for text in runs if "algorithm=" in text or "data" in text or "train" in text]
    assert len(runs) > 40
    for text in runs:
        assert re.search(r"\bdata(\.train|\.offline)?=", text), text
        assert re.search(r"\breward[.=]", text), text


@pytest.mark.parametrize(
    ("words", "processes", "said"),
    [
        (["algorithm=branch_grpo", "batch.group=24"], 1, "plan's 16 leaves; try 16 or 32"),
        (["algorithm=mix_grpo", "batch.prompts=6"], 1, "1 process x 4 updates; try 4 or 8"),
        (["algorithm=awm", "sampler.steps=4"], 1, "sampler.steps=4 offers 2"),
        (["algorithm=dpo", "batch.group=1"], 1, "use at least 2"),
        (["batch.prompts=8"], 3, "does not divide by 3 processes x 1 update; try 6 or 9"),
        (["train.sequence_parallel=2"], 3, "3 cannot be dealt into such teams"),
        (["train.sequence_parallel=2", "batch.prompts=3"], 4, "does not divide by 2 teams"),
        (["batch.nothing=1", "--resume", "runs/mine"], 1, 'unknown key "batch.nothing"'),
    ],
)
def test_a_command_that_composes_but_could_not_start_is_found(words, processes, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        check_run("here", ["train", *words], processes)


def test_a_budget_of_processes_that_do_not_divide_the_batch_is_found():
    with pytest.raises(ValueError, match="does not divide by 3 processes"):
        check_run("here", ["budget", "batch.prompts=8", "--gpus", "3"])


PAGE = """
```sh
# a comment
flowrl train seed=1
accelerate launch --num_processes 2 \\
  -m flowrl train seed=2
```
```console
$ flowrl check
```
```
flowrl show seed=3
what it prints
torchrun --nnodes 2 --nproc-per-node 4 -m flowrl train seed=4
```
```text
flowrl prints this
```
"""


def test_commands_are_found_in_fences_of_every_shell_and_in_plain_ones():
    found = [(words, processes) for _, words, processes in started("page", PAGE)]
    assert found == [
        (["train", "seed=1"], 1),
        (["train", "seed=2"], 2),
        (["check"], 1),
        (["show", "seed=3"], 1),
        (["train", "seed=4"], 8),
    ]


def test_an_option_that_a_launcher_does_not_have_is_found(capsys):
    with pytest.raises(SystemExit):
        started("page", "```sh\naccelerate launch --processes_of_nobody 2 -m flowrl train\n```\n")
    assert "processes_of_nobody" in capsys.readouterr().err


def test_scripts_and_make_targets_exist():
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M)
    for where, words in COMMANDS:
        if words[0] == "make":
            assert set(words[1:]) <= set(targets), where
        elif words[0] == "python" and words[1] != "-m":
            source = (ROOT / words[1]).read_text(encoding="utf-8")
            unknown = [w for w in words[2:] if w.startswith("--") and f'"{w}"' not in source]
            assert not unknown, f"{where}: {words[1]} has no {unknown}"
