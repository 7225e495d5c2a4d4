"""`flowrl score` on videos and animated pictures; what it shows while it works."""

import logging
import warnings
from pathlib import Path

import pytest
import small
import torch
from image_files import in_an_empty_folder, lines, noise  # noqa: F401  a fixture for every test

from flowrl.cli.main import app  # noqa: F401  imported before a test changes folders
from flowrl.data import scored_dataset
from flowrl.data.media import image_size, save

REWARD = """
import logging
import warnings

import flowrl

@flowrl.reward(scale="frames + brightness")
def mine(media, prompts, context=None):
    warnings.warn("a warning of a library")
    logging.getLogger("open_clip").warning("a message of a library")
    frames = media.shape[1] if media.ndim == 5 else 0
    return media.flatten(1).mean(1) + frames
"""


def film(name, frames):
    """Frames of rising brightness: frame i is i / 10."""
    levels = torch.arange(frames)[:, None, None, None] / 10
    return save(levels.expand(frames, 3, 16, 16), name)


@pytest.fixture
def mine():
    Path("mine.py").write_text(REWARD)
    return ["--prompt", "x", "--reward", "mine.py:mine"]


def test_videos_are_scored_by_frames_evenly_spaced_from_the_first_to_the_last(mine):
    """Of 9 frames, 3 are 0, 4 and 8: mean brightness 0.4."""
    noise("imgs/a.png"), film("imgs/b.gif", 9), film("imgs/c.gif", 2)
    result = small.invoke("score", "imgs", *mine, "--frames", "3", "-o", "out.jsonl")
    assert result.exit_code == 0, result.output
    a, b, c = lines("out.jsonl")
    assert a["total"] < 1
    assert b["total"] == pytest.approx(3.4, abs=0.01)
    assert c["total"] == pytest.approx(2.05, abs=0.01)


def test_a_video_that_a_reward_does_not_take_is_left_out_by_name():
    noise("imgs/a.png"), film("imgs/b.gif", 2)
    words = ["score", "imgs", "--prompt", "a red circle", "--reward", "shapes", "-o", "out"]
    result = small.invoke(*words)
    assert result.exit_code == 1
    said = 'flowrl: left out: imgs/b.gif: reward "shapes" takes images, and the media are videos'
    assert said in result.stderr
    assert [line["file"] for line in lines("out/scores.jsonl")] == ["media/a.png"]


def test_training_takes_no_video_for_a_picture():
    film("b.gif", 2), film("c.mp4", 2)
    words = ["score", "b.gif", "--prompt", "x", "--reward", "jpeg", "-o", "out"]
    assert small.invoke(*words).exit_code == 0
    (path,) = scored_dataset.load("out").paths
    with pytest.raises(ValueError, match=r"b.gif is animated \(2 frames\)"):
        image_size(path)
    with pytest.raises(ValueError, match="c.mp4 is a video, and one picture is needed"):
        image_size(Path("c.mp4"))


def test_progress_is_shown_and_libraries_are_heard_only_when_asked(mine, caplog):
    noise("a.png")
    level = logging.getLogger().level
    for more, heard in (([], False), (["--verbose"], True)):
        caplog.clear()
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            result = small.invoke("score", "a.png", *mine, *more)
        assert result.exit_code == 0 and "score 1/1" in result.stderr
        assert ("a message of a library" in caplog.messages) == heard
        assert ("a warning of a library" in [str(w.message) for w in warned]) == heard
    assert logging.getLogger().level == level
