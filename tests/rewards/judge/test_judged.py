"""What judges are shown: captions in texts, frames of a video, texts that belong to a model."""

import pytest

from flowrl.rewards.judge.client import text
from flowrl.rewards.judge.completion import Reply
from flowrl.rewards.judge.reward import filled, interleaved, read_template, spaced


def test_a_prompt_is_filled_in_wherever_the_caption_goes_and_nowhere_else():
    assert (
        filled('[{prompt}] [{}] [{request}] [{instruction}] {"a": 1} {other}', "x{}y\\1")
        == '[x{}y\\1] [x{}y\\1] [x{}y\\1] [x{}y\\1] {"a": 1} {other}'
    )
    parts = interleaved("for {prompt}: <image>, <image>", "an <image> tag", [{"n": 1}, {"n": 2}])
    assert parts == [text("for an <image> tag: "), {"n": 1}, text(", "), {"n": 2}]


@pytest.mark.parametrize(("total", "count"), [(81, 8), (8, 8), (5, 8), (49, 8), (16, 1), (100, 16)])
def test_frames_are_spaced_as_numpy_and_the_scripts_of_unifiedreward_space_them(total, count):
    import numpy as np

    assert spaced(total, count) == np.linspace(0, total - 1, min(total, count), dtype=int).tolist()
    assert spaced(total, count, ends=False) == [
        int(i * total / min(total, count)) for i in range(min(total, count))
    ]


def test_a_template_must_be_there_be_text_and_say_where_the_caption_goes(tmp_path):
    read = {"reward": "some", "setting": "template", "origin": "the text of X"}
    file = tmp_path / "t.txt"
    with pytest.raises(
        ValueError, match="save the text of X as a text file and set reward.some.template"
    ):
        read_template(None, **read)
    with pytest.raises(ValueError, match="there is no such file; save the text of X there"):
        read_template(str(file), **read)
    file.write_bytes(b"\xff\xfe{prompt}")
    with pytest.raises(ValueError, match="is not a text file"):
        read_template(str(file), **read)
    file.write_text("Rate the picture.\n")
    with pytest.raises(
        ValueError, match=r"does not say where the caption goes: write \{prompt\} there"
    ):
        read_template(str(file), **read)
    assert read_template(str(file), places=False, **read) == "Rate the picture.\n"
    file.write_text("Rate {prompt}: <image>")
    with pytest.raises(
        ValueError, match="has 1 <image> marks; 2 pictures are shown, so write <image> 2 times"
    ):
        read_template(str(file), images=2, **read)


def test_a_template_that_belongs_to_a_model_is_compared_with_it(tmp_path):
    import hashlib

    read = {"reward": "some", "setting": "template", "origin": "the text of X"}
    texts = ["Rate {prompt}.", "Rate {}."]
    sums = [hashlib.sha256(t.encode()).hexdigest()[:16] for t in texts]
    file = tmp_path / "t.txt"
    for t in texts:
        file.write_text(f"{t}\n")  # an editor adds a line end
        assert read_template(str(file), sha256=sums, **read) == t
    file.write_text("Rate {prompt}!")
    with pytest.raises(
        ValueError,
        match=f"not the text that the model was trained with: sha256 .* expected {sums[1]}",
    ):
        read_template(str(file), sha256=sums, **read)


@pytest.mark.parametrize(("cut", "finished"), [(False, "Good.\nFinal Score: 1"), (True, "Good.")])
def test_the_last_line_of_a_reply_that_was_cut_is_not_read(cut, finished):
    """ "Final Score: 1" may have become 10."""
    assert Reply(text="Good.\nFinal Score: 1", tokens=None, cut=cut).finished == finished
