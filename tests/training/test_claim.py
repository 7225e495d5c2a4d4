"""The folder of a run is its own, and a run that goes on is the one that it was."""

import contextlib
import json
import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import small
import yaml

import flowrl
from flowrl.config.compose import options
from flowrl.config.load import dump, load_config, read_config
from flowrl.report import run_page
from flowrl.runtime.store import checkpoint, history
from flowrl.runtime.store.checkpoint import CheckpointError
from flowrl.training import identity, loop, outputs, resume, state, trackers
from flowrl.training.claim import claimed
from flowrl.training.resume import check_resume, config_of

YAML = yaml.safe_load, yaml.safe_dump
ALONE = SimpleNamespace(
    main=True, all_or_none=lambda _: contextlib.nullcontext(), from_main=lambda value: value
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of two iterations without evaluations."""
    path = tmp_path_factory.mktemp("trained") / "run"
    small.trainer(path, data__eval="null", iterations="2").run()
    return path


@pytest.fixture
def run(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "run")


def events(run):
    return [line["event"] for line in history.read(run) if line["event"] != "edited"]


def changed(cfg, **sections):
    """A config with other values: optimizer={"lr": 1e-5}."""
    updates = {
        name: getattr(cfg, name).model_copy(update=update) for name, update in sections.items()
    }
    return cfg.model_copy(update=updates)


def test_runs_that_start_in_one_second_have_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda *_: "20260101-120000")
    cfg = small.config("x").model_copy(update={"output": None})
    with claimed(cfg, None, ALONE) as (first, held), claimed(cfg, None, ALONE) as (second, other):
        assert held.folder.is_dir() and other.folder.is_dir()
    assert (first, second) == (Path("runs/20260101-120000-nft"), Path("runs/20260101-120000-nft-2"))


def test_every_method_goes_by_its_own_name(tmp_path, monkeypatch):
    """In the run's folder, the console, the report and the trackers: thirteen files of
    configs/algorithm set up one class."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", os.environ.copy())  # trackers name their folders there
    running, names = small.trainer("any"), options("algorithm")
    assert len(names) >= 32
    for name in names:
        cfg = load_config(None, [f"algorithm={name}"])
        with claimed(cfg, None, ALONE) as (folder, _):
            assert folder.name.endswith(f"-{name}")
        asked = SimpleNamespace(cfg=cfg, parts=running.parts, iteration=0, budget="")
        assert f"algorithm  {name}, reward" in outputs.describe(asked)
        found = trackers.options(SimpleNamespace(setup=asked, path=Path("any")), "trackio", 0)
        assert found["group"] == name
        Path(name).mkdir()
        Path(name, "config.yaml").write_text(dump(cfg))
        assert f"</span>{name}</li>" in run_page.build(Path(name)).read_text()


@pytest.mark.parametrize(
    ("words", "label"),
    [
        (["algorithm=mix_grpo", "algorithm.label=mine-2"], "mine-2"),
        (["algorithm=mix_grpo", "algorithm.name=grpo"], "mix_grpo"),
        (["algorithm=mix_grpo", "algorithm.name=raft"], "raft"),
        (["algorithm.label=a/b"], "algorithm.label='a/b' should be letters, digits and . + - _"),
    ],
)
def test_a_label_is_the_users_or_the_file_of_the_method(words, label):
    try:
        found = load_config(None, words).algorithm["label"]
    except ValueError as error:
        found = str(error)
    assert found == label


def test_a_run_of_earlier_versions_has_the_name_of_its_class_and_goes_on(run):
    for path in (run / "config.yaml", *run.glob("checkpoints/*/meta.json")):
        read, write = (json.loads, json.dumps) if path.suffix == ".json" else YAML
        tree = read(path.read_text())
        (tree if path.suffix == ".yaml" else tree["identity"]["config"])["algorithm"].pop("label")
        path.write_text(write(tree))
    cfg = config_of(run)
    assert cfg.algorithm["label"] == "nft"
    check_resume(cfg, run)
    check_resume(config_of(run, ["algorithm.label=other"]), run)


def test_other_processes_are_told_the_folder_and_lock_nothing(tmp_path):
    second = SimpleNamespace(
        **{**vars(ALONE), "main": False, "from_main": lambda _: f"{tmp_path}/own"}
    )
    with claimed(small.config("x"), None, second) as (path, held):
        assert path == tmp_path / "own" and held is None and not path.exists()


def test_a_mistake_gives_new_folders_back_and_leaves_what_was_there(tmp_path):
    (tmp_path / "old").mkdir()
    for path in (tmp_path / "runs" / "new", tmp_path / "old"):
        with pytest.raises(KeyError), claimed(small.config(path), None, ALONE):
            assert [inside.name for inside in path.iterdir()] == ["run.lock"]
            raise KeyError
        assert [place.name for place in tmp_path.rglob("*")] == ["old"]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("config.yaml", "already holds a run; resume it with `flowrl train --resume"),
        ("metrics.jsonl", "already holds a run; its config.yaml is missing"),
    ],
)
def test_a_folder_that_holds_a_run_is_refused(tmp_path, name, sentence):
    (tmp_path / name).touch()
    with (
        pytest.raises(ValueError, match=sentence),
        claimed(small.config(tmp_path), None, ALONE),
    ):
        pass


def test_settings_files_and_versions_that_changed_are_named_and_others_may(tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red circle\na blue square\n")
    cfg = small.config(tmp_path / "run", data__train=prompts, data__eval="null")
    old = identity.of_config(cfg)
    assert not identity.differences(old, identity.of_config(cfg), tmp_path / "run")
    prompts.write_text("a red circle\na green square\n")
    other = changed(
        cfg, optimizer={"lr": 1e-5}, stop={"reward": 3.0}, checkpoint={"every": 7, "minutes": None}
    ).model_copy(update={"seed": 3, "iterations": 9, "trackers": ["tensorboard"]})
    other = changed(other, tracking={"name": "other", "tags": ["one"]})
    now = identity.of_config(other) | {"code": {"flowrl": "0.2.0"}}
    found = identity.differences(old, now, tmp_path / "run")
    assert found[1:] == [
        "flowrl (0.1.0 -> 0.2.0)",
        "optimizer.lr 0.0003 -> 1e-05",
        "seed 0 -> 3",
    ]
    assert found[0].startswith(f"{prompts} (") and " -> " in found[0]
    cosine = changed(cfg, optimizer={"schedule": "cosine"})
    longer = identity.of_config(cosine.model_copy(update={"iterations": 9}))
    assert "iterations 100 -> 9" in identity.differences(
        identity.of_config(cosine), longer, tmp_path
    )


def test_rewards_are_known_by_files_they_name_but_not_by_folders_or_what_they_write(tmp_path):
    for name in ("mine.py", "template.txt", "scores.jsonl"):
        (tmp_path / name).touch()
    own = {
        "weight": 1.0,
        "prefix": "/",
        "question": "x" * 300,
        "template": f"{tmp_path}/template.txt",
    }
    own |= {"name": f"{tmp_path}/mine.py:own", "journal": f"{tmp_path}/scores.jsonl"}
    cfg = small.config("x").model_copy(update={"reward": {"own": own}})
    named = identity.of_config(cfg)["files"]
    assert sorted(Path(name).name for name in named) == ["mine.py", "template.txt"]


def test_a_network_of_a_reward_is_known_by_its_weights(monkeypatch):
    import torch
    from torch import nn

    from flowrl.rewards.core.reward import FunctionReward

    monkeypatch.setattr(identity, "_frozen", lambda policy: {})
    reward = FunctionReward(lambda *_: None, "own")
    reward.net = nn.Linear(300, 2).requires_grad_(False)
    rewards, cfg = SimpleNamespace(rewards={"own": reward}, features=None), small.config("x")
    policy = SimpleNamespace(teachers=None)
    old = identity.of_parts(cfg, rewards, policy)
    assert not identity.differences(old, identity.of_parts(cfg, rewards, policy), Path("x"))
    reward.net.weight += 1e-6
    now = identity.of_parts(cfg, rewards, policy)
    assert [what[:22] for what in identity.differences(old, now, Path("x"))] == [
        "weights of reward.own "
    ]
    assert torch.equal(reward.net.weight, reward.net.weight)


def test_an_edited_config_is_refused_and_accepted_once(run):
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("lr: 0.0003", "lr: 1.0e-05"))
    result = small.invoke("train", "--resume", run)
    assert result.exit_code == 2 and "optimizer.lr 0.0003 -> 1e-05; undo that" in result.output
    cfg = config_of(run, ["iterations=3"])
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text(lines[1])
    loop.Trainer(cfg, resume=run, accept_changes=True)
    assert events(run) == ["started", "ended", "resumed", "changed", "lost"]
    changes, lost = history.read(run)[-2:]
    assert changes["changes"] == ["optimizer.lr 0.0003 -> 1e-05"]
    assert "metrics.jsonl lacks 1 of the 2 iterations up to step-000002 (1)" in lost["what"]
    check_resume(cfg, run)  # accepted, and not trained yet: not asked again
    with pytest.raises(ValueError, match=r"optimizer\.lr 0\.0003 -> 0\.1;"):
        check_resume(changed(cfg, optimizer={"lr": 0.1}), run)


def test_an_edited_line_of_the_metrics_is_noticed(run, caplog):
    """One that can still be read: nothing is dropped, and the run's history says so."""
    cfg = config_of(run, ["iterations=3"])
    loop.Trainer(cfg, resume=run)
    assert events(run)[-1] == "resumed"
    lines = (run / "metrics.jsonl").read_text().splitlines()
    row = json.loads(lines[0])
    del row["policy/rows"]
    (run / "metrics.jsonl").write_text("\n".join([json.dumps(row), *lines[1:]]) + "\n")
    loop.Trainer(cfg, resume=run)
    assert history.read(run)[-1]["event"] == "edited"
    assert "metrics.jsonl was edited: up to iteration 2" in caplog.text


def test_accepting_changes_needs_a_run(tmp_path):
    result = small.invoke("train", "--accept-changes", *small.words(tmp_path / "run"))
    assert result.exit_code == 2 and "add --resume RUN" in result.output


def test_a_lost_config_is_written_again_from_the_checkpoint(run, caplog):
    whole = read_config(run / "config.yaml")
    (run / "config.yaml").unlink()
    assert config_of(run) == whole == read_config(run / "config.yaml")
    assert "written again from the newest checkpoint" in caplog.text


def test_a_config_that_says_the_same_is_not_written_again(run):
    text = "# mine\n" + (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text)
    resume.write_config(run, read_config(run / "config.yaml"))
    assert (run / "config.yaml").read_text() == text
    resume.write_config(run, read_config(run / "config.yaml").model_copy(update={"iterations": 7}))
    assert read_config(run / "config.yaml").iterations == 7


def test_checkpoints_that_say_less_or_lack_tensors(run, caplog):
    """One of an earlier version is compared with config.yaml; one without optimizer is no use."""
    saved = checkpoint.load_newest(run)
    del saved.meta["identity"], saved.meta["guards"], saved.meta["metrics"]
    checkpoint.save(run, 2, saved.tensors, saved.meta)
    cfg = read_config(run / "config.yaml")
    loop.Trainer(cfg, resume=run)
    assert "does not say what it was trained with" in caplog.text
    with pytest.raises(ValueError, match="seed 0 -> 3"):
        check_resume(cfg.model_copy(update={"seed": 3}), run)
    del saved.tensors["optimizer"]
    with pytest.raises(CheckpointError, match=r"holds no optimizer\.safetensors, which this run"):
        saved.group("optimizer")
    with pytest.raises(CheckpointError, match=r"meta\.json has no 'scaler', so it was altered"):
        state.load(
            SimpleNamespace(parts=None),
            checkpoint.Checkpoint(
                folder=saved.folder, tensors={}, meta={"iteration": 0}, damaged={}
            ),
        )


@pytest.mark.parametrize("kept", ["config.yaml alone", "the checkpoint before the first iteration"])
def test_a_run_killed_before_its_first_checkpoint_starts_again(trained, tmp_path, caplog, kept):
    words = {"data__eval": "null", "iterations": "2", "guard__check_rewards": "false"}
    made = small.trainer(tmp_path / "run", checkpoint__every="50", **words)
    next(iter(made))  # an iteration is recorded, and nothing saved after it
    assert [folder.name for folder in checkpoint.steps(made.path)] == ["step-000000"]
    meta, manifest = sorted(path.name for path in checkpoint.latest(made.path).iterdir())[::-1]
    assert (meta, manifest) == ("meta.json", "manifest.json")  # no weights: they are as built
    if kept == "config.yaml alone":
        shutil.rmtree(made.path / "checkpoints")
    cfg = config_of(made.path)
    del made
    flowrl.train(cfg, resume=tmp_path / "run")
    assert small.numbers(tmp_path / "run") == small.numbers(trained)
    assert ("it starts from iteration 0" in caplog.text) == (kept == "config.yaml alone")


def test_a_checkpoint_is_due_by_iterations_by_minutes_and_at_the_end():
    def due(iteration, minutes, waited, stopped=None):
        cfg = SimpleNamespace(iterations=100, checkpoint=SimpleNamespace(every=50, minutes=minutes))
        setup, source = SimpleNamespace(cfg=cfg), SimpleNamespace(world=ALONE)
        parts, saved = SimpleNamespace(setup=setup, source=source), time.monotonic() - waited
        made = {"parts": parts, "iteration": iteration, "stopped": stopped, "saved_time": saved}
        return state.due(SimpleNamespace(**made))

    assert due(50, None, 0) and due(100, None, 0) and due(7, None, 0, stopped="SIGTERM received")
    assert due(7, 1.0, 61) and not due(7, 1.0, 50) and not due(7, None, 1e6)


def test_only_the_owner_writes_results_into_a_run(run, tmp_path, monkeypatch):
    from flowrl.evaluation import places

    def busy(folder, doing):
        raise places.Busy(f"{folder} is being written by process 7")

    with places.places([run], tmp_path / "out", "flowrl evaluate") as into:
        assert into == {run: tmp_path / "out"} and (tmp_path / "out").is_dir()
    other = shutil.copytree(run, tmp_path / "b" / "other")
    with places.places([run, other], tmp_path / "two", "flowrl evaluate") as into:
        assert [place.name for place in into.values()] == ["run", "other"]
    for runs, output, sentence in (
        ([run, shutil.copytree(run, tmp_path / "c" / "run")], tmp_path / "d", "the same name"),
        ([run], other, "other is a run, whose own results"),
        ([tmp_path], None, "is not a run folder"),
    ):
        with pytest.raises(ValueError, match=sentence), places.places(runs, output, "evaluate"):
            pass
    before = (run / "report.html").read_bytes()
    monkeypatch.setattr(places, "Lock", busy)
    for words in (["report", run], ["evaluate", run]):
        result = small.invoke(*words)
        assert result.exit_code == 2
        assert "process 7, or write the results elsewhere with --output" in result.output
    result = small.invoke("report", run, "--output", tmp_path / "page.html")
    assert (
        result.exit_code == 0 and "all iterations are done" in (tmp_path / "page.html").read_text()
    )
    assert (run / "report.html").read_bytes() == before and json.loads(
        (run / "metrics.jsonl").read_text().splitlines()[0]
    )


def test_settings_of_an_old_run_folder_are_checked_again(tmp_path):
    (tmp_path / "config.yaml").write_text(json.dumps({"iteratoins": 3}))
    result = small.invoke("train", "--resume", tmp_path)
    said = 'unknown key "iteratoins"; did you mean "iterations"'
    assert result.exit_code == 2 and said in result.output and not checkpoint.steps(tmp_path)
