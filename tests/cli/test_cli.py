"""Every command does its work and says where it is."""

import json

import numpy as np
import pytest
import small
from PIL import Image

from flowrl.config.load import load_config, read_config


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """What `flowrl train` prints, and its run folder."""
    folder = tmp_path_factory.mktemp("cli") / "run"
    changes = {
        "reward": "shapes",
        "eval__baseline_guidance": "2.0",
        "trackers": "[tensorboard]",
        "optimizer__lr": "1e-2",
    }
    words = small.words(folder, iterations="2", **changes)
    result = small.invoke("train", *words)
    assert result.exit_code == 0, result.output
    return result.output, folder


def test_train_says_what_will_happen_and_what_came_out(run):
    output, folder = run
    assert output.index(
        "2 prompts x 2 = 4 samples on 1 process(es); 4 steps, guidance none: 16 network calls"
    ) < output.index("train 1/2")
    assert (
        "update     at most 8 trained rows in 1 optimizer step(s)" in output
        and "run        iterations 1 to 2" in output
    )
    for row in ("before", "before, guided", "after"):
        assert row in output
    assert f"Run folder: {folder}" in output and f"{folder / 'report.html'}" in output


def test_a_run_folder_holds_what_the_design_promises(run):
    _, folder = run
    assert read_config(folder / "config.yaml").iterations == 2
    assert [line["iteration"] for line in small.lines(folder)] == [1, 2]
    assert {p.name for p in (folder / "checkpoints").iterdir()} == {"step-000001", "step-000002"}
    files = {p.name for p in (folder / "checkpoints" / "step-000002").iterdir()}
    assert files >= {
        "manifest.json",
        "meta.json",
        "policy.safetensors",
        "old.safetensors",
        "ema.safetensors",
        "optimizer.safetensors",
    }
    assert not [
        p for p in folder.rglob("*") if p.suffix in (".pt", ".pkl", ".bin", ".pth")
    ]  # never a pickle
    assert [r["name"] for r in json.loads((folder / "evaluation.json").read_text())["rows"]] == [
        "before",
        "before, guided",
        "after",
    ]
    assert (folder / "samples" / "before_after.png").exists() and list(
        (folder / "tracker").rglob("events.*")
    )
    html = (folder / "report.html").read_text()
    assert (
        "before" in html
        and "http://" not in html.replace("http://www.w3.org", "")
        and "<script src" not in html
    )


def test_a_finished_run_resumes_to_nothing_new(run):
    _, folder = run
    before = small.numbers(folder)
    result = small.invoke("train", "--resume", folder)
    assert result.exit_code == 0 and small.numbers(folder) == before


def test_report_is_rebuilt(run):
    _, folder = run
    (folder / "report.html").unlink()
    result = small.invoke("report", folder)
    assert (
        result.exit_code == 0
        and str(folder / "report.html") in result.output.replace("\n", "")
        and (folder / "report.html").exists()
    )


def test_generate_writes_a_picture_a_prompt(run, tmp_path):
    _, folder = run
    plain = small.invoke(
        "generate",
        "shapes-sd3",
        "a red circle",
        "--steps",
        8,
        "--seed",
        7,
        "-o",
        tmp_path / "a.png",
    )
    assert plain.exit_code == 0 and str(tmp_path / "a.png") in plain.output.replace("\n", ""), (
        plain.output
    )
    assert Image.open(tmp_path / "a.png").size == (64, 64)
    options = ["--steps", 8, "--seed", 7, "--lora", folder, "-o"]
    assert (
        small.invoke(
            "generate", "shapes-sd3", "a red circle", *options, tmp_path / "tuned.png"
        ).exit_code
        == 0
    )
    assert (
        small.invoke(
            "generate", "shapes-sd3", "a red circle", *options, tmp_path / "none.png", "--rlg", 0
        ).exit_code
        == 0
    )
    a, tuned, none = (
        np.asarray(Image.open(tmp_path / f"{n}.png"), int) for n in ("a", "tuned", "none")
    )
    assert np.abs(a - none).max() <= 1 and np.abs(a - tuned).max() > 1


def test_generate_numbers_several_prompts_and_chooses_the_best(tmp_path):
    prompts, choice = ["a red circle", "two blue squares"], ["--best-of", 2, "--reward", "shapes"]
    result = small.invoke(
        "generate",
        "shapes-sd3",
        *prompts,
        "--steps",
        2,
        "--guidance",
        "none",
        *choice,
        "-o",
        tmp_path / "b.png",
    )
    assert result.exit_code == 0, result.output
    assert {p.name for p in tmp_path.iterdir()} == {"b-0.png", "b-1.png"}


def test_generate_and_suites_take_settings_of_rewards_as_score_does(run, tmp_path):
    words = [
        "generate",
        "shapes-sd3",
        "a red circle",
        "--steps",
        1,
        "--guidance",
        "none",
        "--best-of",
        2,
        "--reward",
    ]
    chosen = small.invoke(
        *words, "clip.preset=shapes", "--reward", "shapes=2", "-o", tmp_path / "a.png"
    )
    assert chosen.exit_code == 0 and (tmp_path / "a.png").exists(), chosen.output
    unknown = small.invoke(*words, "jpeg.qualty=80", "-o", tmp_path / "b.png")
    assert (
        unknown.exit_code == 2
        and 'unknown setting "qualty"; did you mean "quality"' in unknown.stderr
    )
    words = ["evaluate", run[1], "--suite", "shapes", "--count", 1, "--images", 1, "--steps", 1]
    measured = small.invoke(
        *words, "--reward", "jpeg.quality=10", "--held-out", "clip.preset=shapes"
    )
    assert measured.exit_code == 0, measured.output
    record = json.loads((run[1] / "suites" / "shapes.json").read_text())
    assert record["suite"]["held_out"]["jpeg"] == {"quality": 10} and record["suite"]["held_out"][
        "clip"
    ] == {"preset": "shapes"}
    assert record["rows"][0]["scores"].keys() >= {"shapes", "jpeg", "clip"}
    refused = small.invoke("evaluate", run[1], "--reward", "jpeg.quality=10")
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
    assert (
        result.exit_code == 1
        and result.stderr.splitlines()[-1] == "flowrl: [Errno 28] No space left on device"
    )


def test_show_prints_a_config_that_reads_back(tmp_path):
    result = small.invoke("show", "quickstart", "iterations=3")
    assert result.exit_code == 0
    (tmp_path / "c.yaml").write_text(result.stdout)
    assert read_config(tmp_path / "c.yaml") == load_config("quickstart", ["iterations=3"])
    assert small.invoke("show", tmp_path / "c.yaml").stdout == result.stdout


def test_list_names_every_choice():
    result = small.invoke("list")
    assert result.exit_code == 0
    listed = dict(line.split(": ") for line in result.output.splitlines())
    assert listed.keys() == {"models", "algorithms", "rewards", "data", "experiments", "suites"}
    assert "shapes-sd3" in listed["models"] and {"nft", "mix_grpo"} <= set(
        listed["algorithms"].split(", ")
    )
    assert small.invoke("list", "rewards").output == f"rewards: {listed['rewards']}\n"


def test_check_shows_a_model_and_tries_a_reward():
    model = small.invoke("check", "shapes-sd3")
    assert model.exit_code == 0 and "transformer(" in model.output and "out[" in model.output, (
        model.output
    )
    reward = small.invoke("check", "--reward", "jpeg")
    assert reward.exit_code == 0 and "minus kilobytes at JPEG quality 95" in reward.output
    assert small.invoke("check", "--reward", "shapes").exit_code == 0


def test_help_of_every_command_exits_with_0():
    from flowrl.cli.main import app

    for command in app.registered_commands:
        name = command.name or command.callback.__name__
        assert small.invoke(name, "--help").exit_code == 0
    assert small.invoke("--help").exit_code == 0
    assert "as the run did, with --suite 0" in " ".join(
        small.invoke("evaluate", "--help").output.split()
    )


def test_generate_takes_the_pipelines_own_arguments_and_those_of_the_run(
    tmp_path, run, monkeypatch
):
    made = small.invoke(
        "generate",
        "shapes-sd3",
        "a red circle",
        "--steps",
        1,
        "--pipeline",
        "height=32",
        "-o",
        tmp_path / "a.png",
    )
    assert made.exit_code == 0, made.output
    assert Image.open(tmp_path / "a.png").size == (64, 32)
    assert (
        "latents (4, 8, 16)"
        in small.invoke("check", "shapes-sd3", "--pipeline", "height=32").output
    )
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "lora").symlink_to(run[1] / "lora")
    text = (run[1] / "config.yaml").read_text()
    assert "max_sequence_length: 12" in text
    (folder / "config.yaml").write_text(
        text.replace("max_sequence_length: 12", "max_sequence_length: 12\n    width: 48")
    )
    words = [
        "generate",
        "shapes-sd3",
        "a red circle",
        "--lora",
        folder,
        "--steps",
        1,
        "-o",
        tmp_path / "b.png",
    ]
    assert small.invoke(*words).exit_code == 0 and Image.open(tmp_path / "b.png").size == (48, 64)
    assert small.invoke(*words, "--pipeline", "width=32").exit_code == 0 and Image.open(
        tmp_path / "b.png"
    ).size == (32, 64)
