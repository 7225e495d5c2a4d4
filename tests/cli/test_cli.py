"""Every command does its work and says where it is."""

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import small
import torch
from filelock import FileLock
from PIL import Image

from flowrl.config.load import load_config, read_config
from flowrl.training.train import train


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """What `flowrl train` prints, and its run folder."""
    folder = tmp_path_factory.mktemp("cli") / "run"
    changes = {
        "reward": "shapes",
        "seed": "1",  # pictures that the verifier does not like all the same
        "eval__baseline_guidance": "2.0",
        "trackers": "[tensorboard]",
        "optimizer__lr": "1e-2",
    }
    words = small.words(folder, iterations="2", **changes)
    result = small.invoke("train", *words)
    assert result.exit_code == 0, result.output
    return result.output, folder


@pytest.mark.parametrize("name", ["page.pdf", "page", "page.md", "page.html.zip"])
def test_a_page_of_another_suffix_is_refused(tmp_path, name):
    result = small.invoke("report", tmp_path, "--output", tmp_path / name)
    assert result.exit_code == 2 and "the page is an .html file" in result.output


def test_train_says_what_will_happen_and_what_came_out(run):
    output, folder = run
    plan = "2 prompts x 2 = 4 samples on 1 process(es); 4 steps, guidance none: 16 network calls"
    assert output.index(plan) < output.index("train 1/2")
    assert "update     at most 8 trained rows in 1 optimizer step(s)" in output
    assert "run        iterations 1 to 2" in output
    for row in ("before", "before, guided", "after"):
        assert row in output
    assert f"Run folder: {folder}" in output and f"{folder / 'report.html'}" in output


def test_a_run_folder_holds_what_the_design_promises(run):
    _, folder = run
    assert read_config(folder / "config.yaml").iterations == 2
    assert [line["iteration"] for line in small.lines(folder)] == [1, 2]
    assert {p.name for p in (folder / "checkpoints").iterdir()} == {"step-000001", "step-000002"}
    files = {p.name for p in (folder / "checkpoints" / "step-000002").iterdir()}
    tensors = {f"{stem}.safetensors" for stem in ("policy", "old", "ema", "optimizer")}
    assert files >= {"manifest.json", "meta.json"} | tensors
    pickles = (".pt", ".pkl", ".bin", ".pth")
    assert not [path for path in folder.rglob("*") if path.suffix in pickles]
    rows = json.loads((folder / "evaluation.json").read_text())["rows"]
    assert [row["name"] for row in rows] == ["before", "before, guided", "after"]
    assert (folder / "samples" / "before_after.png").exists()
    assert list((folder / "tracker").rglob("events.*"))
    html = (folder / "report.html").read_text()
    assert "before" in html and "<script src" not in html
    assert "http://" not in html.replace("http://www.w3.org", "")


def written_at(folder):
    """Each file of a run but its lock, which every start touches -> time of its last change."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "run.lock")
    return {path: path.stat().st_mtime_ns for path in files}


def test_a_finished_run_resumes_to_nothing_new(run, monkeypatch):
    _, folder = run
    before = small.numbers(folder)
    written = written_at(folder)
    monkeypatch.setattr("flowrl.training.build.make_policy", None)  # no model is loaded
    result = small.invoke("train", "--resume", folder)
    assert result.exit_code == 0 and small.numbers(folder) == before
    said = " ".join(result.output.split())
    assert "is finished: all" in said and "add iterations=" in said and "Report:" in said
    assert written == written_at(folder)
    run = train(resume=folder)  # from Python, too
    assert run.path == folder and len(run.metrics) == len(small.lines(folder))


def test_the_printed_command_draws_tokens_in_the_steps_of_the_run(tmp_path):
    words = small.words(tmp_path / "run", "flow_grpo", iterations="1")
    words += [small.TOKENS, "algorithm=trace_rl"]
    for command in (words, ["--resume", tmp_path / "run"]):
        result = small.invoke("train", *command)
        assert result.exit_code == 0, result.output
        assert re.search(r"flowrl generate \S+ .* --steps 4\b", " ".join(result.output.split()))


def test_a_resume_that_is_refused_is_refused_before_the_model_is_loaded(run, monkeypatch):
    monkeypatch.setattr("flowrl.training.train.start", lambda *_, **__: pytest.fail("it started"))
    changed = small.invoke("train", "--resume", run[1], "optimizer.lr=1e-5")
    assert changed.exit_code == 2 and "optimizer.lr 0.01 -> 1e-05" in " ".join(
        changed.stderr.split()
    )
    with FileLock(run[1] / "run.lock", is_singleton=False):
        busy = small.invoke("train", "--resume", run[1])
    assert busy.exit_code == 2 and "is being written by" in " ".join(busy.stderr.split())


def test_report_is_rebuilt(run):
    _, folder = run
    report = folder / "report.html"
    report.unlink()
    result = small.invoke("report", folder)
    assert result.exit_code == 0 and report.exists()
    assert str(report) in result.output.replace("\n", "")


CIRCLE = ["generate", "shapes-sd3", "a red circle", "--steps"]


def test_generate_writes_a_picture_a_prompt(run, tmp_path):
    _, folder = run
    pictures = {}
    for name, more in {
        "plain": [],
        "tuned": ["--lora", folder],
        "none": ["--lora", folder, "--rlg", 0],
    }.items():
        path = tmp_path / f"{name}.png"
        result = small.invoke(*CIRCLE, 8, "--seed", 7, "-o", path, *more)
        assert result.exit_code == 0 and str(path) in result.output.replace("\n", ""), result.output
        assert Image.open(path).size == (64, 64)
        pictures[name] = np.asarray(Image.open(path), int)
    assert np.abs(pictures["plain"] - pictures["none"]).max() <= 1
    assert np.abs(pictures["plain"] - pictures["tuned"]).max() > 1


def test_generate_numbers_several_prompts_and_chooses_the_best(tmp_path):
    prompts, choice = ["a red circle", "two blue squares"], ["--best-of", 2, "--reward", "shapes"]
    how = ["--steps", 2, "--guidance", "none", *choice]
    result = small.invoke("generate", "shapes-sd3", *prompts, *how, "-o", tmp_path / "b.png")
    assert result.exit_code == 0, result.output
    assert {p.name for p in tmp_path.iterdir()} == {"b-0.png", "b-1.png"}


def test_generate_takes_settings_of_rewards_as_score_does(tmp_path):
    words = [*CIRCLE, 1, "--guidance", "none", "--best-of", 2, "--reward"]
    choice = ["clip.preset=shapes", "--reward", "shapes=2"]
    chosen = small.invoke(*words, *choice, "-o", tmp_path / "a.png")
    assert chosen.exit_code == 0 and (tmp_path / "a.png").exists(), chosen.output
    unknown = small.invoke(*words, "jpeg.qualty=80", "-o", tmp_path / "b.png")
    assert unknown.exit_code == 2
    assert 'unknown setting "qualty"; did you mean "quality"' in unknown.stderr


def test_suites_take_settings_of_rewards_as_score_does(run):
    _, folder = run
    words = ["evaluate", folder, "--suite", "shapes", "--count", 1, "--images", 1, "--steps", 1]
    read = ["--reward", "jpeg.quality=10", "--held-out", "clip.preset=shapes"]
    measured = small.invoke(*words, *read, "--rlg", 2)
    assert measured.exit_code == 0, measured.output
    record = json.loads((folder / "suites" / "shapes.json").read_text())
    held_out = record["suite"]["held_out"]
    assert held_out["jpeg"] == {"quality": 10} and held_out["clip"] == {"preset": "shapes"}
    assert record["rows"][0]["scores"].keys() >= {"shapes", "jpeg", "clip"}
    assert [row["rlg"] for row in record["rows"]][:: len(record["rows"]) - 1] == [1.0, 2.0]
    refused = small.invoke("evaluate", folder, "--reward", "jpeg.quality=10")
    assert refused.exit_code == 2 and "--reward and --held-out need a suite" in refused.stderr


@pytest.mark.parametrize("command", ["generate", "evaluate"])
def test_a_full_disk_at_the_end_is_a_failure_while_running(run, tmp_path, monkeypatch, command):
    """Exit code 2 would say that nothing was started."""
    from flowrl.data import media
    from flowrl.report import run_page

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(media, "save", full)
    monkeypatch.setattr(run_page, "build", full)
    words = {
        "generate": ["shapes-sd3", "a red circle", "--steps", 1, "-o", tmp_path / "a.png"],
        "evaluate": [run[1], "--images", 2, "--steps", 1, "--guidance", "none"],
    }
    result = small.invoke(command, *words[command])
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1] == "flowrl: [Errno 28] No space left on device"


ITERATIONS = load_config("quickstart").iterations
DIFFERENCES = {  # words -> lines of `show --diff` with them
    "experiment=quickstart": ["batch.group=16  # 24", "reward.shapes.reading=strict"],
    "": [],
    "RUN": ["algorithm.steps=2  # null", "model.self_check=false  # true"],
    "quickstart RUN": ["batch.group=16  # 2", f"iterations={ITERATIONS}  # 2"],
    "RUN quickstart": ["batch.group=2  # 16", "# no reward.shapes.reading  # strict"],
    "quickstart quickstart": [],
    "quickstart iterations=3 quickstart": [f"iterations=3  # {ITERATIONS}"],
}


@pytest.mark.parametrize("words", DIFFERENCES)
def test_show_diff_prints_what_differs(run, words):
    shown = small.invoke("show", *words.replace("RUN", str(run[1])).split(), "--diff")
    assert shown.exit_code == 0, shown.output
    lines = shown.stdout.splitlines()
    assert set(DIFFERENCES[words]) <= set(lines) and bool(lines) == bool(DIFFERENCES[words])
    if words.startswith("experiment="):  # what is printed are words that give the same config
        again = small.invoke("show", *(line.partition("  #")[0] for line in lines), "--diff")
        assert again.stdout.splitlines() == lines


def test_show_diff_refuses_what_it_cannot_compare_with():
    for words in (["quickstart", "nothing"], ["quickstart", "quickstart", "quickstart"]):
        shown = small.invoke("show", *words, "--diff")
        assert shown.exit_code == 2 and len(shown.stderr.splitlines()) == 1


def test_a_dry_run_says_what_would_run_tries_the_rewards_and_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    changes = {"guard__check_rewards": "true", "data__eval": "null"}
    done = small.invoke("train", *small.words("a/b", **changes), "--dry-run")
    assert done.exit_code == 0 and not [*tmp_path.iterdir()], done.output
    assert "run        iterations 1 to 100, in a/b" in done.output
    assert "trying the rewards on 4 samples" in done.stderr and "Next:" not in done.output
    refused = small.invoke("train", *small.words("a/b", batch__prompts="100000"), "--dry-run")
    assert refused.exit_code == 2 and not [*tmp_path.iterdir()]
    assert "resume" not in refused.output.lower()


def test_env_says_what_a_bug_report_needs_and_no_path(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    shown, read = small.invoke("env").stdout, json.loads(small.invoke("env", "--json", "-").stdout)
    lines = dict(line.split(maxsplit=1) for line in shown.splitlines())
    assert lines == read and torch.__version__.startswith(lines["torch"])
    packages = {"python", "flowrl", "diffusers", "transformers", "peft", "accelerate"}
    assert packages | {"platform", "cuda", "attention", "compiler", "extras"} <= lines.keys()
    assert "native" in lines["attention"] and "server" in lines["extras"]
    assert str(Path.home()) not in shown and "hf_secret" not in shown


def test_show_prints_a_config_that_reads_back(tmp_path):
    result = small.invoke("show", "quickstart", "iterations=3")
    assert result.exit_code == 0
    (tmp_path / "c.yaml").write_text(result.stdout)
    assert read_config(tmp_path / "c.yaml") == load_config("quickstart", ["iterations=3"])
    assert small.invoke("show", tmp_path / "c.yaml").stdout == result.stdout


def test_list_names_every_choice():
    result = small.invoke("list")
    assert result.exit_code == 0
    assert max(map(len, result.output.splitlines())) <= 100
    listed = dict(line.split(": ") for line in result.output.replace("\n  ", " ").splitlines())
    kinds = {"models", "algorithms", "rewards", "samplers", "data", "experiments", "suites"}
    assert listed.keys() == kinds | {"memory"} and "24gb" in listed["memory"]
    assert "flow_sde" in listed["samplers"]
    assert "shapes-sd3" in listed["models"]
    assert {"nft", "mix_grpo"} <= set(listed["algorithms"].split(", "))
    assert json.loads(small.invoke("list", "--json", "-").stdout)["samplers"] == listed[
        "samplers"
    ].split(", ")
    for kind, names in listed.items():
        lines = small.invoke("list", kind).output.splitlines()
        assert [line.split()[0] for line in lines] == names.split(", ")
        assert max(map(len, lines)) <= 100


def test_check_shows_a_model_and_tries_a_reward():
    model = small.invoke("check", "shapes-sd3")
    assert model.exit_code == 0, model.output
    assert "transformer(" in model.output and "out[" in model.output
    reward = small.invoke("check", "--reward", "jpeg")
    assert reward.exit_code == 0 and "minus kilobytes at JPEG quality 95" in reward.output
    last = reward.output.splitlines()[-1]
    assert re.fullmatch(r"nothing failed; \d warnings; train with: flowrl train reward=jpeg", last)
    numbers = json.loads(small.invoke("check", "--reward", "shapes", "--json", "-").stdout)
    assert {"name", "verdict", "value", "says"} == numbers["shapes"][0].keys()
    refused = small.invoke("check", "shapes-sd3", "--json", "-")
    assert refused.exit_code == 2 and "--json are for a reward" in refused.stderr


def test_generate_takes_the_pipelines_own_arguments(tmp_path):
    made = small.invoke(*CIRCLE, 1, "--pipeline", "height=32", "-o", tmp_path / "a.png")
    assert made.exit_code == 0, made.output
    assert Image.open(tmp_path / "a.png").size == (64, 32)
    described = small.invoke("check", "shapes-sd3", "--pipeline", "height=32").output
    assert "latents (4, 8, 16)" in described


def test_generate_takes_the_arguments_that_the_run_was_trained_with(tmp_path, run):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "lora").symlink_to(run[1] / "lora")
    text, length = (run[1] / "config.yaml").read_text(), "max_sequence_length: 12"
    assert length in text
    (folder / "config.yaml").write_text(text.replace(length, f"{length}\n    width: 48"))
    words = [*CIRCLE, 1, "--lora", folder, "-o", tmp_path / "b.png"]
    assert small.invoke(*words).exit_code == 0
    assert Image.open(tmp_path / "b.png").size == (48, 64)
    assert small.invoke(*words, "--pipeline", "width=32").exit_code == 0
    assert Image.open(tmp_path / "b.png").size == (32, 64)


def test_commands_that_train_prints_last_work_as_they_are_printed(run, tmp_path, monkeypatch):
    output, folder = run
    monkeypatch.chdir(tmp_path)
    steps = output.rpartition("Next:\n")[2].splitlines()
    commands = [shlex.split(line)[1:] for line in steps if line.startswith("  flowrl ")]
    assert [words[0] for words in commands] == ["generate", "evaluate"]
    generated, evaluated = (small.invoke(*words) for words in commands)
    assert generated.exit_code == 0 and evaluated.exit_code == 0, evaluated.output
    (path,) = generated.stdout.splitlines()
    scoring = shlex.split(generated.stderr.splitlines()[-1])[1:]
    prompt = commands[0][2]
    assert prompt == "a square"  # the first of its held-out prompts
    assert scoring == ["score", path, "--prompt", prompt, "--reward", "clip.preset=shapes"]
    small.invoke(*commands[0], "--seed", 1, "-o", "b.png")
    scored = small.invoke(*scoring[:-1], "jpeg", "b.png", "--json", "-", "-o", "best")
    row, _ = json.loads(scored.stdout)
    assert row["file"] == path and row["total"] == row["scores"]["jpeg"] < 0
    train = shlex.split(scored.stderr.splitlines()[-1].replace("MODEL", "shapes-sd3"))[1:]
    tiny = [f"output={tmp_path / 'next'}", "model.self_check=false", "batch.group=2", "--dry-run"]
    tried = small.invoke(*train, "batch.prompts=1", *tiny)
    assert tried.exit_code == 0, tried.output
    lora = steps[-1].partition('("')[2].removesuffix('")')
    assert steps[-1].startswith("  in diffusers: pipe.load_lora_weights(")
    assert (Path(lora) / "pytorch_lora_weights.safetensors").exists()
