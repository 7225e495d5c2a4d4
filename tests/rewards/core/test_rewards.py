"""Rewards: the contract, failed samples, bad settings, and the values of jpeg."""

import io
import math
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from flowrl import rewards
from flowrl.runtime.registry import choices
from flowrl.types import MediaContext, Rewards

PROMPTS = ["a cat", "a dog", "two red circles", "a blue square"]


@pytest.fixture
def media():
    return torch.rand(4, 3, 16, 16)


def brightness(media, prompts, context=None):
    return media.mean((1, 2, 3))


# --- weighted sums


def test_total_is_the_weighted_sum_and_raw_scores_are_kept(media):
    corner = {"reward": lambda m, p, c: m[:, 0, 0, 0], "weight": -1}
    out = rewards.score(media, PROMPTS, {"a": {"reward": brightness, "weight": 2.0}, "b": corner})
    a, b = media.mean((1, 2, 3)), media[:, 0, 0, 0]
    assert torch.equal(out.raw["a"], a) and torch.equal(out.raw["b"], b)
    assert torch.allclose(out.total, 2 * a - b) and out.weights == {"a": 2.0, "b": -1.0}
    assert out.total.dtype == torch.float32 and bool(out.valid.all()) and out.errors == []


def test_weight_zero_is_measured_but_neither_counts_nor_invalidates(media):
    broken = {"reward": lambda m, p, c: torch.full((len(p),), math.nan), "weight": 0}
    out = rewards.score(media, PROMPTS, {"a": brightness, "watched": broken})
    assert torch.equal(out.total, out.raw["a"]) and bool(out.valid.all())
    assert bool(out.raw["watched"].isnan().all()) and out.weights["watched"] == 0.0


def test_a_label_may_differ_from_the_name_of_the_reward(media):
    spec = {"small": {"name": "jpeg", "scale": "ddpo"}, "jpeg": 0.0}
    out = rewards.score(media, PROMPTS, spec)
    assert torch.allclose(out.raw["small"], 500 * out.raw["jpeg"]) and torch.equal(
        out.total, out.raw["small"]
    )


def test_chunks_scored_apart_and_joined_equal_one_chunk(media):
    chosen = rewards.load_set({"jpeg": 1.0, "a": brightness})
    whole = rewards.score(media, PROMPTS, chosen)
    halves = rewards.concat(
        [rewards.score(media[i : i + 2], PROMPTS[i : i + 2], chosen) for i in (0, 2)]
    )
    assert torch.equal(whole.total, halves.total) and torch.equal(
        whole.raw["jpeg"], halves.raw["jpeg"]
    )


def test_scoring_gives_no_gradient_even_to_media_that_ask_for_one(media):
    weight = torch.ones((), requires_grad=True)
    out = rewards.score(
        media.requires_grad_(), PROMPTS, {"a": lambda m, p, c: weight * m.mean((1, 2, 3))}
    )
    assert not out.total.requires_grad and not out.raw["a"].requires_grad


# --- failed samples


def test_nan_and_inf_mark_failed_samples(media):
    def some(m, p, c):
        return torch.tensor([1.0, math.nan, math.inf, 4.0])

    out = rewards.score(media, PROMPTS, {"some": some, "a": brightness})
    assert out.valid.tolist() == [True, False, False, True]
    assert out.total.isnan().tolist() == [False, True, True, False] and not bool(
        out.raw["a"].isnan().any()
    )
    assert out.errors == ["some: NaN or inf for 2 of 4 samples"]


def test_an_exception_is_retried_sample_by_sample_and_only_the_culprit_fails(media):
    calls = []

    def picky(m, p, c):
        calls.append(len(p))
        if "a dog" in p:
            raise OSError("no dogs")
        return m.mean((1, 2, 3))

    out = rewards.score(media, PROMPTS, {"picky": picky})
    assert calls == [4, 1, 1, 1, 1] and out.valid.tolist() == [True, False, True, True]
    assert torch.allclose(out.total[out.valid], media.mean((1, 2, 3))[out.valid])
    assert (
        len(out.errors) == 1
        and out.errors[0].startswith("picky: OSError: no dogs")
        and "1 failed" in out.errors[0]
    )


def test_a_reward_that_compares_a_group_is_retried_group_by_group(media):
    def rank(m, p, c):
        if len(p) == 4:
            raise MemoryError("too many")
        assert len(set(c.group.tolist())) == 1
        return m.mean((1, 2, 3)).argsort().argsort().float() / len(p)

    rank.needs = {"group"}
    out = rewards.score(
        media, PROMPTS, {"rank": rank}, MediaContext(group=torch.tensor([0, 1, 0, 1]))
    )
    assert bool(out.valid.all()) and sorted(out.total.tolist()) == [0.0, 0.0, 0.5, 0.5]
    assert out.total[0] != out.total[2]


def test_a_retried_sample_sees_its_own_context(media):
    def read(m, p, c):
        if len(p) > 1:
            raise ValueError("one at a time")
        return torch.tensor([c.meta[0]["value"]]) + c.source.mean() * 0

    read.needs = {"meta", "source"}
    context = MediaContext(meta=[{"value": float(i)} for i in range(4)], source=media)
    assert rewards.score(media, PROMPTS, {"read": read}, context).total.tolist() == [
        0.0,
        1.0,
        2.0,
        3.0,
    ]


def test_a_reward_that_always_raises_makes_every_sample_invalid_and_stops_the_run(media):
    def broken(m, p, c):
        raise KeyError("weights")

    out = rewards.score(media, PROMPTS, {"broken": broken})
    assert not bool(out.valid.any()) and bool(out.total.isnan().all())
    with pytest.raises(rewards.TooManyInvalid, match="4 of 4 samples.*broken: KeyError: 'weights'"):
        rewards.check_valid(out, limit=1.0)


def test_pixels_that_are_nan_make_a_sample_invalid_and_reach_no_reward(media):
    media[2, 0, 0, 0] = math.nan

    def strict(m, p, c):
        assert bool(m.isfinite().all())
        return m.mean((1, 2, 3))

    out = rewards.score(media, PROMPTS, {"strict": strict})
    assert (
        out.valid.tolist() == [True, True, False, True]
        and "1 of 4 samples hold NaN" in out.errors[0]
    )
    watched = rewards.score(media, PROMPTS, {"strict": {"reward": strict, "weight": 0}})
    assert watched.valid.tolist() == [True, True, False, True]


def test_a_sample_of_nan_pixels_is_no_member_of_its_group(media):
    """Ranked by brightness 0.2, 0.4, 0.6 of three: 0, 1/3, 2/3. With a black fourth they would be
    1/4, 2/4, 3/4."""
    for row, level in enumerate((0.2, 0.4, math.nan, 0.6)):
        media[row] = level
    context = MediaContext(
        group=torch.zeros(4, dtype=torch.long), meta=[{"place": i} for i in range(4)]
    )
    seen = []

    def bright(m, p, c):
        seen.append([meta["place"] for meta in c.meta])
        return m.mean((1, 2, 3))

    bright.needs = {"meta"}
    out = rewards.score(
        media, PROMPTS[:1] * 4, {"rank": rewards.load("rank", reward=bright)}, context
    )
    assert (
        out.raw["rank"][[0, 1, 3]].tolist() == pytest.approx([0, 1 / 3, 2 / 3])
        and out.raw["rank"][2].isnan()
    )
    assert seen == [[0, 1, 3]] and out.valid.tolist() == [True, True, False, True]


def test_samples_of_nan_pixels_alone_reach_no_reward(media):
    def never(m, p, c):
        raise AssertionError

    out = rewards.score(media * math.nan, PROMPTS, {"never": never})
    assert not out.valid.any() and out.errors == ["media: 4 of 4 samples hold NaN or inf pixels"]


@pytest.mark.parametrize(
    ("bad", "limit", "stops"),
    [(0, 0.05, False), (1, 0.05, False), (2, 0.05, True), (19, 0.99, False), (20, 1.0, True)],
)
def test_more_than_the_limit_of_invalid_samples_stops(bad, limit, stops):
    valid = torch.arange(20) >= bad
    record = Rewards(
        raw={}, weights={}, total=torch.zeros(20), valid=valid, errors=["first", "second"]
    )
    if stops:
        with pytest.raises(
            rewards.TooManyInvalid, match=f"{bad} of 20 samples.*first error: first"
        ):
            rewards.check_valid(record, limit)
    else:
        assert rewards.check_valid(record, limit) is None


# --- what evaluation shows


class Two(rewards.Reward):
    """A reward with two parts; it cannot read a dog."""

    name, scale = "two", "mean of red and green"

    def __call__(self, media, prompts, context=None):
        return sum(self.parts(media, prompts, context).values()) / 2

    def parts(self, media, prompts, context=None):
        if "a dog" in prompts:
            raise OSError("no dogs")
        return {"red": media[:, 0].mean((1, 2)), "green": media[:, 1].mean((1, 2))}


def test_readings_are_rewards_their_parts_and_the_total_and_a_failure_costs_one_sample(media):
    media[3, 2, 0, 0] = math.nan
    chosen = rewards.load_set(
        {"two": {"reward": Two(), "weight": 2.0}, "a": {"reward": brightness, "weight": 0}}
    )
    out = rewards.readings(media, PROMPTS, chosen, MediaContext())
    assert list(out) == ["two", "a", "total", "two/red", "two/green"]
    for name in ("two", "total", "two/red", "two/green"):
        assert out[name].isnan().tolist() == [False, True, False, True], name
    assert out["a"].isnan().tolist() == [False, False, False, True]
    torch.testing.assert_close(out["two/green"][[0, 2]], media[[0, 2], 1].mean((1, 2)))
    torch.testing.assert_close(out["total"], 2 * out["two"], equal_nan=True)


def test_a_part_of_the_wrong_shape_is_a_bug(media):
    two = Two()
    two.parts = lambda m, p, c: {"red": torch.zeros(len(p), 1)}
    two.__class__ = type(
        "Fine", (Two,), {"__call__": lambda self, m, p, c=None: torch.zeros(len(p))}
    )
    with pytest.raises(rewards.RewardBug, match=r'reward "two/red" returned .* shape \(4, 1\)'):
        rewards.readings(media, PROMPTS, rewards.load_set({"two": two}), MediaContext())


# --- a reward's file


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("x = 1", 'reward "mine_NR": its file exposes no REWARD; end it with REWARD = YourClass'),
        ("def f(m, p, c): ...\nREWARD = f", "exposes REWARD = <function f at"),
        (
            "import nowhere_at_all",
            "its file cannot be imported: ModuleNotFoundError: No module named 'nowhere_at_all'",
        ),
        ("def f(:", "its file cannot be imported: SyntaxError: "),
        ("1 / 0", "its file cannot be imported: ZeroDivisionError"),
        (
            (
                "from flowrl.rewards import Reward\nclass R(Reward):\n    def __init__(self, s):"
                " import nowhere_at_all\nREWARD = R"
            ),
            'reward "mine_NR" needs a package that cannot be imported: No module named',
        ),
    ],
)
def test_a_file_that_is_no_reward_is_one_sentence(tmp_path, monkeypatch, request, code, said):
    name = f"mine_{request.node.callspec.indices['code']}"
    (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.setattr(rewards, "__path__", [*rewards.__path__, str(tmp_path)])
    with pytest.raises(ValueError) as error:
        rewards.load(name)
    assert said.replace("mine_NR", name) in str(error.value)
    sys.modules.pop(f"flowrl.rewards.{name}", None)


# --- a broken contract is a bug


@pytest.mark.parametrize(
    ("out", "said"),
    [
        (torch.zeros(3), r"float32 tensor of shape \(3,\)"),
        (torch.zeros(4, 1), r"shape \(4, 1\)"),
        (torch.zeros(()), r"shape \(\)"),
        (torch.zeros(4, dtype=torch.float64), "a float64 tensor"),
        (torch.zeros(4, dtype=torch.bfloat16), "a bfloat16 tensor"),
        (torch.zeros(4, device="meta"), "on meta"),
        (np.zeros(4, dtype=np.float32), "numpy.ndarray"),
        ([0.0] * 4, "list"),
        (None, "NoneType"),
    ],
)
def test_a_wrong_shape_dtype_device_or_type_stops_with_reward_got_and_expected(media, out, said):
    with pytest.raises(rewards.RewardBug, match=said) as error:
        rewards.score(media, PROMPTS, {"mine": lambda m, p, c: out})
    assert '"mine"' in str(error.value) and "expected a float32 tensor of shape (4,) on cpu" in str(
        error.value
    )


def test_a_wrong_shape_in_a_retry_stops_too(media):
    def liar(m, p, c):
        if len(p) > 1:
            raise ValueError("first")
        return torch.zeros(7)

    with pytest.raises(rewards.RewardBug, match=r"expected a float32 tensor of shape \(1,\)"):
        rewards.score(media, PROMPTS, {"liar": liar})


# --- rewards as words


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["clip=0.3", "clip.weight=0.5"], '"clip.weight" is given twice'),
        (["clip.weight=0.5", "clip=0.3"], '"clip" is given twice'),
        (["a.b=1", "a.b.c=2"], '"a.b" is given too, and one holds the other'),
        (["a.b.c=2", "a.b=1"], '"a.b.c" is given too, and one holds the other'),
        (["a.weight.x=1"], "should be NAME, NAME=WEIGHT"),
    ],
)
def test_words_of_which_one_would_undo_another_are_refused(words, said):
    with pytest.raises(ValueError, match=said):
        rewards.parse_words(words)
    assert rewards.parse_words(["clip", "clip.weight=0.5", "clip.bc=1", "clip.b=2"]) == {
        "clip": {"weight": 0.5, "bc": 1, "b": 2}
    }


# --- start-up checks and bad input


def test_a_needed_column_that_is_missing_is_named_at_start_up():
    def edit(m, p, c):
        return torch.zeros(len(p))

    edit.needs = {"source"}
    rewards.check_needs({"edit": edit}, ["meta", "source"])
    only_python = (
        r'needs the context column "source".*provided: group, meta.; .*column "image": score'
        r" in Python with MediaContext"
    )
    with pytest.raises(ValueError, match=only_python):
        rewards.check_needs({"edit": edit}, ["meta", "group"])
    edit.needs = {"group"}
    with pytest.raises(
        ValueError,
        match=(
            "provided: meta.; a training run brings it, for its samples of one prompt: score in"
            " Python"
        ),
    ):
        rewards.check_needs({"edit": edit}, ["meta"])
    edit.needs = {"sauce"}
    with pytest.raises(rewards.RewardBug, match='did you mean "source"'):
        rewards.check_needs({"edit": edit}, ["source"])


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"jpg": 1.0}, 'unknown reward "jpg"; did you mean "jpeg"'),
        ({"jpeg": {"qualty": 80}}, 'unknown setting "qualty"; did you mean "quality"'),
        ({"jpeg": {"quality": 0}}, "quality=0: input should be greater than or equal to 1"),
        ({"jpeg": {"scale": "ddpoo"}}, "'flow_grpo' or 'ddpo'"),
        ({"jpeg": "much"}, "weight='much' is not a finite number"),
        ({"jpeg": math.nan}, "weight=nan is not a finite number"),
        ({"jpeg": True}, "weight=True is not a finite number"),
        (
            {"mine": {"reward": brightness, "weigt": 2}},
            "already loaded, so .'weigt'. cannot be set",
        ),
        ({}, "at least one reward"),
        ([brightness, brightness], 'two rewards are called "brightness"'),
        (
            lambda media: media,
            "is called as <lambda>.media, prompts, context.: too many positional",
        ),
    ],
)
def test_bad_specifications_are_one_sentence(spec, said):
    with pytest.raises(ValueError, match=said):
        rewards.load_set(spec)


def test_all_problems_of_settings_are_reported_together():
    with pytest.raises(ValueError, match="quality=200.*unknown setting"):
        rewards.load("jpeg", quality=200, goaal="compressible")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: m.double(), "torch.float64 tensor"),
        (lambda m: m.numpy(), "ndarray"),
        (lambda m: m.mean((1, 2, 3)), r"shape \(4,\)"),
        (lambda m: m * 2 - 1, r"media spans \[-1"),
        (lambda m: m * 255, "media spans"),
        (lambda m: m[:3], "3 media but 4 prompts"),
    ],
)
def test_media_that_rewards_could_not_trust_are_refused(media, change, said):
    with pytest.raises(ValueError, match=said):
        rewards.score(change(media), PROMPTS, {"a": brightness})


def test_a_reward_of_pictures_says_what_it_needs_and_a_function_takes_any_media(media):
    motion = media.flatten(1)[:, :24].view(4, 12, 2) * 10
    with pytest.raises(ValueError, match=r'"jpeg" takes images \(B, 3, H, W\).*\(4, 12, 2\)'):
        rewards.score(motion, PROMPTS, {"jpeg": 1.0})
    with pytest.raises(ValueError, match=r"\(4, 1, 16, 16\)"):
        rewards.score(media[:, :1], PROMPTS, {"jpeg": 1.0})
    found = rewards.score(motion, PROMPTS, lambda m, prompts, context: m.flatten(1).mean(1))
    assert torch.equal(found.total, motion.flatten(1).mean(1))
    with pytest.raises(rewards.RewardBug, match=r"shape \(4, 12\) on cpu; expected .* \(4,\)"):
        rewards.score(motion, PROMPTS, lambda m, prompts, context: m.mean(2))


def test_every_reward_in_the_folder_states_its_scale_and_schema():
    names = choices("flowrl.rewards")
    assert {"jpeg", "clip"} <= set(names)
    for name in names:
        cls = rewards.reward_class(name)
        assert issubclass(cls, rewards.Reward) and cls.name == name and len(cls.scale) > 10
        assert cls.Settings.model_config["extra"] == "forbid"
        assert all(field.description for field in cls.Settings.model_fields.values())


# --- jpeg


def test_jpeg_is_minus_the_kilobytes_that_pil_writes(media):
    sizes = []
    for image in media:
        buffer = io.BytesIO()
        Image.fromarray((image * 255).round().byte().permute(1, 2, 0).numpy()).save(
            buffer, "JPEG", quality=95
        )
        sizes.append(len(buffer.getvalue()) / 1000)
    assert torch.allclose(rewards.load("jpeg", scale="ddpo")(media, PROMPTS), -torch.tensor(sizes))
    assert torch.allclose(rewards.load("jpeg")(media, PROMPTS), -torch.tensor(sizes) / 500)


def test_jpeg_of_grey_and_of_noise_at_512_has_the_published_size():
    both = torch.stack([torch.full((3, 512, 512), 0.5), torch.rand(3, 512, 512)])
    grey, noise = rewards.load("jpeg", scale="ddpo")(both, ["", ""]).tolist()
    assert grey == pytest.approx(-4.7, abs=0.1) and noise == pytest.approx(-307.9, abs=1.0)


def test_jpeg_of_a_video_is_the_mean_over_its_frames(media):
    jpeg = rewards.load("jpeg")
    frames = jpeg(media, PROMPTS)
    assert torch.allclose(jpeg(media.view(2, 2, 3, 16, 16), PROMPTS[:2]), frames.view(2, 2).mean(1))


def test_jpeg_states_the_scale_it_was_loaded_with():
    assert (
        rewards.load("jpeg", scale="ddpo", quality=80).scale == "minus kilobytes at JPEG quality 80"
    )
    assert rewards.load("jpeg").scale == rewards.reward_class("jpeg").scale


# --- what a context holds

SOURCE = torch.rand(1, 3, 16, 16)


@pytest.mark.parametrize(
    ("context", "said"),
    [
        (MediaContext(source=SOURCE.expand(5, -1, -1, -1)), "source has 5 entries for 4 media"),
        (MediaContext(source=SOURCE), "source has 1 entries for 4 media"),
        (MediaContext(meta=[{}]), "meta has 1 entries for 4 media"),
        (MediaContext(meta={}), "meta is a dict; give a list with an entry for each sample"),
        (MediaContext(source=[SOURCE]), "source is a list; give a tensor with an entry for each"),
        ({"source": SOURCE}, "context is a dict; give flowrl.types.MediaContext"),
    ],
)
def test_a_context_has_an_entry_for_each_sample(media, context, said):
    """A chunk that fails is scored one by one, and must not pass there with other samples' rows."""
    with pytest.raises(ValueError, match=said):
        rewards.score(media, PROMPTS, {"a": brightness}, context)


@pytest.mark.parametrize("prompts", ["four", None, [1, 2, 3, 4], [None] * 4])
def test_prompts_are_a_list_of_texts(media, prompts):
    with pytest.raises(ValueError, match="prompts=.*; give a list, a text a sample"):
        rewards.score(media, prompts, {"a": brightness})


def test_media_without_pixels_are_refused():
    with pytest.raises(ValueError, match=r"shape \(4, 3, 0, 8\), which holds no pixel"):
        rewards.score(torch.rand(4, 3, 0, 8), PROMPTS, {"a": brightness})
