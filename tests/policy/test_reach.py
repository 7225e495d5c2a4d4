"""How much of a prompt is read: said where an end changes nothing, and only there."""

import pytest
import tiny
import torch
from long import but
from zoo import cases

import flowrl
from flowrl.policy import load_policy
from flowrl.policy.replay.arguments import tensors_in
from flowrl.policy.replay.reach import Reader, _longest_part, cut

READ = {  # tokens that reach the denoisers by encoder, of tokenizers of one token a word
    "sd15": {"text_encoder": 10},  # 12 with the marks of begin and end
    "sdxl": {"text_encoder": 10, "text_encoder_2": 10},
    "sd3": {"text_encoder": 10, "text_encoder_2": 10, "text_encoder_3": 255},
    "flux": {"text_encoder": 10, "text_encoder_2": 11},
    "qwenimage": {"text_encoder": 24},  # what is encoded beyond is dropped by the pipeline
    "longcat_image": {"text_encoder": 24},  # cut by the pipeline, not by the tokenizer
    "wan21": {"text_encoder": 11},
    "lumina_next": {"text_encoder": 255},  # whatever its max_sequence_length says
    "flux_kontext": {"text_encoder": 10, "text_encoder_2": 11},  # a prompt at a time
}


def policy_of(name):
    case = cases()[name]
    example = case.conditions[0] if case.conditions else None
    return load_policy(case.make(), example=example, **case.call)


def encoded(policy, prompt, case):
    """What the denoisers are given of a prompt."""
    own = [case.conditions[0]] if case.conditions else None
    cond = policy.encode([prompt], own)
    return [t for group in cond.groups for t in tensors_in([group.kept, group.shared])]


def equal(ours, theirs):
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("name", but(list(READ), set(READ) - {"qwenimage", "longcat_image"}))
def test_what_an_encoder_is_said_to_read_is_what_changes_what_the_denoisers_are_given(name):
    policy, case = policy_of(name), cases()[name]
    assert {reader.name: reader.most for reader in policy.readers()} == READ[name]
    most = max(READ[name].values())
    words = ["red"] * most
    usual = encoded(policy, " ".join([*words, "blue"]), case)
    assert equal(encoded(policy, " ".join([*words, "green"]), case), usual)
    assert not equal(encoded(policy, " ".join([*words[:-1], "green"]), case), usual)


LONG = " ".join(["red"] * 30)


def test_prompts_whose_ends_are_not_read_are_counted_once_with_the_first(caplog):
    policy = policy_of("qwenimage")
    for _ in range(2):
        flowrl.generate(policy, [f"a circle {LONG}", "a square", f"a photo {LONG}"], steps=3)
    flowrl.evaluate(policy, [f"a circle {LONG}"], rewards=brightness, steps=3, images=1)
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith(
        "2 of 3 prompts are longer than the model reads (tokens: text_encoder 24)"
    )
    assert "the first, 'a circle red red" in said and "is read up to ' red red" in said
    flowrl.evaluate(policy, [f"the image {LONG}"], rewards=brightness, steps=3, images=1)
    assert caplog.records[1].getMessage().startswith("1 of 1 prompts")


@flowrl.reward(scale="mean brightness, in [0, 1]")
def brightness(media, prompts, context=None):
    return media.flatten(1).mean(1)


def test_nothing_is_said_where_another_encoder_reads_the_rest(caplog):
    policy = policy_of("sd3")
    policy.say_cut([LONG, None, "a circle"])
    assert not caplog.records
    policy.say_cut([" ".join(["red"] * 300)])
    assert "text_encoder_3 255" in caplog.text


def test_a_pipeline_that_refuses_an_overlong_prompt_is_said_and_stops_nothing(caplog):
    policy = policy_of("kandinsky5_i2i")
    policy.say_cut([" ".join(["red"] * 600)])
    assert "how much is read of a long prompt is not known: Kandinsky5I2IPipeline" in caplog.text
    assert policy.readers() == []


def test_trained_encoders_cut_as_well(caplog):
    policy = load_policy(
        tiny.pipeline("sd15"), parts=("text_encoder",), lora=LORA, **tiny.CALLS["sd15"]
    )
    policy.say_cut([LONG])
    assert "text_encoder 10" in caplog.text


LORA = {"rank": 2, "alpha": 2.0, "targets": None, "init": "gaussian"}


class Words:
    """A tokenizer of words."""

    def __call__(self, texts, add_special_tokens=True):
        return {"input_ids": [text.split() for text in texts]}

    def decode(self, ids):
        return " ".join(ids)


def test_the_sentence_is_about_prompts_that_every_encoder_cuts():
    short, long = (Reader(f"text_encoder_{k}", Words(), k, 9) for k in (2, 4))
    endless = Reader("text_encoder", Words(), None, 9)
    texts = ["a b", "a b c", "a b c d e", "x y z u v"]
    assert cut([], texts) is None and cut([short, endless], texts) is None
    assert cut([short, long], texts[:2]) is None
    assert cut([short], texts).startswith("3 of 4 prompts")
    said = cut([short, long], texts)
    assert said.startswith(
        "2 of 4 prompts are longer than the model reads (tokens: text_encoder_2 2"
    )
    assert "'a b c d e', is read up to 'a b c d'" in said
    assert str(endless) == "text_encoder 9 or more"


@pytest.mark.parametrize(
    ("row", "found"),
    [([], (0, 0)), ([5, 5], (0, 0)), ([1, 5, 1, 2, 1, 5], (3, 2)), ([1, 1], (2, 0))],
)
def test_the_longest_part_of_a_row(row, found):
    assert _longest_part(row, {1, 2}) == found
