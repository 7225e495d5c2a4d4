"""The grammar of scenes: sentences become structures and back, and other texts are refused."""

import pytest

from flowrl.scenes.grammar import (
    Edit,
    Language,
    Motion,
    Picture,
    Thing,
    plural,
    read,
    sentences,
    text,
)
from flowrl.scenes.stickers.prompts import WORLD
from flowrl.shapes import prompts as shapes
from flowrl.shapes.scenes import COLORS, SHAPES

CAT, PIZZA = Thing("cat"), Thing("pizza")
SAYS = {
    "an octopus": Picture((Thing("octopus"),)),
    "a unicorn": Picture((Thing("unicorn"),)),
    "two tacos": Picture((Thing("taco", 2),)),
    "three butterflies": Picture((Thing("butterfly", 3),)),
    "a cat left of a pizza": Picture((CAT, PIZZA), "left of"),
    "a cat and a pizza": Picture((CAT, PIZZA), "and"),
    "a taco on a blue background": Picture((Thing("taco"),), None, "blue"),
    "a cat below a pizza on a pink background": Picture((CAT, PIZZA), "below", "pink"),
    "a cat moves left": Motion(CAT, "moves left"),
    "two foxes move up on a green background": Motion(Thing("fox", 2), "moves up", "green"),
    "two buses appear": Motion(Thing("bus", 2), "appears"),
    "a cat shrinks": Motion(CAT, "shrinks"),
    "replace the cat with an apple": Edit("replace", "cat", "apple"),
    "remove the cat": Edit("remove", "cat"),
    "make the background yellow": Edit("background", None, "yellow"),
    "move the cat up": Edit("move", "cat", "up"),
}


@pytest.mark.parametrize("words", SAYS)
def test_a_sentence_becomes_a_structure_and_back(words):
    assert read(words, WORLD, type(SAYS[words])) == SAYS[words]
    assert text(SAYS[words]) == words


def test_every_sentence_has_one_structure_and_every_structure_one_sentence():
    found = sentences(WORLD)
    assert len(set(found.values())) == len(found)
    assert all(text(sentence) == words for words, sentence in found.items())
    kinds = [sum(isinstance(s, kind) for s in found.values()) for kind in (Picture, Motion, Edit)]
    # 32 * 4 counts + 32 * 31 * 5 joins; 32 * 2 counts * 8 verbs; 32 * 31 + 32 + 5 + 32 * 4
    assert kinds == [5088, 512, 1157]


def test_the_grammar_has_room_for_every_prompt_of_shapes():
    world = Language(name="shapes", nouns=SHAPES, colors=tuple(COLORS))
    for row in shapes.all_prompts():
        read_back = read(row["prompt"], world, Picture)
        clauses = sorted((t.noun, str(t.color), t.count) for t in read_back.things)
        asked = sorted((c["shape"], str(c["color"]), c["count"]) for c in row["include"])
        assert clauses == asked


@pytest.mark.parametrize(
    ("words", "kind", "said"),
    [
        ("a kat", Picture, 'the stickers world has no word "kat"; did you mean "cat"'),
        ("a cat on a red background", Picture, 'has no word "red"'),
        ("two cat", Picture, '"two cat" is no picture of the stickers world; write it like "an'),
        ("a cat jumps", Motion, '"a cat jumps" is no motion of the stickers world; write it like'),
        ("a cat", Motion, "(its motions: moves left, moves right, moves up, moves down, appears, "),
        ("a cat moves left", Edit, "is no edit of the stickers world; write it like"),
        ("remove the cat on a blue background", Edit, "is no edit"),
    ],
)
def test_other_texts_are_refused_in_a_sentence(words, kind, said):
    with pytest.raises(ValueError) as caught:
        read(words, WORLD, kind)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_world_without_motions_says_so():
    world = Language(name="shapes", nouns=SHAPES)
    with pytest.raises(ValueError, match="is no motion of the shapes world, which has none"):
        read("a circle moves left", world, Motion)


def test_plurals_are_regular():
    assert [plural(noun) for noun in ("bus", "fox", "ladybug", "butterfly", "toy")] == [
        "buses",
        "foxes",
        "ladybugs",
        "butterflies",
        "toys",
    ]
