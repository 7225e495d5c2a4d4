"""A value that is empty, as of a shell variable that is unset, is refused, never taken for none."""

import pytest
import small

import flowrl
from flowrl.cli.common import named_values
from flowrl.config.overrides import parse_override
from flowrl.rewards import parse_words
from flowrl.rewards.core.reward import load
from flowrl.runtime.typed_text import kinds_of_argument

WORDS = [
    "output=",
    "data.offline= ",
    "+train.init_lora=",
    "model=",
    "reward.clip.prefix=",
    "~reward=",
]


@pytest.mark.parametrize("word", WORDS)
def test_a_word_without_a_value_is_refused_with_what_to_write(word):
    key = word.strip("+~= ")
    with pytest.raises(
        ValueError, match=rf'has no value; .* or {key}=null for none, or {key}=\'""\''
    ):
        parse_override(word)


def test_an_empty_text_is_written_in_quotes():
    assert parse_override('reward.clip.prefix=""').value() == ""
    assert parse_override("output=null").value(frozenset({str, type(None)})) is None
    assert parse_override("~reward").value() is None
    assert load_prefix('""') == ""


def load_prefix(value):
    return flowrl.load_config(overrides=["reward=clip", f"reward.clip.prefix={value}"]).reward[
        "clip"
    ]["prefix"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("output", ""),
        ("output", "  "),
        ("train.init_lora", ""),
        ("data.eval", ""),
        ("data.offline", ""),
        ("model.prompt_cache", ""),
        ("data.latent_cache", ""),
        ("watch.held_out", " "),
    ],
)
def test_an_empty_text_of_a_file_or_a_script_names_nothing(tmp_path, key, value):
    said = f"{key}: an empty text names nothing; give a value, or null for none"
    with pytest.raises(ValueError, match=said):
        flowrl.load_config({key: value})
    section, _, name = key.rpartition(".")
    inner = f"{name}: {value!r}"
    (tmp_path / "mine.yaml").write_text(f"{section}: {{{inner}}}" if section else inner)
    with pytest.raises(ValueError, match=said):
        flowrl.load_config(tmp_path / "mine.yaml")


@pytest.mark.parametrize("setting", ["folder", "log", "question", "api_key_env"])
def test_so_it_is_in_the_settings_of_rewards(setting):
    with pytest.raises(ValueError, match=f"{setting}='': .*an empty text names nothing"):
        load("vlm_logit", url="http://127.0.0.1:1", **{setting: ""})


@pytest.mark.parametrize("word", ["jpeg=", "clip.weights=", "own.py:red.floor="])
def test_so_it_is_in_words_of_rewards(word):
    with pytest.raises(ValueError, match=r"should be NAME, NAME=WEIGHT"):
        parse_words([word])


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["train", "--resume", ""], "--resume"),
        (["train", ""], "overrides"),
        (["generate", "", "a"], "model"),
        (["generate", "shapes-sd3", "a", "-o", ""], "--output"),
        (["generate", "shapes-sd3", "a", "--lora="], "--lora"),
        (["score", "a.png", "", "--reward", "jpeg"], "media"),
        (["score", "a.png", "--reward", "jpeg", "--reward", ""], "--reward"),
        (["evaluate", "run", "--suite", ""], "--suite"),
        (["report", ""], "runs"),
        (["check", ""], "model"),
        (["serve", "jpeg", "--token-env", ""], "--token-env"),
    ],
)
def test_an_empty_option_or_argument_is_named(tmp_path, monkeypatch, words, name):
    monkeypatch.chdir(tmp_path)
    result = small.invoke(*words)
    said = f"flowrl: {name} is empty; was a shell variable unset? give it, or leave it out"
    assert result.exit_code == 2 and result.output.strip() == said
    assert not list(tmp_path.iterdir())


def test_an_empty_value_of_a_call_is_a_text_and_not_none():
    words = ["negative_prompt=", "height=64", "eta=null"]
    given = named_values("--pipeline", words, "height=512", kinds_of_argument)
    assert given == {"negative_prompt": "", "height": 64, "eta": None}


@pytest.mark.long
def test_a_prompt_may_be_empty_and_numbers_may_not(tmp_path):
    made = small.invoke("generate", "shapes-sd3", "", "--steps", "1", "-o", tmp_path / "a.png")
    assert made.exit_code == 0 and (tmp_path / "a.png").exists(), made.output
    refused = small.invoke("generate", "shapes-sd3", "a", "--pipeline", "height=")
    assert refused.exit_code == 2 and "height='' should be a whole number" in refused.output
    how = ("--calls", "4", "--search", "zero_order", "--search", "radius=", "--reward", "jpeg")
    refused = small.invoke("generate", "shapes-sd3", "a", *how)
    assert refused.exit_code == 2 and "radius" in refused.output
