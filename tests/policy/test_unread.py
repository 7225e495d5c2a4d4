"""What is given and never read is said, in Python and by every command."""

import pytest
import small
import torch
from torch import nn

import flowrl
from flowrl.data import media
from flowrl.policy import load_policy
from flowrl.policy.generator import GeneratorPolicy

NEGATIVE = "negative_prompt has no effect: with guidance"


@pytest.fixture(scope="module")
def shapes():
    return load_policy("shapes-sd3", height=32, width=32, negative_prompt="grey")


def test_a_negative_prompt_is_read_with_guidance_alone(shapes, caplog):
    assert shapes.unread(["pipeline"]) == shapes.unread(["none", 2.0]) == []
    assert shapes.unread(["none", 1]) == [
        f"{NEGATIVE} none and 1 the network is asked for the prompt alone; set a guidance above 1"
    ]
    flowrl.generate(shapes, "a red circle", steps=1, guidance="none")
    assert NEGATIVE in caplog.text
    caplog.clear()
    flowrl.generate(shapes, "a red circle", steps=1, guidance=2.0)
    assert "no effect" not in caplog.text


def test_negative_prompts_of_records_are_said_too(shapes, monkeypatch, caplog):
    monkeypatch.setattr(shapes.prober.runner, "given", frozenset())
    assert shapes.unread(["none"]) == [] and shapes.unread(["none"], ["prompt", "negative_prompt"])
    record = {"prompt": "a red circle", "negative_prompt": "grey"}
    flowrl.generate(shapes, [record], steps=1, guidance="none")
    assert NEGATIVE in caplog.text


def test_evaluations_say_it_too(shapes, caplog):
    how = {"images": 1, "steps": 1, "rewards": {"jpeg": 1.0}}
    flowrl.evaluate(shapes, ["a red circle"], **how, guidance="none")
    assert caplog.text.count(NEGATIVE) == 1
    caplog.clear()
    flowrl.evaluate(shapes, ["a red circle"], **how, guidance=2.0)
    assert "no effect" not in caplog.text


def test_an_argument_that_the_call_never_loads_is_named(shapes, monkeypatch):
    def call(self, prompt, height, width, negative_prompt="", fps=16):
        def inner():
            return width

        return prompt, negative_prompt, inner

    monkeypatch.setattr(shapes.prober.runner, "undecorated", call)
    said = "height has no effect: the call of StableDiffusion3Pipeline never reads it"
    found = shapes.unread(["pipeline"])
    assert said in found and not any(text.startswith(("width", "neg")) for text in found)


def test_a_generator_reads_no_steps(caplog):
    policy = GeneratorPolicy(lambda prompts, noise: noise.expand(-1, 3, 4, 4), (1, 1, 1))
    flowrl.generate(policy, "a", steps=4)
    assert "steps, guidance and solver have no effect" in caplog.text


def test_hints_of_a_plain_module_are_refused():
    with pytest.raises(ValueError, match="needs shape=.*not hints"):
        load_policy(nn.Linear(2, 2), shape=(2,), hints={"denoisers": ["net"]})


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["generate", "shapes-sd3", "a", "--reward", "jpeg"], "--reward chooses among samples"),
        (
            ["generate", "shapes-sd3", "a", "--guidance", 2, "--pipeline", "guidance_scale=3"],
            "--guidance 2 takes the place of --pipeline guidance_scale",
        ),
        (["check", "--reward", "jpeg", "--pipeline", "height=8"], "are for a model"),
        (["check", "--reward", "jpeg", "--hints", "a.py:H"], "are for a model"),
        (["check", "--reward", "jpeg", "--prompts", "a.txt"], "give --media too"),
    ],
)
def test_options_that_nothing_would_read_are_refused(words, said):
    result = small.invoke(*words)
    assert result.exit_code == 2 and said in " ".join(result.stderr.split())


def test_frames_of_pictures_are_said_to_have_no_effect(tmp_path):
    media.save(torch.rand(3, 8, 8), tmp_path / "a.png")
    words = ["score", tmp_path, "--prompt", "a", "--reward", "jpeg"]
    result = small.invoke(*words, "--frames", 4)
    assert result.exit_code == 0 and "--frames 4 has no effect" in result.stderr
    assert "no effect" not in small.invoke(*words).stderr
    media.save(torch.rand(3, 3, 8, 8), tmp_path / "b.gif")
    assert "no effect" not in small.invoke(*words, "--frames", 2).stderr
