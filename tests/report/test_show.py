"""What a notebook shows: media with scores, trees of rollouts, the head of a report, one line that
changes; and what cannot be shown is said in a sentence."""

import base64
import dataclasses
import io
import re

import numpy as np
import pytest
import small
import torch
from PIL import Image

import flowrl
from flowrl.report.show import path_of
from flowrl.runtime import log

GREY = torch.full((2, 3, 16, 16), 0.5)


def pictures(html):
    found = re.findall(r'(?:src|href)="data:image/webp;base64,([^"]+)"', html)
    return [Image.open(io.BytesIO(base64.b64decode(data))) for data in found]


def texts(html):
    return re.findall(r"<figcaption><b>(.*?)</b> (.*?)</figcaption>", html)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A trainer with trees, its first iteration, and its finished run."""
    branch = {"algorithm__plan": "branch", "algorithm__tree__splits": "[0,2]"}
    sizes = {"batch__group": "4", "iterations": "1"}
    path = tmp_path_factory.mktemp("shown") / "run"
    trainer = small.trainer(path, "flow_grpo", **branch, **sizes)
    it = next(iter(trainer))
    return trainer, it, trainer.finish()


@pytest.mark.parametrize(
    "given",
    [
        GREY,
        (GREY * 255).round().to(torch.uint8),
        GREY.permute(0, 2, 3, 1).numpy(),
        np.full((2, 16, 16, 3), 128, np.uint8),
        [Image.new("RGB", (16, 16), (128, 128, 128))] * 2,
        list(GREY),
    ],
    ids=["fp32", "bytes", "channels last", "array of bytes", "PIL", "list"],
)
def test_media_of_each_form_are_the_same_pictures(given):
    shown = flowrl.show(given, [0.25, float("nan")], ["a <b>", "c"])
    assert texts(shown.html) == [("0.25", "a &lt;b&gt;"), ("no score", "c")]
    assert {one.getpixel((0, 0)) for one in pictures(shown.html)} <= {(127,) * 3, (128,) * 3}
    assert len(pictures(shown.html)) == 2 and "save('page.html')" in repr(shown)


def test_a_picture_alone_is_shown_and_saved_and_a_video_moves(tmp_path):
    ones = (GREY[0], Image.new("RGB", (9, 9)), np.zeros((9, 9, 3), np.uint8))
    assert [len(pictures(flowrl.show(one).html)) for one in ones] == [1, 1, 1]
    video = torch.rand(1, 100, 3, 16, 16)
    shown = flowrl.show(
        video, flowrl.score(video, ["red"], {"red": lambda m, p, c: m.sum((1, 2, 3, 4))})
    )
    assert pictures(shown.html)[0].n_frames == 48
    assert shown.save(tmp_path / "shown.html").read_text() == shown._repr_html_()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"media": GREY[:, :2]}, r"media has shape \(2, 2, 16, 16\); give pictures \(B, 3, H, W\)"),
        ({"media": torch.zeros(0, 3, 8, 8)}, r"media has shape \(0, 3, 8, 8\)"),
        ({"media": GREY.log() * torch.nan}, r"media has NaN or infinite values at \[0, 1\]"),
        ({"media": GREY * 4 - 3}, r"media spans \[-1, -1\]; .* in \[0, 1\]"),
        ({"media": "a.png"}, "media: a str is no numbers"),
        ({"media": [GREY[0], GREY[0, :, :8]]}, "media: a list is no numbers .*equal size"),
        ({"media": [Image.new("RGB", (8, 8)), Image.new("RGB", (9, 8))]}, "images of one size"),
        ({"media": GREY, "scores": [1.0]}, "2 samples but 1 scores; give one each"),
        ({"media": GREY, "scores": ["a", "b"]}, "scores: a list is no numbers"),
        ({"media": GREY, "prompts": ["a"]}, "2 samples but 1 prompts; give one each"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value,
)
def test_what_cannot_be_shown_is_said(given, said):
    with pytest.raises(ValueError, match=said) as error:
        flowrl.show(**given)
    assert "\n" not in str(error.value)


def test_an_iteration_shows_its_pictures_with_scores(trained):
    _, it, _ = trained
    html = it._repr_html_()
    total = [f"{value:.3g}" for value in it.rewards.total.tolist()]
    assert [score for score, _ in texts(html)] == total and len(pictures(html)) == 8
    assert [text for _, text in texts(html)] == [it.batch.text[g] for g in it.rollout.group]
    for media, count in ((torch.randn(8, 20, 2) * 9, 8), (GREY.log() * torch.nan, 2)):
        assert len(pictures(dataclasses.replace(it, shown=media)._repr_html_())) == count
    for media in (torch.empty(0), torch.rand(8, 5)):  # samples from files, numbers
        assert dataclasses.replace(it, shown=media)._repr_html_() is None


def test_a_tree_has_a_picture_at_each_stored_state_and_forks_where_the_plan_does(trained):
    trainer, it, _ = trained
    html = flowrl.show_tree(trainer.policy, it.rollout, it.rewards, prompt=1).html
    paths = [path_of(it.rollout, i) for i in (it.rollout.group == 1).nonzero().flatten().tolist()]
    states = {state for path in paths for state in path}
    assert len(pictures(html)) == len(states) and html.count("<line") == len(states) - 1
    assert len(paths) == 4 and len({path[0] for path in paths}) == 1
    assert len({path[1] for path in paths}) == 2  # the first step forks
    place = list(dict.fromkeys(sum(paths, []))).index(paths[0][-1])
    drawn = torch.tensor(np.asarray(pictures(html)[place])).permute(2, 0, 1) / 255
    assert (drawn - it.shown[4]).abs().max() < 0.02  # the end of a path is the sample itself
    with pytest.raises(ValueError, match="prompt=2; the rollout has 0 to 1"):
        flowrl.show_tree(trainer.policy, it.rollout, prompt=2)


def test_chains_and_samples_alone_have_a_tree_too(tmp_path):
    trainer = small.trainer(tmp_path / "run", "nft", iterations="1")
    it = next(iter(trainer))
    html = flowrl.show_tree(trainer.policy, it.rollout, it.rewards).html
    assert len(pictures(html)) == 2 and "<line" not in html  # nft stores the samples alone


def test_a_run_shows_the_head_of_its_report(trained, capsys, tmp_path):
    run = trained[2]
    html = run._repr_html_()
    heads = re.findall(r"&lt;h2&gt;(.*?)&lt;", html)
    assert heads == ["Result", "Before and after", "Learning curves"]
    assert html.startswith("<iframe") and html.count("<") == 2  # the page is inside an attribute
    run.show()
    assert capsys.readouterr().out.strip() == str(run.path / "report.html")
    for path, said in ((tmp_path / "gone", "is not a folder"), (tmp_path, "does not hold a run")):
        with pytest.raises(ValueError, match=said):
            flowrl.Run(path=path).show()


def test_in_a_notebook_progress_is_one_output_that_changes(monkeypatch):
    shown = []

    class Place:
        def update(self, data, raw):
            shown.append(data["text/plain"])

    monkeypatch.setattr(log, "in_notebook", lambda: True)
    monkeypatch.setattr("IPython.display.display", lambda data, raw, display_id: Place())
    with log.Progress(4) as bar:
        for i in range(1, 5):
            bar.update(i, 3.0, reward=0.5)
    assert shown[0] == "━━━━━─────────────── train 1/4  reward 0.5, 3 s, 0:00:09 left"
    assert shown[-1] == "━" * 20 + " train 4/4  reward 0.5, 3 s" and len(shown) == 2
