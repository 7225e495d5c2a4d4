"""Text stays text on the command line, whatever YAML or a grammar would make of it."""

from pathlib import Path
from typing import Annotated, Literal

import pydantic
import pytest

from flowrl.cli.common import call_arguments
from flowrl.config.load import dump, load_config, read_config
from flowrl.policy.load import call_options
from flowrl.rewards import parse_words
from flowrl.runtime.paths import expanded
from flowrl.runtime.typed_text import kinds_at, kinds_of_argument

TEXTS = ["no", "on", "off", "1980", "1e-4", "1e4", "~", "# noise", "12:30", "0x10", ".5", "1_000"]
TEXTS += [
    "true",
    "a, b",
    "don't",
    "yes: no",
    "{a",
    "[a] b",
    "[1]",
    "*bold*",
    "~/runs",
    "2026-01-01",
]
BASE = ["reward=jpeg", "algorithm=nft"]


def settled(*words):
    return load_config(None, [*BASE, *words])


@pytest.mark.parametrize("text", [*TEXTS, "null", "{a: 1}"])
def test_an_argument_of_the_call_that_is_a_text_is_the_text_and_is_read_again(text, tmp_path):
    cfg = settled(f"model.pipeline.negative_prompt={text}", f"model.pipeline.system_prompt={text}")
    own = cfg.model.pipeline
    assert own["negative_prompt"] == own["system_prompt"] == text
    path = tmp_path / "config.yaml"
    path.write_text(dump(cfg))
    assert read_config(path) == load_config(path) == cfg
    given = call_arguments([f"negative_prompt={text}", f"prompt_2={text}"])
    assert given == {"negative_prompt": text, "prompt_2": text}


@pytest.mark.parametrize("text", TEXTS)
def test_settings_that_are_texts_are_the_text(text):
    cfg = settled(f"output={text}", f"train.init_lora={text}", f"data.columns.prompt={text}")
    assert cfg.output == expanded(text) and cfg.data.columns["prompt"] == text
    cfg = settled(f"reward.vlm_yesno.question={text} {{prompt}}", "reward.vlm_yesno.weight=0")
    assert cfg.reward["vlm_yesno"]["question"] == f"{text} {{prompt}}"


@pytest.mark.parametrize("text", TEXTS)
def test_settings_of_rewards_in_words_that_are_texts_are_the_text(text, tmp_path):
    file = tmp_path / "own.py"
    file.write_text(
        "import flowrl\n\n\n@flowrl.reward\n"
        "def judge(media, prompts, context=None, *, ask: str | None = None, tone='', floor=0.0):\n"
        "    ...\n"
    )
    words = [f"{file}:judge.ask={text}", f"{file}:judge.tone={text}", f"{file}:judge.floor=1e-4"]
    found = parse_words(words)["judge"]
    assert found["ask"] == found["tone"] == text and found["floor"] == 1e-4
    cfg = load_config(
        None, ["algorithm=nft", f"reward.x.tone={text}", f"reward.x.name={file}:judge"]
    )
    assert cfg.reward["x"]["tone"] == text


def test_what_is_no_text_is_read_as_before():
    own = settled(
        "model.pipeline.height=512",
        "model.pipeline.image_guidance_scale=1.5",
        "model.pipeline.use_system_prompt=true",
        "model.pipeline.image=[a.png, b.png]",
        "output=null",
        "train.init_lora='null'",
        "model.hints={a: 1}",
        "train.precision=no",
    )
    call = own.model.pipeline
    assert call["height"] == 512 and call["image_guidance_scale"] == 1.5
    assert call["use_system_prompt"] is True and call["image"] == ["a.png", "b.png"]
    assert own.output is None and own.train.init_lora == "null"
    assert own.model.hints == {"a": 1} and own.train.precision == "no"
    with pytest.raises(ValueError, match="model.pipeline.height=.a.* is not key=value"):
        settled("model.pipeline.height=[a")
    with pytest.raises(ValueError, match="--pipeline height=.a is not key=value"):
        call_arguments(["height=[a"])


@pytest.mark.parametrize("value", [False, 1980, 1e-4])
def test_a_number_in_the_place_of_a_text_is_refused(value):
    with pytest.raises(ValueError, match=f"negative_prompt={value} is a .* put it in quotes"):
        call_options({"negative_prompt": value})


@pytest.mark.parametrize(
    ("name", "is_text"),
    [
        *((name, True) for name in ("prompt", "negative_prompt_3", "system_prompt", "lyrics")),
        *((name, False) for name in ("prompt_embeds", "num_images_per_prompt", "use_en_prompt")),
        *((name, False) for name in ("prompt_strength", "max_text_length", "text_images")),
    ],
)
def test_which_arguments_are_texts(name, is_text):
    assert (kinds_of_argument(name) == {str}) == is_text


def test_types_are_found_through_unions_mappings_and_records():
    class Inner(pydantic.BaseModel):
        place: Path | None = None

    class Outer(pydantic.BaseModel):
        inner: Inner = Inner()
        count: Annotated[Literal[2, "all"], "of tags"] | None = 2
        tags: dict[str, str] = {}

    assert kinds_at(Outer, ["inner", "place"]) == {Path, type(None)}
    assert kinds_at(Outer, ["tags", "any"]) == {str} and kinds_at(Outer, ["count"]) == {
        int,
        str,
        type(None),
    }
    assert kinds_at(Outer, ["inner", "no"]) == frozenset()
