"""The ocr reward: Flow-GRPO's formula by hand, real text read from drawn pictures, what should be
read, and engines that fail."""

import math
import sys
import types

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageFont

from flowrl import rewards
from flowrl.data.media import from_pil
from flowrl.rewards import ocr
from flowrl.types import MediaContext

pytest.importorskip("rapidocr_onnxruntime")


def drawn(text, side=128, size=20, color="black", paper="white"):
    """`text` in PIL's own font on plain paper -> (1, 3, side, side)."""
    picture = Image.new("RGB", (side, side), paper)
    ImageDraw.Draw(picture).text(
        (side / 2, side / 2), text, fill=color, font=ImageFont.load_default(size=size), anchor="mm"
    )
    return from_pil(picture)


def said(text):
    return f'A sign that says "{text}"'


@pytest.fixture(scope="module")
def reward():
    return rewards.load("ocr", threads=2)


def reading(monkeypatch, texts, **settings):
    """The reward with an engine that reads `texts` one after another, whatever it is shown."""
    queue = list(texts)

    def engine(picture):
        text = queue.pop(0)
        if isinstance(text, Exception):
            raise text
        return text

    monkeypatch.setattr(ocr, "_rapidocr", lambda: engine)
    return rewards.load("ocr", threads=1, **settings)


def blank(count=1, *shape):
    return torch.zeros(count, *shape, 3, 8, 8)


# --- the formula


@pytest.mark.parametrize(
    ("read", "target", "value"),
    [
        ("HELLO", "hello", 1),
        ("he llo", "hello", 1),  # spaces do not count
        ("say hello there", "hello", 1),  # contained: other text costs nothing
        ("hallo", "hello", 0.8),  # one of five substituted
        ("hell", "hello", 0.8),  # one missing
        ("helllo", "hello", 0.8),  # one too many, and not contained
        ("hel", "hello", 0.6),
        ("", "hello", 0),
        ("a long text about nothing of it", "hello", 0),  # capped: never below 0
        ("hell0", "hello", 0.8),
        ("2026", "2025", 0.75),
    ],
)
def test_the_reward_is_one_minus_the_capped_edit_distance_over_the_length(read, target, value):
    assert ocr.score(read, target) == pytest.approx(value)


def test_edit_distance_by_hand_and_its_symmetry():
    assert (
        ocr.levenshtein("kitten", "sitting") == 3
        and ocr.levenshtein("", "abc") == 3
        and ocr.levenshtein("abc", "abc") == 0
    )
    assert ocr.levenshtein("flaw", "lawn") == ocr.levenshtein("lawn", "flaw") == 2
    assert ocr.levenshtein("saturday", "sunday") == 3


# --- reading


def test_drawn_text_is_read_and_another_text_is_not(reward):
    media = torch.cat([drawn("HELLO 2026"), drawn("HELLO 2026"), drawn("WORLD")])
    prompts = [said("Hello 2026"), said("Goodbye"), said("world")]
    same, other, world = reward(media, prompts).tolist()
    assert (
        same == world == 1
        and other == pytest.approx(ocr.score("hello2026", "goodbye"))
        and other < 0.3
    )


def test_coloured_letters_are_read_and_blank_paper_and_noise_read_as_nothing(reward):
    torch.manual_seed(0)
    media = torch.cat(
        [
            drawn("BAKERY", color="navy", paper="gold"),
            torch.ones(1, 3, 128, 128),
            torch.rand(1, 3, 128, 128),
        ]
    )
    assert reward(media, [said("Bakery")] * 3).tolist() == [1, 0, 0]


def test_one_wrong_letter_costs_its_share(reward):
    assert reward(drawn("GARDEN"), [said("Garten")]).tolist() == pytest.approx([5 / 6])


def test_scores_repeat_and_do_not_depend_on_threads_or_batch_mates(reward):
    media = torch.cat([drawn("OPEN"), drawn("CLOSED", size=14), drawn("0PEN 24 H", size=16)])
    prompts = [said("open late")] * 3
    whole = reward(media, prompts)
    assert torch.equal(whole, reward(media, prompts))
    alone = rewards.load("ocr", threads=1)
    assert torch.equal(whole, torch.cat([alone(media[i : i + 1], prompts[:1]) for i in range(3)]))


def test_engines_are_given_blue_green_red_bytes(monkeypatch):
    seen = []
    monkeypatch.setattr(ocr, "_rapidocr", lambda: lambda picture: seen.append(picture) or "")
    media = torch.tensor([1.0, 0.5, 0.2]).view(1, 3, 1, 1).expand(1, 3, 4, 6)
    rewards.load("ocr", threads=1)(media, [said("a")])
    assert (
        seen[0].shape == (4, 6, 3)
        and seen[0].dtype == np.uint8
        and seen[0][0, 0].tolist() == [51, 128, 255]
    )


def test_a_video_scores_the_mean_over_its_frames_or_every_nth(monkeypatch):
    texts = ["hello", "hell", "", "hello"]
    assert reading(monkeypatch, texts)(blank(1, 4), [said("hello")]).tolist() == pytest.approx(
        [(1 + 0.8 + 0 + 1) / 4]
    )
    assert reading(monkeypatch, texts, every=2)(
        blank(1, 4), [said("hello")]
    ).tolist() == pytest.approx([(1 + 0.8) / 2])
    both = reading(monkeypatch, texts)(blank(2, 2), [said("hello"), said("hell")])
    assert both.tolist() == pytest.approx([0.9, 0.5])


# --- what should be read


def test_the_target_is_between_the_first_double_quotes(monkeypatch):
    prompt = 'A sign that says "One" above a sign that says "Two"'
    assert reading(monkeypatch, ["one", "two"])(blank(2), [prompt, prompt]).tolist() == [1, 0]


def test_meta_text_overrides_the_prompt(monkeypatch):
    context = MediaContext(meta=[{"text": "Bread"}, {}])
    assert reading(monkeypatch, ["bread", "bread"])(
        blank(2), ["A bakery", said("Bread")], context
    ).tolist() == [1, 1]


def test_the_whole_prompt_may_be_the_target(monkeypatch):
    assert reading(monkeypatch, ["happy day"], target="prompt")(
        blank(), ["Happy Day"]
    ).tolist() == [1]


@pytest.mark.parametrize(
    ("prompt", "meta", "problem"),
    [
        ("A bakery sign", {}, "the prompt 'A bakery sign' has no double quotes"),
        ('A 15" monitor', {}, "a double quote that is never closed"),
        ('A sign that says ""', {}, "is '';"),
        ('A sign that says "  "', {}, "is '  '; give it at least one character"),
        (said("Bread"), {"text": ""}, "is '';"),
        ("A bakery", {"text": 7}, "is 7;"),
    ],
)
def test_a_prompt_that_asks_for_no_text_is_refused_by_its_name(reward, prompt, meta, problem):
    with pytest.raises(ValueError, match=problem):
        reward(blank(), [prompt], MediaContext(meta=[meta]))
    assert problem in reward.complaint(meta | {"prompt": prompt})


def test_the_prompts_of_the_generator_can_be_judged(reward):
    from flowrl.data.ocr import eval_prompts

    for prompt in eval_prompts(50):
        assert reward.complaint(prompt) is None
        assert (
            reward.target(prompt["prompt"], prompt)
            == reward.target(prompt["prompt"], {})
            == ocr.plain(prompt["text"])
        )


# --- engines


def test_an_engine_that_fails_is_nan_and_never_zero(monkeypatch, caplog):
    one = reading(monkeypatch, ["hello", RuntimeError("no page"), "", "hello"])
    values = one(blank(4), [said("hello")] * 4).tolist()
    assert values[0] == values[3] == 1 and math.isnan(values[1]) and values[2] == 0
    assert (
        "ocr: rapidocr failed on a picture of shape (8, 8, 3): RuntimeError: no page" in caplog.text
    )


def test_a_frame_that_fails_makes_its_video_nan(monkeypatch):
    values = reading(monkeypatch, ["a", RuntimeError("no"), "b", "b"])(
        blank(2, 2), [said("a"), said("b")]
    ).tolist()
    assert math.isnan(values[0]) and values[1] == 1


def fake_paddle(monkeypatch, **methods):
    made = []

    class PaddleOCR:
        def __init__(self, **settings):
            made.append(settings)

    for name, method in methods.items():
        setattr(PaddleOCR, name, method)
    module = types.ModuleType("paddleocr")
    module.PaddleOCR = PaddleOCR
    monkeypatch.setitem(sys.modules, "paddleocr", module)
    return made


def test_paddle_2_and_3_are_read_in_their_own_forms(monkeypatch):
    def v2(self, picture, cls):
        return [None] if picture.sum() == 0 else [[[[], ("Hel lo", 0.9)], [[], ("xx", 0.0)]]]

    made = fake_paddle(monkeypatch, ocr=v2)
    media = torch.cat([torch.ones(1, 3, 8, 8), blank()])
    assert rewards.load("ocr", engine="paddle", threads=1)(media, [said("hello")] * 2).tolist() == [
        1,
        0,
    ]
    assert made[0]["lang"] == "en" and made[0]["use_angle_cls"] is False

    fake_paddle(
        monkeypatch,
        predict=lambda self, picture: [
            {"rec_texts": ["Hel", "lo", "xx"], "rec_scores": [0.9, 0.8, 0.0]}
        ],
    )
    assert rewards.load("ocr", engine="paddle", threads=1)(blank(), [said("hello")]).tolist() == [1]


def test_an_engine_that_is_not_installed_is_said_at_load(monkeypatch):
    monkeypatch.setitem(sys.modules, "paddleocr", None)
    with pytest.raises(
        ValueError,
        match='reward "ocr" needs a package that cannot be imported.*paddleocr.*; .*pip install',
    ):
        rewards.load("ocr", engine="paddle")


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"engine": "tesseract"}, "'rapidocr' or 'paddle'"),
        ({"threads": 0}, "threads=0"),
        ({"target": "text"}, "'quoted' or 'prompt'"),
    ],
)
def test_bad_settings_are_one_sentence(settings, problem):
    with pytest.raises(ValueError, match=problem):
        rewards.load("ocr", **settings)
