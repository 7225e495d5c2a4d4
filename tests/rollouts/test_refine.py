"""A judge rewrites prompts: what it says is tried, and kept only where the judge itself, asked
about the first prompt, scores it higher."""

import pytest
import small
import torch
from judge_server import serving, words
from judges import TEXTS
from PIL import Image
from torch import nn

from flowrl import generate
from flowrl.policy.module import ModulePolicy
from flowrl.rewards import RewardBug, load_set
from flowrl.rewards.core.reward import Reward
from flowrl.rollouts.inference.candidates import SampleRequest
from flowrl.rollouts.inference.refine import Refine, refined

CRITIQUE = """1. Text Faithfulness:\n## Score: {tf}
2. Physical and Visual Quality:\n## Score: 2.5
# Summary: fine
# User Request Refinement:\n## Refined Request: two blue squares"""


class Shift(nn.Module):
    """v = -c: a sample is its noise plus c, the length of its prompt."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x, t, cond):
        return -self.scale * cond.expand_as(x)


def policy():
    return ModulePolicy(
        Shift(), (1,), cond=lambda texts: torch.tensor([[100.0 * len(text)] for text in texts])
    )


class Judge(Reward):
    """Scores the length of the prompt that a sample shows; rewrites prompts by a table."""

    name, takes, scale = "judge", "any", "length"

    def __init__(self, rewritten, scores=float):
        super().__init__()
        self.rewritten, self.scores, self.asked, self.scored = rewritten, scores, [], []

    def __call__(self, media, prompts, context=None):
        self.scored += prompts
        return torch.tensor([self.scores(length(x)) for x in media])

    def refine(self, media, prompts, context=None):
        self.asked.append([(text, length(x)) for text, x in zip(prompts, media, strict=True)])
        return [
            self.rewritten.get((text, length(x))) for text, x in zip(prompts, media, strict=True)
        ]


def length(sample):
    """Of the prompt that a sample was made of."""
    return round(float(sample[0]) / 100)


def made(judge, texts, how=None, model=None, **options):
    own = {"steps": 3, "guidance": "none", **options}
    own |= {"seeds": torch.full((len(texts),), 2), "places": torch.arange(len(texts))}
    asked = SampleRequest(policy=model or policy(), texts=texts, **own)
    with torch.no_grad():
        return refined(asked, load_set(judge), how or Refine())


def test_a_better_prompt_is_taken_a_worse_and_none_are_not():
    """Of three pictures one is made again from a longer prompt, one from a shorter, one not."""
    judge = Judge({("aaa", 3): "aaaaa", ("bbb", 3): "b"})
    model = policy()
    out = made(judge, ["aaa", "bbb", "ccc"], model=model)
    assert out.texts == ["aaaaa", "bbb", "ccc"]
    assert out.score.tolist() == [5, 3, 3] and out.first.tolist() == [3, 3, 3]
    assert [length(x) for x in out.media] == [5, 3, 3]
    assert model.calls == out.calls == (3 + 2) * 3
    assert set(judge.scored) == {"aaa", "bbb", "ccc"}  # never against the new prompt
    said = "refine improved 1 pictures of 3, mean score 3 before and 5 after; of the others the"
    assert out.said().startswith(said)


def test_a_picture_is_made_again_from_its_own_noise():
    texts = ["aaa", "bbb"]
    first = generate(policy(), texts, steps=3, guidance="none", seed=2)
    out = made(Judge({("bbb", 3): "bbbbb"}), texts)
    assert torch.equal(out.media[0], first[0])
    torch.testing.assert_close(out.media[1] - 500, first[1] - 300, rtol=0, atol=1e-3)


def test_rounds_go_on_from_the_best_picture_and_end_where_one_does_not_help():
    """a: 1 -> 2 -> 3, and nothing more; b: 1 -> 2, then worse. Each is asked about its first
    prompt."""
    table = {("a", 1): "aa", ("a", 2): "aaa", ("b", 1): "bb", ("b", 2): "b"}
    judge = Judge(table)
    out = made(judge, ["a", "b", "c"], Refine(rounds=9))
    assert out.texts == ["aaa", "bb", "c"] and out.score.tolist() == [3, 2, 1]
    assert judge.asked == [
        [("a", 1), ("b", 1), ("c", 1)],
        [("a", 2), ("b", 2)],
        [("a", 3)],
    ]
    once = made(Judge(table), ["a", "b", "c"])
    assert once.texts == ["aa", "bb", "c"]


def test_a_picture_that_is_good_enough_is_left():
    judge = Judge({("aa", 2): "aaaa", ("aaaa", 4): "aaaaaa"})
    out = made(judge, ["aa", "aaaa"], Refine(rounds=5, enough=4))
    assert out.texts == ["aaaa", "aaaa"] and judge.asked == [[("aa", 2)]]
    alone = made(judge, ["aaaa"], Refine(enough=4))
    assert alone.said() == "refine: all 1 first pictures were good enough"


def test_a_judge_that_never_helps_is_reported_in_a_sentence():
    table = {("aaa", 3): "a", ("bb", 2): "b" * 11, ("c", 1): " ", ("d", 1): "d"}
    out = made(Judge(table), ["aaa", "bb", "c", "d"], Refine(rounds=3, longest=10))
    assert torch.equal(out.score, out.first) and out.texts == ["aaa", "bb", "c", "d"]
    assert out.said() == (
        "refine improved no picture of 4: the new picture scored no higher (1), the new prompt was"
        " too long (1), the judge gave no other prompt (2); the first ones are kept"
    )


def test_a_first_picture_without_a_score_gives_way_to_any_that_has_one():
    judge = Judge({("a", 1): "aa"}, scores=lambda n: float("nan") if n == 1 else float(n))
    out = made(judge, ["a"])
    assert out.texts == ["aa"] and out.first[0] == -torch.inf and "improved 1" in out.said()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"rounds": 0}, "refine rounds=0 should be a whole number from 1"),
        ({"longest": 1.5}, "refine longest=1.5 should be a whole number"),
        ({"enough": "much"}, "refine enough='much' should be a number"),
    ],
)
def test_wrong_settings_are_refused(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        Refine(**options)


def test_one_judge_that_rewrites_is_needed():
    def plain(media, prompts, context):
        return media[:, 0]

    with pytest.raises(ValueError, match="needs one judge that rewrites prompts.*none of plain"):
        made(plain, ["a"])
    with pytest.raises(ValueError, match="several of one, two can"):
        made({"one": {"reward": Judge({})}, "two": {"reward": Judge({})}}, ["a"])
    with pytest.raises(ValueError, match="refine needs a reward .* reward='rationalrewards'"):
        generate(policy(), ["a"], steps=1, guidance="none", refine=Refine())
    with pytest.raises(RewardBug, match="expected a list of a text or None for each of 1 samples"):
        judge = Judge({})
        judge.refine = lambda media, prompts, context: "a better prompt"
        made(judge, ["a"])


def test_the_command_refines_with_rationalrewards(tmp_path):
    """The first picture of a red circle is faithful at 1, the second at 4: (1.75 - 1) / 3 = 0.25
    and (3.25 - 1) / 3 = 0.75 with a quality of 2.5."""
    for name in ("critique", "system"):
        (tmp_path / name).write_text(TEXTS[name])

    def script(body, number):
        assert "Request a red circle" in words(body)
        return CRITIQUE.format(tf=1 if number == 0 else 4)

    how = ["--steps", 4, "--guidance", "none", "--seed", 3]
    with serving(script) as server:
        name = "rationalrewards"
        own = {"base_url": server.url, "template": tmp_path / "critique"}
        own |= {"system": tmp_path / "system", "own_template": "true"}
        judge = [word for k, v in own.items() for word in ("--reward", f"{name}.{k}={v}")]
        result = small.invoke(
            *["generate", "shapes-sd3", "a red circle", *how, "--refine", 2],
            *[*judge, "--enough", 0.7, "-o", tmp_path / "a.png"],
        )
    assert result.exit_code == 0, result.output
    assert "improved 1 pictures of 1, mean score 0.25 before and 0.75 after" in " ".join(
        result.output.split()
    )
    assert len(server.requests) == 2  # each critique is asked for once, and 0.75 is enough
    plain = ["generate", "shapes-sd3", "two blue squares", *how, "-o", tmp_path / "b.png"]
    assert small.invoke(*plain).exit_code == 0
    pictures = [Image.open(tmp_path / f"{stem}.png").tobytes() for stem in "ab"]
    assert pictures[0] == pictures[1]
