"""Checks of order and on changed pictures: what a reward confuses, what it can be fooled by, and
which side it looks at."""

import math

import pytest
import torch
from planted import SHAPES, brightness, check, planted, reading_clauses, shapes_of, tried

from flowrl.rewards.checks import examples, order
from flowrl.rewards.checks.attacks import attacked, mirror
from flowrl.rewards.checks.pictures import written
from flowrl.rewards.checks.subject import Subject, examples_of
from flowrl.shapes.verify import detect


@pytest.fixture(scope="module")
def pictures():
    return examples.shapes(8)


@pytest.fixture(scope="module")
def moving():
    return examples.shapes(2, frames=4)


def without(key):
    """The shapes reward, blind to what clauses say under a key."""
    return reading_clauses(
        lambda m, p, c: shapes_of(
            lambda clause: {k: None if k == key else v for k, v in clause.items()}, m, p, c
        )
    )


def placed(edit):
    """The shapes reward where the relations of clauses are edited."""

    def clause_of(clause):
        return (
            clause | {"position": [edit(clause["position"][0]), clause["position"][1]]}
            if "position" in clause
            else clause
        )

    return lambda m, p, c: shapes_of(clause_of, m, p, c)


# --- right and wrong


def test_a_reward_that_says_it_reads_the_prompt_and_does_not_fails(pictures):
    for attributes in ({"reads_prompt": True}, {"reads": frozenset({"include"})}):
        found = check(planted(brightness, **attributes), pictures)
        assert found["right prompt"].verdict == "fail" and "prompt-swap matrix" not in found


def test_a_reward_that_prefers_wrong_prompts_fails_in_every_attribute_with_enough_pairs(pictures):
    found = check(reading_clauses(lambda m, p, c: 1 - SHAPES(m, p, c)), pictures)
    for attribute in ("colour", "shape", "count"):
        assert (
            found[f"right prompt, {attribute}"].verdict == "fail"
            and found[f"right prompt, {attribute}"].value == 0.0
        )
    assert (
        found["right picture"].verdict == "fail"
        and found["false positives and negatives"].value == 0.0
    )
    assert (
        found["prompt-swap matrix"].verdict == "warn" and found["prompt-swap matrix"].value == 0.0
    )


def test_a_colour_blind_reward_is_found_by_its_attribute_alone(pictures):
    apart = [
        s
        for s in pictures
        if len({clause["shape"] for clause in s.meta["include"]}) == len(s.meta["include"])
    ]
    found = {f.name: f for f in tried(order.right_prompt, without("color"), apart)}
    assert (
        found["right prompt, colour"].verdict == "warn"
        and found["right prompt, colour"].value == 0.5
    )
    assert "ties" in found["right prompt, colour"].says
    assert found["right prompt, shape"].value > 0.9 and found["right prompt, count"].value == 1.0


def test_the_swap_matrix_names_the_nearest_wrong_prompt(pictures):
    (finding,) = tried(
        order.swap_matrix, reading_clauses(placed(lambda relation: "left of")), pictures[:1]
    )
    relation = next(miss for miss in pictures[0].near_misses if miss.attribute == "relation")
    assert (
        finding.value < 1
        and f'the picture of "{pictures[0].prompt}" gets 1, and 1 as "{relation.prompt}"'
        in finding.says
    )


def test_all_prompts_of_an_attribute_are_in_the_swap_matrix_and_all_their_pictures_compared():
    """Files: all wrong prompts are those of other files, one attribute. Grey i + 1 tenths has the
    prompt "i"; the reward knows."""
    greys = [torch.full((3, 8, 8), (i + 1) / 10) for i in range(6)]
    files = []
    for i, media in enumerate(greys):
        near_misses = tuple(
            examples.NearMiss(attribute="other file", prompt=f"{j}", meta={}, media=greys[j])
            for j in range(6)
            if j != i
        )
        files.append(examples.Example(media=media, prompt=f"{i}", meta={}, near_misses=near_misses))
    knows = planted(
        lambda m, p, c: -(brightness(m) - torch.tensor([(int(t) + 1) / 10 for t in p])).abs(),
        reads_prompt=True,
    )
    (matrix,) = tried(order.swap_matrix, knows, files)
    assert matrix.value == 1.0 and "of 6 close prompts and their pictures" in matrix.says
    (pictures,) = tried(order.right_picture, knows, files)
    assert pictures.value == 1.0 and "30 of 30" in pictures.says


def test_a_prompt_of_several_files_is_in_the_swap_matrix_once():
    cat, dog = torch.zeros(3, 8, 8), torch.ones(3, 8, 8)
    near_misses = tuple(
        examples.NearMiss(attribute="other file", prompt="a dog", meta={}, media=dog)
        for _ in range(2)
    )
    own = examples.Example(media=cat, prompt="a cat", meta={}, near_misses=near_misses)
    knows = planted(
        lambda m, p, c: -(brightness(m) - torch.tensor([float("dog" in t) for t in p])).abs()
    )
    (matrix,) = tried(order.swap_matrix, knows, [own, own])
    assert matrix.value == 1.0 and "of 2 close prompts" in matrix.says


@pytest.mark.parametrize(
    ("right", "wrong", "verdict", "share"),
    [
        ([1, 1, 1, 1, 1], [2, 2, 2, 2, 2], "fail", 0.0),  # 0 of 5 by chance: 1 / 32
        ([1, 1, 1, 1], [2, 2, 2, 2], "warn", 0.0),  # 1 / 16
        ([1, 1, 1, 1], [1, 1, 1, 1], "warn", 0.5),  # ties
        ([2, 2, 2, 1], [1, 1, 1, 2], "ok", 0.75),
        ([2, 2, 1, 1], [1, 1, 2, 1], "warn", 0.625),
        ([2, math.nan], [1, 1], "ok", 1.0),
        ([math.nan], [1], "warn", None),
    ],
)
def test_shares_and_verdicts_of_orders_by_hand(right, wrong, verdict, share):
    pair = [torch.tensor(values, dtype=torch.float32) for values in (right, wrong)]
    finding = order.in_order("x", *pair, 1e-6, "right above wrong")
    assert (finding.verdict, finding.value) == (verdict, share)


def test_false_positives_and_negatives_by_hand():
    """Right 3, 1; wrong 2, 0: three of four pairs are in order; at .5 half of the wrong pass, and
    none of the right are missed."""
    (finding,) = order.rates(torch.tensor([3.0, 1.0]), torch.tensor([2.0, 0.0, math.nan]))
    assert (
        finding.value == 0.75
        and "threshold, 0.5, 50% of the wrong prompts pass and 0% of the right ones do not"
        in finding.says
    )


def test_pictures_of_one_prompt_have_no_wrong_prompt(pictures):
    alone = examples_of(torch.stack([s.media for s in pictures]), ["a picture"] * 8)
    found = check(planted(brightness, reads_prompt=True), alone)
    assert (
        found["right prompt"].verdict == "note"
        and "mirror image" not in found
        and found["attack: noise"].verdict == "ok"
    )


# --- attacks


def like_its_text(media, prompts, context):
    text = torch.stack([written(prompt, *media.shape[-2:]) for prompt in prompts])
    return -(media - text).abs().flatten(1).mean(1)


LOVERS = {
    "white": brightness,
    "black": lambda m, p, c: -brightness(m),
    "noise": lambda m, p, c: m.diff(dim=-1).abs().flatten(1).mean(1),
    "prompt written out": like_its_text,
    "tiled 3 x 3": lambda m, p, c: torch.tensor([float(len(found)) for found in detect(m)]),
    "oversharpened": lambda m, p, c: m.flatten(1).var(1),
    "blurred": lambda m, p, c: -m.diff(dim=-1).abs().flatten(1).amax(1),
}


@pytest.mark.parametrize("name", LOVERS)
def test_a_reward_that_loves_an_attack_is_warned_of_it_with_numbers(pictures, name):
    found = {f.name: f for f in tried(attacked, planted(LOVERS[name]), pictures)}
    finding = found[f"attack: {name}"]
    assert len(found) == len(LOVERS) and finding.verdict == "warn" and " above the " in finding.says
    assert finding.value > float(Subject(planted(LOVERS[name]), pictures, "cpu").honest.median())


def test_an_attack_that_is_not_scored_fails(pictures):
    """White is 1 / 0; a reward that fails as often on honest pictures is not blamed for it."""
    picky = planted(lambda m, p, c: brightness(m) / (m.flatten(1).amin(1) < 1))
    found = {f.name: f for f in tried(attacked, picky, pictures)}
    assert found["attack: white"].verdict == "fail"
    assert "8 of 8 are not scored" in found["attack: white"].says
    assert found["attack: noise"].verdict != "fail"
    never = planted(lambda m, p, c: brightness(m) * math.nan)
    assert "fail" not in {f.verdict for f in tried(attacked, never, pictures)}


# --- mirror images and frames


def test_a_reward_that_is_blind_to_left_and_right_is_warned_of_or_fails_as_it_declares(pictures):
    swapped = placed(
        lambda relation: {"left of": "right of", "right of": "left of"}.get(relation, relation)
    )
    blind = reading_clauses(lambda m, p, c: torch.maximum(SHAPES(m, p, c), swapped(m, p, c)))
    same, sides = tried(mirror, blind, pictures)
    assert (same.name, same.verdict) == ("mirror image", "ok")
    assert (sides.name, sides.verdict, sides.value) == ("left and right", "warn", 0.0)
    assert {f.name: f for f in tried(order.right_prompt, blind, pictures)}[
        "right prompt, relation"
    ].value < 1
    blind.verifies = frozenset({"relation"})
    assert tried(mirror, blind, pictures)[1].verdict == "fail"


def test_a_reward_with_a_bias_to_one_side_is_warned_of(pictures):
    biased = planted(lambda m, p, c: brightness(m[..., :32]) - brightness(m[..., 32:]))
    finding = tried(mirror, biased, pictures)[0]
    assert finding.name == "mirror image" and finding.verdict == "warn" and finding.value > 0.01


def test_a_video_reward_that_loves_stillness_is_warned_of_the_frozen_video(moving):
    still = planted(lambda m, p, c: -m.diff(dim=1).abs().flatten(1).mean(1), video="only")
    found = check(still, moving)
    assert found["attack: frozen"].verdict == "warn" and found["attack: frozen"].value == 0.0
    assert (
        found["frames reversed"].value == pytest.approx(0, abs=1e-6)
        and found["frames shuffled"].value < 0
    )
    assert "videos" not in found


def test_reversed_frames_reverse_a_reward_of_motion_to_the_right(moving):
    def to_the_right(m, p, c):
        ink = (1 - m).mean(2)  # (B, F, H, W)
        centre = (ink * torch.linspace(0, 1, m.shape[-1])).mean((2, 3)) / ink.mean((2, 3))
        return centre[:, -1] - centre[:, 0]

    found = check(planted(to_the_right, video="only"), moving)
    drift = 3 * examples.DRIFT / 63  # three steps, of a frame 63 pixels wide between centres
    assert (
        found["frames reversed"].value == pytest.approx(-2 * drift, rel=0.05)
        and found["attack: frozen"].verdict == "ok"
    )
