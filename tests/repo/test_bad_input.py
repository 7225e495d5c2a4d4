"""Wrong input ends in one sentence and exit code 2 before anything is written; a failing reward is
counted, or stops the run."""

import math
import sys

import pytest
import small
import tiny
import torch

from flowrl import load_policy, rewards
from flowrl.cli.main import app  # noqa: F401  imported before a test changes folders
from flowrl.rewards import RewardBug, TooManyInvalid, load_set

UNCHECKED = "model.self_check=false"  # the replay is sound here, and proving it takes two seconds


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def refused(tmp_path, *arguments):
    """The sentence of a command that must end with exit code 2 and leave the folder as it was."""
    before = sorted(tmp_path.rglob("*"))
    result = small.invoke(*arguments)
    assert result.exit_code == 2, (result.exit_code, result.output)
    assert sorted(tmp_path.rglob("*")) == before
    sentences = [line for line in result.output.splitlines() if line.startswith("flowrl: ")]
    assert len(sentences) == 1 and "Traceback" not in result.output
    return result.output.replace("\n", " ")


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ("batch.promts=4", 'unknown key "batch.promts"; did you mean "batch.prompts"'),
        ("learning_rate=1", 'unknown key "learning_rate"'),
        (
            "train.mode=lorra",
            "train.mode='lorra' should be 'lora' or 'full'; did you mean \"lora\"?",
        ),
        ("model=sd35-medium", 'unknown model "sd35-medium"; did you mean "sd3.5-medium"'),
        (
            "model.source=shapes-sd4",
            'unknown model "shapes-sd4"; did you mean "shapes-sd" or "shapes-sd3"',
        ),
        ("algorithm=nfd", 'unknown algorithm "nfd"; did you mean "nft"'),
        ("reward=shape", 'unknown reward "shape"; did you mean "shapes"'),
        ("experiment=quikstart", 'unknown experiment "quikstart"; did you mean "quickstart"'),
        (
            "quikstart",
            '"quikstart" is not a YAML file, experiment or key=value; did you mean "quickstart"',
        ),
        ("nowhere.yaml", "nowhere.yaml"),
        ("data.train=shapes:trian", 'unknown data "shapes:trian"; did you mean "shapes:train"'),
        ("data.train=nowhere.txt", "prompt file nowhere.txt does not exist"),
        ("batch.prompts=1000", "batch.prompts=1000 is more than the"),
        (
            "algorithm.steps=9",
            "algorithm.steps=9 noise levels per sample, but sampler.steps=8 offers 7",
        ),
        ("trackers=[tensorbord]", 'unknown tracker "tensorbord"; did you mean "tensorboard"'),
        ("train.precision=fp16", "train.precision=fp16 needs a GPU"),
        (
            "train.lora.targets=[to_z]",
            'SD3Transformer2DModel ends in "to_z"; did you mean',
        ),
        ("train.init_lora=nowhere", "nowhere"),
        ("model.pipeline.heigth=64", "heigth"),
        (
            "model=nobody/nothing data=shapes reward=shapes",
            '"nobody/nothing" is not a diffusers folder, and cannot be fetched: HF_HUB_OFFLINE is'
            " set",
        ),
    ],
)
def test_a_mistake_is_named_and_nothing_is_written(tmp_path, monkeypatch, wrong, sentence):
    small.load_once(monkeypatch)
    assert sentence in refused(tmp_path, "train", *wrong.split(" "), UNCHECKED)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (
            ["algorithm=flow_grpo", "batch.prompts=50", "batch.updates=4"],
            "batch.prompts=50 does not divide by 1 process x 4 updates; try 48 or 52",
        ),
        (
            ["algorithm=flow_grpo", "sampler.eta=0"],
            "this method trains SDE steps and its plan has none: set sampler.eta > 0",
        ),
        (
            ["algorithm=flow_grpo", "sampler.steps=1"],
            "this method trains SDE steps and its plan has none",
        ),
        (
            ["algorithm=mix_grpo", "sampler.steps=4"],
            "a window of 4 steps does not fit into steps 0..2 of 4",
        ),
        (["algorithm=mix_grpo", "sampler.steps=1"], "a window needs at least 2 steps"),
        (
            ["algorithm=flow_grpo_fast", "sampler.steps=4"],
            "cannot end at window.high=5 of 4 steps: the last stays ODE; choose at most 3",
        ),
        (
            ["algorithm=mix_grpo", "algorithm.window.low=9", "algorithm.window.high=5"],
            "cannot start at window.low=9 and end at 5; choose low in 0..4",
        ),
        (
            ["algorithm=flow_grpo", "algorithm.clip=1e-3"],
            "algorithm.clip=0.001 should be values in brackets",
        ),
        (
            ["algorithm=flow_grpo", "algorithm.clip=[1e-4]"],
            "algorithm.clip=[0.0001] should have 2 values or more",
        ),
        (
            ["algorithm=flow_grpo", "algorithm.clip=[1e-4,1e-4,1]"],
            "algorithm.clip=[0.0001, 0.0001, 1] should have at most 2 values",
        ),
        (["reward.shapes=0"], "every reward has weight 0 (shapes), so nothing would be trained"),
        (
            ["algorithm=flow_grpo", "model.pipeline.guidance_scale=1.0", "sampler.guidance=3"],
            "guidance=3.0 needs an unconditional branch",
        ),
        (
            ["model.pipeline.guidance_scale=1.0", "eval.baseline_guidance=4"],
            "guidance=4.0 needs an unconditional branch",
        ),
        (
            ["data.train=words.txt", "data.eval=null"],
            (
                'reward "shapes" reads "include" of each prompt, which "a red circle" in data.train'
                " does not"
            ),
        ),
        (
            ["data.eval=words.txt"],
            'reads "include" of each prompt, which "a red circle" in data.eval does not carry',
        ),
        (["data.train=empty.txt", "reward=jpeg"], "prompt file empty.txt is empty"),
        (
            ["data.train=latin.txt", "reward=jpeg"],
            "prompt file latin.txt is not UTF-8: byte 4, in line 1",
        ),
        (["data.train=clause.jsonl"], 'the prompt "x" in data.train has the clause {}'),
        (
            ["data.train=broken.jsonl", "reward=jpeg"],
            "prompt file broken.jsonl, line 1 is not JSON",
        ),
        (
            ["output=old"],
            (
                "old already holds a run; resume it with `flowrl train --resume old`, or choose"
                " another output="
            ),
        ),
    ],
)
def test_settings_that_do_not_go_together_are_named(tmp_path, monkeypatch, wrong, sentence):
    small.load_once(monkeypatch)
    (tmp_path / "words.txt").write_text("a red circle\na blue square\n" * 8)
    (tmp_path / "empty.txt").write_text("\n  \n")
    (tmp_path / "latin.txt").write_bytes(
        "caf\xe9 au lait".encode("latin-1").replace(b"caf", b"cafe", 1)
    )
    (tmp_path / "clause.jsonl").write_text('{"prompt": "x", "include": [{}]}')
    (tmp_path / "broken.jsonl").write_text('{"prompt": \n')
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "config.yaml").write_text("")
    assert sentence in refused(tmp_path, "train", *wrong, UNCHECKED)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["generate", "shapes-sd3", "a red circle", "--rlg", "1.5"],
            "--rlg compares the LoRA with the base model; give --lora too",
        ),
        (
            ["generate", "shapes-sd3", "a red circle", "--guidance", "much"],
            '--guidance=much should be a number, "none" or "pipeline"',
        ),
        (
            ["generate", "shapes-sd3", "a red circle", "--lora", "nowhere"],
            "there is no nowhere; give a finished run",
        ),
        (
            ["generate", "shapes-sd3", "a red circle", "--best-of", "2"],
            "best_of=2 needs best_of >= 1 and, above 1, a reward",
        ),
        (
            ["generate", "shapes-sd3", "a red circle", "--steps", "1", "-o", "out.mp3"],
            '"out.mp3": media are saved as .png',
        ),
        (
            ["generate", "shapes-sd3", "a read circle", "--best-of", "2", "--reward", "shapes"],
            'did you mean "a red circle"',
        ),
        (
            ["generate", "shapes-sd3", "a red circle", "--pipeline", "64"],
            "--pipeline 64 should be NAME=VALUE",
        ),
        (
            ["generate", "shapes-sd3", "a red circle", "--pipeline", "heigth=64"],
            "StableDiffusion3Pipeline takes no argument 'heigth'",
        ),
        (
            ["generate", "shapes-sd4", "a red circle"],
            'unknown model "shapes-sd4"; did you mean "shapes-sd" or "shapes-sd3"',
        ),
        (["evaluate", "nowhere"], "nowhere is not a run folder"),
        (["report", "nowhere"], "nowhere"),
        (["show", "batch.grup=3"], 'unknown key "batch.grup"; did you mean "batch.group"'),
        (["check"], "give a model, or --reward NAME"),
        (["check", "shapes-sd4"], 'unknown model "shapes-sd4"'),
        (["check", "--reward", "shape"], 'unknown reward "shape"; did you mean "shapes"'),
        (["list", "algoritms"], 'unknown list "algoritms"; did you mean "algorithms"'),
    ],
)
def test_every_command_answers_mistakes(tmp_path, arguments, sentence):
    assert sentence in refused(tmp_path, *arguments)


def test_a_pipeline_that_cannot_be_replayed_is_refused_with_the_inference_that_failed():
    pipe = tiny.pipeline("sd3")
    pipe.scheduler.step = lambda out, t, x, **_: (
        x * out.mean() + out,
    )  # on the instance, so that no step is ever seen
    with pytest.raises(
        ValueError, match="never called scheduler.step after a denoiser: there is no loop to replay"
    ):
        load_policy(pipe, **tiny.CALLS["sd3"]).self_check()


def test_an_unreplayable_pipeline_is_named_by_every_command_that_loads_it(tmp_path):
    """Stable Diffusion whose scheduler says that the network predicts something no flow can be made
    of."""
    pipe = tiny.pipeline("sd15")
    pipe.scheduler.register_to_config(prediction_type="score")
    pipe.save_pretrained(tmp_path / "sd15")
    said = "prediction_type given as score must be one of"
    assert said in refused(tmp_path, "check", "./sd15")
    assert said in refused(tmp_path, "train", "model=./sd15", *small.NAMED)
    assert said in refused(tmp_path, "generate", "./sd15", "a red circle")


def test_files_that_hold_no_config_are_named(tmp_path):
    for text, said in (
        ("model: 1.5\n", "model=1.5 should be a mapping"),
        ("algorithm: true\n", "algorithm=True should be a mapping"),
    ):
        (tmp_path / "mine.yaml").write_text(text)
        assert f"mine.yaml: {said}" in refused(tmp_path, "train", "mine.yaml")
    assert "seed=99999999999999999999 should be less than" in refused(
        tmp_path, "train", "seed=99999999999999999999"
    )


REWARD_FILE = """
import torch
from flowrl.rewards import Reward

class Mine(Reward):
    name, scale = "mine", "nothing"

    def __call__(self, media, prompts, context=None):
        values = media.flatten(1).std(1)
        RETURN

REWARD = Mine
"""


@pytest.mark.parametrize(
    ("code", "exit_code", "sentence"),
    [
        (REWARD_FILE.replace("RETURN", "return values"), 0, ": nothing"),
        (REWARD_FILE.replace("RETURN", "return values.double()"), 1, "returned a float64 tensor"),
        (REWARD_FILE.replace("RETURN", "return values[:, None]"), 1, "returned a float32 tensor"),
        (REWARD_FILE.replace("RETURN", "raise KeyError('colour')"), 1, "KeyError"),
        (
            REWARD_FILE.replace("REWARD = Mine", ""),
            2,
            "its file exposes no REWARD; end it with REWARD = YourClass",
        ),
        (
            "import nowhere_at_all",
            2,
            "its file cannot be imported: ModuleNotFoundError: No module named 'nowhere_at_all'",
        ),
    ],
)
def test_check_judges_the_file_of_a_reward(
    tmp_path, monkeypatch, request, code, exit_code, sentence
):
    name = f"checked_{request.node.callspec.indices['code']}"
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / f"{name}.py").write_text(code)
    monkeypatch.setattr(rewards, "__path__", [*rewards.__path__, str(folder)])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    result = small.invoke("check", "--reward", name)
    sys.modules.pop(f"flowrl.rewards.{name}", None)
    assert result.exit_code == exit_code and sentence in result.output, result.output
    assert sum(line.startswith("flowrl: ") for line in result.output.splitlines()) == (
        exit_code == 2
    )


def contents(run):
    """Every file of a run but the one that says who writes it."""
    files = (path for path in run.rglob("*") if path.is_file() and path.name != "run.lock")
    return {path: path.read_bytes() for path in files}


def test_evaluate_names_a_damaged_checkpoint_and_changes_nothing(tmp_path):
    run = tmp_path / "run"
    small.trainer(run, iterations="1").run()
    damaged = run / "checkpoints" / "step-000001" / "policy.safetensors"
    whole = damaged.read_bytes()
    for content in (whole[:-100], whole[:-1] + bytes([whole[-1] ^ 1])):
        damaged.write_bytes(content)
        before = contents(run)
        said = refused(tmp_path, "evaluate", run)
        assert "policy.safetensors" in said and "step-000001 to take step-000000 instead" in said
        assert contents(run) == before
    damaged.write_bytes(whole)
    (run / "evaluation.json").write_text('{"rows": [')
    assert "evaluation.json was edited or damaged" in refused(tmp_path, "evaluate", run)


# ---------------------------------------------------------------------------
# rewards that fail while running


def trainer(tmp_path, reward, **changes):
    """Without the reward checks, which would find what these rewards plant."""
    made = small.trainer(
        tmp_path / "run", data__eval="null", guard__check_rewards="false", **changes
    )
    small.use_rewards(made, load_set({"custom": reward}))
    return made


def spread(media):
    return media.flatten(1).std(1)


def test_nan_for_one_sample_is_counted_and_training_goes_on(tmp_path):
    def reward(media, prompts, context):
        values = spread(media)
        values[3] = math.nan
        return values

    made = trainer(
        tmp_path, reward, batch__prompts="4", batch__group="5", iterations="2"
    )  # 1 of 20 is 5%: allowed
    for it in made:
        assert it.metrics["reward/invalid"] == 1 and it.rewards.valid.tolist().index(False) == 3
        assert math.isfinite(it.metrics["reward/total"]) and it.metrics["policy/grad_norm"] > 0
        assert it.metrics["policy/rows"] == 19 * 2  # two noise levels a valid sample
    assert all(torch.isfinite(p).all() for p in made.parts.weights.parameters.values())


def test_a_reward_that_raises_for_few_samples_is_retried_counted_and_training_goes_on(tmp_path):
    """The chunk of 20 fails, then the one sample: 1 of 20 is 5%, which is allowed."""
    calls = []

    def reward(media, prompts, context):
        calls.append(len(media))
        if len(media) == 20 or len(calls) % 21 == 5:  # of the 20 that are tried alone, the fourth
            raise OSError("the server is gone")
        return spread(media)

    made = trainer(tmp_path, reward, batch__prompts="4", batch__group="5", iterations="2")
    start = {name: p.detach().clone() for name, p in made.parts.weights.parameters.items()}
    for it in made:
        assert it.metrics["reward/invalid"] == 1 and it.rewards.valid.tolist().index(False) == 3
        assert it.rewards.errors == [
            "custom: OSError: the server is gone (in a chunk of 20; tried one at a time, 1 failed)"
        ]
        assert it.metrics["policy/rows"] == 19 * 2 and it.metrics["policy/grad_norm"] > 0
    assert calls == ([20] + [1] * 20) * 2 and made.learner.step == 2
    assert any(not torch.equal(p, start[name]) for name, p in made.parts.weights.parameters.items())


def test_a_group_without_a_valid_sample_gives_no_gradient_rows(tmp_path):
    def reward(media, prompts, context):
        values = spread(media)
        values[:4] = math.nan  # the whole first group
        return values

    made = trainer(
        tmp_path, reward, batch__group="4", iterations="1", guard__invalid_fraction="0.5"
    )
    update, seen = made.learner.update, []
    made.learner.update = lambda rollout, columns, *rest: (
        seen.append(columns) or update(rollout, columns, *rest)
    )
    (it,) = list(made)
    assert (
        set(seen[0].prompt.tolist()) == {1}
        and it.metrics["policy/rows"] == 8
        and it.metrics["reward/invalid"] == 4
    )


def test_a_reward_that_raises_too_often_stops_the_run_and_the_run_resumes(tmp_path, monkeypatch):
    calls = []

    def reward(media, prompts, context):
        calls.append(len(media))
        if 3 < len(calls) < 6:  # from the second iteration on: the chunk, then a sample alone
            raise OSError("the server is gone")
        return spread(media)

    spec = load_set({"custom": reward})
    monkeypatch.setattr("flowrl.training.build.load_set", lambda _: spec)
    run = tmp_path / "run"
    words = small.words(
        run,
        iterations="4",
        eval__at_start="false",
        checkpoint__every="50",
        guard__check_rewards="false",
    )
    result = small.invoke("train", *words)
    assert result.exit_code == 1
    text = result.output.replace("\n", " ")
    assert (
        "1 of 4 samples could not be scored (allowed: 5%)" in text and "the server is gone" in text
    )
    assert f"flowrl train --resume {run}" in text
    done = len(small.lines(run))
    assert done == 3
    result = small.invoke("train", "--resume", run)
    assert result.exit_code == 0 and [line["iteration"] for line in small.lines(run)] == [
        1,
        2,
        3,
        4,
    ]


def test_a_reward_that_always_fails_stops_the_first_iteration_and_resumes_once_it_works(
    tmp_path, monkeypatch
):
    def reward(media, prompts, context):
        raise KeyError("colour")

    monkeypatch.setattr("flowrl.training.build.load_set", lambda _: load_set({"custom": reward}))
    run = tmp_path / "run"
    result = small.invoke("train", *small.words(run, data__eval="null", iterations="1"))
    assert (
        result.exit_code == 1
        and "4 of 4 samples" in result.output
        and "colour" in result.output
        and not small.lines(run)
    )
    assert (
        f"nothing was trained; start again with another output=, or remove {run}" in result.output
    )
    monkeypatch.setattr(
        "flowrl.training.build.load_set",
        lambda _: load_set({"custom": lambda media, *_: spread(media)}),
    )
    assert small.invoke("train", "--resume", run).exit_code == 0 and [
        line["iteration"] for line in small.lines(run)
    ] == [1]
    with pytest.raises(TooManyInvalid):
        next(iter(trainer(tmp_path / "again", reward)))


@pytest.mark.parametrize(
    "value",
    [lambda m: spread(m)[:, None], lambda m: spread(m).double(), lambda m: spread(m).tolist()],
)
def test_a_reward_of_the_wrong_shape_stops_the_run_as_a_bug(tmp_path, value):
    with pytest.raises(
        RewardBug, match=r'reward "custom" returned .*; expected a float32 tensor of shape \(4,\)'
    ):
        next(iter(trainer(tmp_path, lambda media, prompts, context: value(media))))
    assert not small.lines(tmp_path / "run")


def test_a_reward_of_the_wrong_shape_ends_the_command_with_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "flowrl.training.build.load_set",
        lambda _: load_set({"custom": lambda media, *_: spread(media)[:, None]}),
    )
    changes = {"data__eval": "null", "iterations": "1", "guard__check_rewards": "true"}
    words = small.words(tmp_path / "run", **changes)
    result = small.invoke("train", *words)
    sentences = [line for line in result.output.splitlines() if line.startswith("flowrl: ")]
    assert result.exit_code == 1 and len(sentences) == 2 and "Traceback" not in result.output
    assert "nothing was trained; start again" in sentences[1] and "--resume" not in sentences[1]
    assert (
        'reward "custom": returned a float32 tensor of shape (4, 1) on cpu; expected a float32'
        " tensor of shape (4,)" in sentences[0]
    )
    assert not small.lines(tmp_path / "run")
