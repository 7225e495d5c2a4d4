"""The pictures of plans on the methods' pages are drawn from the plans that the methods make."""

import re

import plans
import torch

from flowrl.samplers import plan


def test_the_pictures_are_those_of_the_plans():
    made = plans.pictures()
    stale = [path.name for path, svg in made.items() if path.read_text(encoding="utf-8") != svg]
    assert not stale, "run: python scripts/docs/plans.py"
    assert sorted(made) == sorted(plans.FOLDER.glob("*.svg"))


def test_a_picture_marks_noisy_and_trained_steps_and_joins_what_is_shared():
    """A tree of one split: a shared step that is noisy, then two samples by ODE."""
    tree = plan.branch(torch.tensor([1.0, 0.5, 0.0]), eta=0.7, splits=[0], children=2)
    drawn = plans.drawing(tree)
    paths = re.findall(r'<path d="M([\d.]+) ([\d.]+)L([\d.]+) ([\d.]+)" ([^/]+)/>', drawn)
    assert len(paths) == tree.edges == 4
    noisy = [path for path in paths if "dasharray" in path[4]]
    assert len(noisy) == 2 and all('stroke-width="4"' in path[4] for path in noisy)
    assert {path[:2] for path in noisy} == {
        ("16.0", "30.0")
    }  # both leave the one noise, in the middle
    assert {path[3] for path in paths if path not in noisy} == {"16.0", "44.0"}  # a row a sample
    assert "2 samples that share steps, 2 noise levels, 4 steps" in plans.said("it", tree)
