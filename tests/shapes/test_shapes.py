"""The shapes world: the renderer draws what it says, the verifier sees it, and the prompts are
split cleanly."""

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from flowrl import load_policy, rewards
from flowrl.evaluation import held_out
from flowrl.shapes import prompts, verify
from flowrl.shapes.agreement import ERRORS, measure, plant
from flowrl.shapes.scenes import COLORS, RELATIONS, SHAPES, Object, render
from flowrl.shapes.verify import FoundShape, partial, strict
from flowrl.types import MediaContext

EVERY = prompts.all_prompts()
LEFT_OF = "a red circle left of a blue square"
CIRCLE = {"shape": "circle", "count": 1, "color": None}


# ---------------------------------------------------------------------------
# renderer


@pytest.mark.parametrize(
    ("shape", "area"), [("circle", math.pi * 10**2), ("square", 20**2), ("triangle", 20**2 / 2)]
)
def test_a_shape_covers_its_area_around_its_centre(shape, area):
    """Half-size 10: a circle of radius 10, a square of side 20, a triangle of base and height 20
    with centroid a third up."""
    drawn = render([Object(shape, "black", 31.3, 30.6, 10.0)])[0]
    coverage = (1 - drawn) / (1 - COLORS["black"][0])
    assert coverage.sum().item() == pytest.approx(area, rel=0.02)
    pixel = torch.arange(64) + 0.5
    x, y = ((coverage.sum(side) * pixel).sum() / coverage.sum() for side in (0, 1))
    below = {"triangle": 20 / 6}.get(shape, 0.0)  # of the box's middle
    assert x.item() == pytest.approx(31.3, abs=0.1)
    assert y.item() == pytest.approx(30.6 + below, abs=0.15)


def test_a_triangle_points_up_and_colours_are_exact():
    picture = render([Object("triangle", "green", 32, 32, 10)])
    width = (picture[0] < 0.5).sum(1)
    assert width[23] <= 3 and width[40] >= 18 and bool((width[23:41].diff() >= 0).all())
    assert torch.allclose(picture[:, 36, 32], torch.tensor(COLORS["green"]))
    assert bool((picture[:, 0, 0] == 1).all())


def test_objects_of_a_scene_lie_inside_and_apart_and_hold_their_relation():
    generator = torch.Generator().manual_seed(0)
    for prompt in EVERY[:: len(EVERY) // 200]:
        objects = prompts.scene(prompt, generator)
        asked = (Counter({c["shape"]: c["count"]}) for c in prompt["include"])
        assert Counter(o.shape for o in objects) == sum(asked, Counter())
        assert all(o.size < o.x < 64 - o.size and o.size < o.y < 64 - o.size for o in objects)
        for i, a in enumerate(objects):
            assert all(max(abs(a.x - b.x), abs(a.y - b.y)) >= a.size + b.size for b in objects[:i])
        if prompt["task"] == "position":
            dx, dy = RELATIONS[prompt["include"][1]["position"][0]]
            a, b = objects
            assert (a.x - b.x) * dx + (a.y - b.y) * dy > 0


# ---------------------------------------------------------------------------
# verifier


def test_the_verifier_accepts_what_was_drawn_and_rejects_one_planted_error():
    result = measure(300)
    assert result.accepted >= 0.995, result
    assert result.rejected.keys() == set(ERRORS) and min(result.rejected.values()) >= 0.99, result
    assert result.planted["count"] == result.planted["shape"] == 300
    assert result.planted["order"] == 50 < result.planted["colour"]


def test_soft_edges_do_not_hide_a_shape():
    result = measure(120, seed=1, blur=True)
    assert result.accepted >= 0.95 and min(result.rejected.values()) >= 0.99, result


def test_planted_errors_are_what_they_say():
    generator = torch.Generator().manual_seed(0)
    prompt = prompts.find("a red circle left of a blue square")
    truth = prompts.scene(prompt, generator)
    a, b = truth
    assert (a.shape, a.color, b.shape) == ("circle", "red", "square") and a.x < b.x
    swapped = plant(prompt, truth, "order", generator)
    assert swapped == [replace(a, x=b.x, y=b.y, size=b.size), replace(b, x=a.x, y=a.y, size=a.size)]
    assert plant(prompt, truth, "shape", generator)[0] == replace(a, shape="triangle")
    assert plant(prompt, truth, "colour", generator)[0].color not in ("red", "blue")
    assert {len(plant(prompt, truth, "count", generator)) for _ in range(20)} == {1, 3}
    open_color = prompts.find("a circle")
    for error in ("colour", "order"):
        assert plant(open_color, truth[:1], error, generator) is None


@pytest.mark.parametrize("color", COLORS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_is_found_in_every_colour_where_it_was_drawn(shape, color):
    (found,) = verify.detect(render([Object(shape, color, 20.0, 40.0, 8.0)])[None])[0]
    assert (found.shape, found.color) == (shape, color)
    assert (found.x, found.y) == pytest.approx((20, 40), abs=1)
    assert (found.width, found.height) == pytest.approx((16, 16), abs=2)


def test_noise_blank_paper_and_a_half_disc_show_nothing():
    assert verify.detect(torch.ones(1, 3, 64, 64)) == [[]]
    assert not any(o.shape for o in verify.detect(torch.rand(1, 3, 64, 64))[0])
    disc = render([Object("circle", "red", 32, 32, 10)])
    disc[:, :, 32:] = 1
    (half,) = verify.detect(disc[None])[0]
    assert half.shape is None and half.color == "red"


@pytest.mark.parametrize("size", [128, 512, 96, 48])
def test_a_scene_at_another_size_scores_as_it_was_drawn(size):
    generator = torch.Generator().manual_seed(5)
    chosen = EVERY[:: len(EVERY) // 40]
    drawn = torch.stack([render(prompts.scene(p, generator)) for p in chosen])
    scaled = F.interpolate(drawn, (size, size), mode="bilinear", antialias=True)

    def right(pictures):
        found = zip(verify.detect(pictures), chosen, strict=True)
        return sum(strict(objects, p["include"]) for objects, p in found)

    assert right(drawn) == right(scaled) == len(chosen)
    assert right(scaled.roll(1, 0)) < len(chosen) / 4  # each picture for another prompt


def test_a_wide_picture_keeps_its_shapes_and_a_video_is_refused():
    wide = torch.ones(1, 3, 64, 128)
    wide[:, :, :, 32:96] = render([Object("circle", "red", 32, 32, 14)])
    (found,) = verify.detect(wide)[0]
    assert (found.shape, found.color) == ("circle", "red")
    assert found.x == pytest.approx(32, abs=1) and found.width == pytest.approx(14, abs=2)
    said = r"reads images \(B, 3, H, W\), not media of shape \(1, 2, 3, 64, 64\)"
    with pytest.raises(ValueError, match=said):
        verify.detect(torch.ones(1, 2, 3, 64, 64))


def test_components_of_a_hand_made_mask():
    """Diagonal neighbours belong together; a spiral is one component whatever its length; a label
    is the largest pixel number + 1."""
    rows = ["##..#", "..#.#", "....#", "#...#", "##.##"]
    mask = torch.tensor([[c == "#" for c in row] for row in rows])
    expected = torch.tensor(
        [
            [8, 8, 0, 0, 25],
            [0, 0, 8, 0, 25],
            [0, 0, 0, 0, 25],
            [22, 0, 0, 0, 25],
            [22, 22, 0, 25, 25],
        ]
    )
    assert torch.equal(verify.components(mask[None])[0], expected)
    spiral = ["#######", "......#", "#####.#", "#...#.#", "#.###.#", "#.....#", "#######"]
    mask = torch.tensor([[c == "#" for c in row] for row in spiral])
    both = verify.components(torch.stack([mask, ~mask]))
    assert both[0][mask].unique().tolist() == [49] and both[1][mask].unique().tolist() == [0]


# ---------------------------------------------------------------------------
# partial credit


def seen(*kinds):
    """Objects side by side, from left to right: "red circle" -> Found."""
    named = enumerate(kind.split() for kind in kinds)
    return [
        FoundShape(shape, color, 12.0 + 16 * i, 32.0, 14.0, 14.0) for i, (color, shape) in named
    ]


@pytest.mark.parametrize(
    ("prompt", "objects", "credit"),
    [
        ("two red circles", ["red circle", "red circle"], 1.0),
        # count term 1 - 1/2; the colour term waits for the right count
        ("two red circles", ["red circle"], (0.5 + 0) / 2),
        # count right, one of two in the wrong colour
        ("two red circles", ["red circle", "blue circle"], (1 + 0.5) / 2),
        ("four blue squares", ["blue square"] * 10, 0.0),  # 1 - 6/4 is floored at 0
        ("a red circle and a blue square", ["red circle", "red square"], (1 + 1 + 1 + 0) / 4),
        ("a circle and a square", ["red circle", "blue triangle"], (1 + 0) / 2),
        (LEFT_OF, ["red circle", "blue square"], 1.0),
        (LEFT_OF, ["blue square", "red circle"], (1 + 1 + 1 + 1 + 0) / 5),  # all but the position
        # no blue square to be left of
        (LEFT_OF, ["red circle", "green square"], (1 + 0 + 1 + 1 + 0) / 5),
        # of one shape, colours count: 2 and 0
        ("a red circle and a blue circle", ["red circle", "red circle"], (0 + 0 + 0 + 0) / 4),
        ("a purple triangle", [], 0.0),
    ],
)
def test_partial_credit_by_hand(prompt, objects, credit):
    include = prompts.find(prompt)["include"]
    assert partial(seen(*objects), include) == pytest.approx(credit)
    assert strict(seen(*objects), include) == (credit == 1)


def test_strict_allows_nothing_else_in_the_picture_and_partial_does():
    include = prompts.find("a red circle")["include"]
    objects = seen("red circle", "blue square")
    assert partial(objects, include) == 1 and not strict(objects, include)
    blob = [*seen("red circle"), FoundShape(None, "blue", 50, 50, 8, 8)]
    assert not strict(blob, include)


@pytest.mark.parametrize(
    ("include", "said"),
    [
        (None, "has include=None"),
        ([], "has include=[]"),
        ([{}], "has the clause {}"),
        (["a circle"], "has the clause 'a circle'"),
        ([{"shape": "circle", "count": 0, "color": None}], "has the clause"),
        ([{"shape": "circle", "count": 1, "color": 3}], "has the clause"),
        ([{"shape": "circle", "count": 1}], "has the clause"),
        ([CIRCLE | {"position": ["left of", 0]}], "has the position"),
        ([CIRCLE, CIRCLE | {"position": ["near", 0]}], "['near', 0]"),
    ],
)
def test_clauses_that_cannot_be_judged_are_named(include, said):
    assert said in verify.complaint(include)
    assert rewards.load("shapes").complaint({"include": include}) == verify.complaint(include)
    context = MediaContext(meta=[{"include": include}, EVERY[0]])
    scores = rewards.score(torch.rand(2, 3, 64, 64), ["x", "a circle"], {"shapes": 1.0}, context)
    assert scores.valid.tolist() == [False, True] and said in scores.errors[0]


def test_every_prompt_of_the_world_can_be_judged():
    assert not [p for p in EVERY if verify.complaint(p["include"])]


# ---------------------------------------------------------------------------
# prompts


def test_all_six_tasks_of_geneval_are_there_in_both_sets():
    assert {p["task"] for p in EVERY} == set(prompts.TASKS) and len(prompts.TASKS) == 6
    held = prompts.eval_prompts()
    assert len(held) == 128 and len({p["prompt"] for p in held}) > 60
    for chosen in (prompts.train_prompts(), held):
        shares = Counter(p["task"] for p in chosen)
        total = sum(shares.values())
        assert all(shares[task] == round(s * total) for task, s in prompts.SHARES.items())


def test_no_held_out_combination_is_trained_on():
    train, held = prompts.train_prompts(), prompts.eval_prompts()
    combinations = [{(p["task"], p["combination"]) for p in some} for some in (train, held)]
    assert not combinations[0] & combinations[1]
    assert not {p["prompt"] for p in train} & {p["prompt"] for p in held}
    first = prompts.find("a red circle and a blue square")
    second = prompts.find("a blue square and a red circle")
    assert first["combination"] == second["combination"]
    assert prompts.held_out(first) == prompts.held_out(second)
    share = sum(map(prompts.held_out, EVERY)) / len(EVERY)
    assert 0.2 < share < 0.3


def test_texts_are_unique_and_an_unknown_one_is_answered_with_near_ones():
    assert len({p["prompt"] for p in EVERY}) == len(EVERY)
    said = '"a rod circle" is not a prompt of the shapes world; did you mean "a red circle"'
    with pytest.raises(ValueError, match=said):
        prompts.find("a rod circle")


@pytest.fixture(scope="module")
def policy():
    torch.set_num_threads(1)
    return load_policy("shapes-sd3")


def test_each_word_of_the_world_is_one_token(policy):
    tokenizer = policy.pipe.tokenizer
    words = {word for p in EVERY for word in p["prompt"].split()}
    assert len(words) > 20
    for word in words:
        assert len(tokenizer(word, add_special_tokens=False).input_ids) == 1, word
    assert max(len(tokenizer(p["prompt"]).input_ids) for p in EVERY) <= tokenizer.model_max_length


def test_the_decoder_shows_what_the_renderer_drew(policy):
    """Through the VAE and back, a scene is still what its prompt says."""
    generator = torch.Generator().manual_seed(2)
    chosen = prompts.eval_prompts()[::4]
    pictures = torch.stack([render(prompts.scene(p, generator)) for p in chosen])
    with torch.no_grad():
        again = policy.decode(policy.encode_media(pictures))
    found = zip(verify.detect(again), chosen, strict=True)
    right = sum(strict(objects, p["include"]) for objects, p in found)
    assert right / len(chosen) >= 0.9


def test_the_model_as_shipped_draws_some_prompts_right_and_more_with_guidance(policy):
    """Strict accuracy of 80 held-out images at this seed: 0.30 without guidance, 0.56 with; two
    other seeds 0.28 and 0.34, and 0.56 and 0.58."""
    held, strictly = prompts.eval_prompts(80), rewards.load_set({"shapes": {"reading": "strict"}})
    how = {"images": 80, "steps": 8, "solver": "euler", "seed": 1, "micro": 128}
    plain, guided = (
        held_out.evaluate(policy, held, strictly, guidance=g, **how).mean("shapes")
        for g in ("none", 3.0)
    )
    assert 0.20 < plain < 0.45 and guided > plain + 0.1
