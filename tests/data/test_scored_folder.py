"""`flowrl score`: every image finds its prompt, scores are those of the rewards, the best of each
prompt are kept, mistakes are named."""

import json
import os
import shlex
from fractions import Fraction
from pathlib import Path

import pytest
import small
import torch
from image_files import (  # noqa: F401  a fixture for every test
    in_an_empty_folder,
    lines,
    listing,
    noise,
)
from PIL import Image

from flowrl.cli.main import app  # noqa: F401  imported before a test changes folders
from flowrl.data import scored_folder, tables
from flowrl.data.media import ORIENTATION, image_size, read_image, read_media, save
from flowrl.data.samples import Sample
from flowrl.data.scored_folder import ScoredSample
from flowrl.report import terminal
from flowrl.rewards import load_set, score
from flowrl.rewards.core import files
from flowrl.shapes import prompts
from flowrl.shapes.scenes import render


def scored_as(*totals):
    """(prompt, total) pairs as scored samples 0.png, 1.png ..."""
    return [
        ScoredSample(
            sample=Sample(path=Path(f"{i}.png"), prompt=prompt, meta={}), scores={}, total=total
        )
        for i, (prompt, total) in enumerate(totals)
    ]


def names(items):
    return [item.sample.path.stem for item in items]


def spread(media, prompts, context):
    return media.flatten(1).std(1)


# ---------------------------------------------------------------------------
# keep-top


def test_the_best_of_each_prompt_are_kept_and_at_least_one():
    """Of a's five, 40% are two: totals 9 and 5. Of b's two, 40% is .8: one, and of the two equal
    ones the first. c has one."""
    items = scored_as(
        ("a", 1), ("b", 2), ("a", 9), ("a", 3), ("b", 2), ("c", -7), ("a", 5), ("a", 4)
    )
    assert names(scored_folder.keep_top(items, Fraction(2, 5))) == ["1", "2", "5", "6"]
    assert names(scored_folder.keep_top(items, 1)) == ["1", "2", "5"]
    assert names(scored_folder.keep_top(items, 3)) == ["1", "2", "4", "5", "6", "7"]
    assert scored_folder.keep_top(items, Fraction(1)) == items


def test_shares_are_exact():
    """29% of 100 is 29, though 0.29 * 100 = 28.999999999999996 in floating point."""
    items = scored_as(*(("a", i) for i in range(100)))
    assert int(0.29 * 100) == 28
    assert names(scored_folder.keep_top(items, scored_folder.parse_keep("29%"))) == [
        str(i) for i in range(71, 100)
    ]
    assert scored_folder.parse_keep("12.5%") == Fraction(1, 8)
    assert scored_folder.parse_keep("3") == 3
    assert scored_folder.parse_keep("100%") == 1


# ---------------------------------------------------------------------------
# scores


def test_chunks_and_sizes_change_no_score_and_no_order():
    """Three sizes in turn, chunks of 1 to 64: what each file scores is what `flowrl.score` says of
    it alone."""
    paths = [noise(f"{i}.png", seed=i, height=16 + 8 * (i % 3)) for i in range(13)]
    samples = [Sample(path=path, prompt="x", meta={}) for path in paths]
    rewards = load_set({"jpeg": 1.0, "spread": {"reward": spread, "weight": 2.0}})
    alone = [score(read_image(path)[None], ["x"], rewards) for path in paths]
    for chunk in (1, 2, 5, 64):
        scored, problems = files.score_files(samples, rewards, chunk=chunk)
        assert not problems and [item.sample for item in scored] == samples
        assert [item.scores["jpeg"] for item in scored] == [float(one.raw["jpeg"]) for one in alone]
        assert [item.total for item in scored] == pytest.approx(
            [float(one.total) for one in alone], rel=1e-6
        )


def test_few_images_are_in_memory_at_once():
    """40 files of five sizes, chunks of 3: never more than 4 x 3 images are read and not yet
    scored, and no chunk holds more than 3."""
    samples = [
        Sample(path=noise(f"{i}.png", height=8 + i % 5), prompt="x", meta={}) for i in range(40)
    ]
    waiting, most, sizes, read = 0, 0, [], read_media

    def counted(path, **options):
        nonlocal waiting, most
        waiting += 1
        most = max(most, waiting)
        return read(path, **options)

    def reward(media, prompts, context):
        nonlocal waiting
        waiting -= len(media)
        sizes.append(len(media))
        return media.flatten(1).mean(1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "read_media", counted)
        scored, _ = files.score_files(samples, load_set({"mean": reward}), chunk=3)
    assert len(scored) == 40
    assert most <= files.WAITING * 3
    assert waiting == 0
    assert max(sizes) == 3
    assert sizes.count(3) >= 10


def test_a_photo_is_read_upright_and_its_head_tells_the_same_size(tmp_path):
    """EXIF orientation 6: stored lying, 8 wide and 4 high; upright it is 4 wide and 8 high, its top
    what was stored on the left."""
    stored = Image.new("RGB", (8, 4), "white")
    stored.paste("black", (0, 0, 4, 4))
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    stored.save("photo.jpg", exif=exif, quality=95)
    image = read_image(Path("photo.jpg"))
    assert image.shape == (3, 8, 4) and image_size(Path("photo.jpg")) == (4, 8)
    assert image[:, :4].max() < 0.1 and image[:, 4:].min() > 0.9
    assert image_size(noise("plain.png", height=5, width=7)) == (7, 5)


def test_a_broken_image_is_named_and_skipped_and_the_exit_code_is_1():
    whole = [noise(f"{name}.png", seed=ord(name)) for name in "acd"]
    Path("b.png").write_bytes(whole[0].read_bytes()[:200])
    Path("e.png").write_text("no picture")
    Path("f.png").write_bytes(whole[0].read_bytes()[:90])
    result = small.invoke("score", ".", "--prompt", "x", "--reward", "jpeg", "-o", "out")
    said = [line for line in result.stderr.splitlines() if line.startswith("flowrl: left out: ")]
    assert result.exit_code == 1 and len(said) == 3
    assert all(f"{name}.png cannot be read" in line for name, line in zip("bef", said, strict=True))
    found = [line["file"] for line in lines("out/scores.jsonl")]
    assert found == ["media/a.png", "media/c.png", "media/d.png"]
    assert "3 of 6 images: out/scores.jsonl" in result.stdout


def test_an_image_that_a_reward_cannot_score_is_left_out_unless_the_weight_is_0():
    samples = [Sample(path=noise(f"{i}.png", seed=i), prompt=f"p{i}", meta={}) for i in range(3)]

    def picky(media, prompts, context):
        return torch.tensor([float("nan") if prompt == "p1" else 1.0 for prompt in prompts])

    scored, problems = files.score_files(samples, load_set({"picky": picky}))
    assert [item.sample.prompt for item in scored] == ["p0", "p2"]
    (problem,) = problems
    said = "left out: 1.png could not be scored: picky: NaN or inf for 1 of 3 samples"
    assert problem.startswith(said)
    rewards = load_set({"jpeg": 1.0, "picky": {"reward": picky, "weight": 0}})
    scored, problems = files.score_files(samples, rewards)
    assert len(scored) == 3
    assert problems == ["1.png has no score of picky: picky: NaN or inf for 1 of 3 samples"]
    scored_folder.write(Path("out"), scored, {"jpeg": 1.0, "picky": 0.0})
    assert [line["scores"]["picky"] for line in lines("out/scores.jsonl")] == [1.0, None, 1.0]


@pytest.mark.parametrize("suffix", ["png", "webp"])
def test_a_broken_exif_is_named_like_a_broken_image(suffix):
    Image.new("RGB", (8, 8)).save(f"a.{suffix}", exif=b"garbage!")
    noise("b.png")
    result = small.invoke("score", ".", "--prompt", "x", "--reward", "jpeg", "-o", "out")
    assert result.exit_code == 1
    said = f"flowrl: left out: a.{suffix} cannot be read: SyntaxError: not a TIFF file"
    assert said in result.stderr
    assert [line["file"] for line in lines("out/scores.jsonl")] == ["media/b.png"]
    with pytest.raises(ValueError, match=f"a.{suffix} cannot be read: SyntaxError"):
        image_size(Path(f"a.{suffix}"))


DYING = """
import flowrl
from flowrl.rewards import RewardUnavailable

calls = []

@flowrl.reward(scale="until the judge is gone")
def dying(media, prompts, context=None, *, lives=1):
    calls.append(prompts)
    if len(calls) > lives:
        raise RewardUnavailable("the judge is gone")
    return media.flatten(1).mean(1)
"""


def test_what_was_scored_before_a_judge_went_away_is_kept_and_the_rest_is_named():
    Path("mine.py").write_text(DYING)
    for i in range(5):
        noise(f"imgs/{i}.png", seed=i)
    words = ["score", "imgs", "--prompt", "x", "--reward", "mine.py:dying", "--chunk", "2", "-o"]
    result = small.invoke(*words, "out")
    said = [line for line in result.stderr.splitlines() if line.startswith("flowrl: ")]
    assert result.exit_code == 1
    assert said == [
        f"flowrl: left out: imgs/{i}.png was not scored: the judge is gone" for i in (2, 3, 4)
    ]
    found = [line["file"] for line in lines("out/scores.jsonl")]
    assert found == ["media/0.png", "media/1.png"]
    assert "2 of 5 images" in result.stdout
    result = small.invoke(*words, "none")  # by now it is gone from the start
    assert result.exit_code == 1
    assert result.stderr.strip() == "flowrl: the judge is gone"
    assert not Path("none").exists()


def test_the_list_is_written_before_the_table_that_may_have_no_place(monkeypatch):
    noise("a.png")
    full = (_ for _ in ()).throw
    monkeypatch.setattr(terminal, "score_table", lambda *_: full(OSError(28, "no space")))
    result = small.invoke("score", "a.png", "--prompt", "x", "--reward", "jpeg", "-o", "out")
    assert result.exit_code == 1
    assert len(lines("out/scores.jsonl")) == 1


def test_a_list_that_cannot_be_written_costs_no_score_and_the_exit_code_is_1(monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    noise("a.png")
    monkeypatch.setattr(os, "replace", full)
    result = small.invoke("score", "a.png", "--prompt", "x", "--reward", "jpeg", "-o", "out")
    assert result.exit_code == 1 and "a.png" in result.stdout
    said = "flowrl: out/media/a.png could not be written (No space left on device), so what was"
    assert result.stderr.splitlines()[-1].startswith(f"{said} there is unchanged; free some space")
    assert not list(Path("out").rglob("*.*"))


def test_nothing_is_written_when_nothing_could_be_scored():
    Path("a.png").write_text("no picture")
    result = small.invoke("score", "a.png", "--prompt", "x", "--reward", "jpeg", "-o", "out")
    assert result.exit_code == 1 and not Path("out").exists()


# ---------------------------------------------------------------------------
# the folder made


def test_a_scored_folder_holds_copies_scores_and_what_rewards_read_and_can_be_moved():
    world = prompts.find("a red circle")
    scene = render(prompts.scene(world, torch.Generator().manual_seed(0)))
    save(scene, "one/a.png"), save(1 - scene, "two/a.png")
    words = ["--prompt", "a red circle", "--reward", "shapes", "--reward", "jpeg=0.5"]
    result = small.invoke("score", "one", "two", *words, "-o", "made/out")
    assert result.exit_code == 0, result.output
    a, b = lines("made/out/scores.jsonl")
    assert a["file"] == "media/a.png" and b["file"] == "media/a-2.png"
    assert Path("made/out/media/a-2.png").read_bytes() == Path("two/a.png").read_bytes()
    assert a["scores"]["shapes"] == 1
    assert b["scores"]["shapes"] < 1
    assert a["weights"] == {"shapes": 1.0, "jpeg": 0.5}
    assert a["total"] == pytest.approx(1 + 0.5 * a["scores"]["jpeg"])
    assert a["include"] == world["include"]
    assert a["task"] == "colors"
    for cell in ("one/a.png", "jpeg x 0.5", "shapes", "total", f"{a['total']:.4g}"):
        assert cell in result.stdout
    Path("made/out").rename("moved")  # and scored again there, by its own list
    again = small.invoke("score", "moved", "--reward", "shapes", "--keep-top", "1", "-o", "best")
    assert again.exit_code == 0, again.output
    (best,) = lines("best/scores.jsonl")
    assert best["scores"] == {"shapes": 1.0}
    assert best["weights"] == {"shapes": 1.0}
    assert best["task"] == "colors"


def test_a_list_without_copies_names_the_files_where_they_are():
    noise("imgs/a.png")
    words = ["score", "imgs", "--prompt", "x", "--reward", "jpeg", "-o", "lists/mine.jsonl"]
    assert small.invoke(*words).exit_code == 0
    (line,) = lines("lists/mine.jsonl")
    assert line["file"] == "../imgs/a.png"
    assert sorted(p.name for p in Path().rglob("*.*")) == ["a.png", "mine.jsonl"]


# ---------------------------------------------------------------------------
# files and prompts


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("nowhere --prompt x", "nowhere does not exist; give image files, or a folder of them"),
        ("empty --prompt x", "empty holds no image (.png, .jpg, .jpeg, .webp, .gif, .mp4"),
        ("imgs/notes.txt --prompt x", "imgs/notes.txt is not an image file"),
        (
            "imgs",
            "imgs has no prompt; give --prompt TEXT for all images, --prompts FILE.jsonl or"
            " a scores.jsonl or metadata.jsonl in it",
        ),
        (
            "imgs/a.png",
            "imgs/a.png has no prompt; give --prompt TEXT for all images, --prompts FILE.jsonl",
        ),
        ("imgs --prompt ' '", "--prompt is empty"),
        ("imgs --prompt x --prompts some.jsonl", "not both"),
        ("imgs --prompts nowhere.jsonl", "prompt file nowhere.jsonl does not exist"),
        ("imgs --prompts imgs/notes.txt", 'imgs/notes.txt, line 1 needs a "file"'),
        ("imgs --prompts broken.jsonl", "broken.jsonl, line 3 is not JSON"),
        ("imgs --prompts nofile.jsonl", 'nofile.jsonl, line 2 needs a "file"'),
        ("imgs --prompts some.jsonl", "imgs/b.png has no line in some.jsonl"),
        (
            "imgs/a.png other --prompts names.jsonl",
            "names.jsonl, line 1 names both imgs/a.png and other/a.png",
        ),
        ("imgs imgs/a.png --prompt x", 'imgs/a.png is given twice for the prompt "x"'),
        ("listed", "listed/b.png has no line in listed/scores.jsonl"),
        ("imgs --prompt x --keep-top 0%", "--keep-top 0% should be a share"),
        ("imgs --prompt x --keep-top 120%", "--keep-top 120% should be a share"),
        ("imgs --prompt x --keep-top 0.2", "--keep-top 0.2 should be a share"),
        ("imgs --prompt x --keep-top some", "--keep-top some should be a share"),
        ("imgs --prompt x --keep-top 1/0%", "--keep-top 1/0% should be a share"),
        ("imgs --prompt x --reward jpg", 'unknown reward "jpg"; did you mean "jpeg"'),
        (
            "imgs --prompt x --reward shapes=much",
            'reward "shapes=much" should be NAME, NAME=WEIGHT',
        ),
        ("imgs --prompt x --reward shapes=nan", "weight=nan is not a finite number"),
        ("imgs --prompt x --reward jpeg=2", 'reward "jpeg": "jpeg" is given twice'),
        ("imgs --prompt 'a read circle' --reward shapes", 'did you mean "a red circle"'),
        (
            "imgs --prompt x -o imgs",
            "-o imgs holds imgs/a.png itself; choose another folder, or -o imgs/scores.jsonl",
        ),
        (
            "imgs --prompt x -o done",
            "done/scores.jsonl exists; choose another place for -o, or remove it",
        ),
        ("imgs --prompt x -o some.jsonl", "some.jsonl exists"),
        ("imgs --prompt x -o imgs/notes.txt", "imgs/notes.txt is a file"),
    ],
)
def test_a_mistake_is_one_sentence_and_nothing_is_written(tmp_path, words, sentence):
    for name in ("imgs/a.png", "imgs/b.png", "other/a.png", "listed/a.png", "listed/b.png"):
        noise(name)
    Path("empty").mkdir()
    Path("imgs/notes.txt").write_text("x")
    a = {"file": "imgs/a.png", "prompt": "x"}
    listing("some.jsonl", a), listing("done/scores.jsonl", a)
    listing("nofile.jsonl", a, {"prompt": "x"})
    for name in ("names.jsonl", "listed/scores.jsonl"):
        listing(name, {"file": "a.png", "prompt": "x"})
    Path("broken.jsonl").write_text(json.dumps(a) + '\n\n{"file": \n')
    before = sorted(tmp_path.rglob("*"))
    result = small.invoke("score", *shlex.split(words), "--reward", "jpeg")
    assert result.exit_code == 2 and sorted(tmp_path.rglob("*")) == before, result.output
    said = [line for line in result.output.splitlines() if line.startswith("flowrl: ")]
    assert len(said) == 1 and sentence in said[0], result.output


def test_prompts_that_are_cut_are_counted_over_the_whole_list(caplog, monkeypatch):
    monkeypatch.setattr("flowrl.rewards.core.tokens._told", set())
    chosen = load_set({"clip": {"preset": "shapes"}, "preference": 1.0})
    long = "a red circle and " * 9 + "a blue square"
    texts = ["a red circle", long, "a blue square", f"{long} again", long]
    samples = [Sample(path=noise(f"{i}.png"), prompt=text, meta={}) for i, text in enumerate(texts)]
    files.score_files(files.with_meta(samples, chosen), chosen, chunk=2)
    told = [message.partition(" tokens")[0] for message in caplog.messages]
    assert told == ["clip reads 16", "preference reads 16"]
    assert all(": 2 of 4 are longer (up to " in message for message in caplog.messages)


def test_a_reward_that_compares_groups_cannot_score_files():
    class Compare:
        needs = frozenset({"group"})

        def __call__(self, media, prompts, context):
            return media.flatten(1).mean(1)

    with pytest.raises(ValueError, match='needs the context column "group"'):
        files.with_meta([], load_set({"compare": Compare()}))


def test_a_scored_folder_finds_the_pictures_that_its_prompts_name():
    for name in ("made/a.png", "sources/x.png", "sources/y.png"):
        noise(name)
    more = {"image": "sources/x.png", "conditions": {"mask_image": ["sources/y.png"], "s": "y.png"}}
    sample = Sample(path=Path("made/a.png"), prompt="remove it", meta=more)
    item = ScoredSample(sample=sample, scores={"jpeg": 1.0}, total=1.0)
    path = scored_folder.write(Path("deep/best"), [item], {"jpeg": 1.0})
    ((_, line),) = tables.read(path)
    assert [Path(line["image"]).resolve(), Path(line["conditions"]["mask_image"][0]).resolve()] == [
        Path("sources/x.png").resolve(),
        Path("sources/y.png").resolve(),
    ]
    assert line["conditions"]["s"] == "y.png"
