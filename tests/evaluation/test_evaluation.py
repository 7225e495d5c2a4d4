"""Before and after are compared image by image: same prompts, same noise, whole prompts
resampled."""

import json

import numpy as np
import pytest
import small
import torch

from flowrl import load_policy
from flowrl.data.media import read_frames
from flowrl.evaluation.held_out import Evaluation, evaluate
from flowrl.evaluation.record import add_row, save_images, shown_prompts
from flowrl.report import grids
from flowrl.rewards import load_set
from flowrl.runtime.statistics import mean_interval
from flowrl.runtime.store import files
from flowrl.runtime.store.run_folder import read_evaluation
from flowrl.shapes.prompts import eval_prompts

PROMPTS = eval_prompts()[40:45]
REWARDS = load_set({"shapes": 1.0, "jpeg": 0.1})


@pytest.fixture(scope="module")
def policy():
    torch.set_num_threads(1)
    return load_policy("shapes-sd3")


def run(policy, images=12, **options):
    return evaluate(policy, PROMPTS, REWARDS, images=images, **{"steps": 3, **options})


def result(before, prompt=None, images=None):
    values = {name: torch.tensor(value) for name, value in before.items()}
    count = len(next(iter(values.values())))
    return Evaluation(
        values=values,
        prompt=prompt or [0] * count,
        images=torch.rand(2, 3, 8, 8) if images is None else images,
        nfe=3,
    )


def written(folder, name, values, rows=None, prompts=("a",), **setting):
    """A row of evaluation.json with these values of reward r -> the whole record."""
    found = result({"r": values} if isinstance(values, list) else values, rows)
    own = [{"prompt": p} if isinstance(p, str) else p for p in prompts]
    return add_row(folder, name, found, own, **setting)


def test_image_i_shows_prompt_i_modulo_p_and_every_part_is_reported(policy):
    made = run(policy, guidance=2.0)
    assert made.prompt == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1] and made.nfe == 6
    assert made.values.keys() == {"shapes", "jpeg", "total", "shapes/partial", "shapes/strict"}
    assert all(v.shape == (12,) and v.isfinite().all() for v in made.values.values())
    both = (made.values["shapes/partial"] + made.values["shapes/strict"]) / 2
    torch.testing.assert_close(made.values["shapes"], both)
    torch.testing.assert_close(made.values["total"], both + 0.1 * made.values["jpeg"])
    assert made.metrics().keys() == {f"eval/{name}" for name in made.values}
    assert shown_prompts(PROMPTS, 12) == [p["prompt"] for p in PROMPTS]
    assert made.images.shape == (5, 3, 64, 64)


def test_an_image_does_not_depend_on_chunks_or_on_how_many_there_are(policy):
    whole = run(policy)
    for other in (run(policy, micro=5, decode=3), run(policy, images=7)):
        count = len(other.prompt)
        torch.testing.assert_close(other.images, whole.images, rtol=0, atol=1e-4)
        for name, value in other.values.items():
            # a byte at the edge of a JPEG or of the verifier may turn over
            close = (value - whole.values[name][:count]).abs() < 1e-3
            assert close.float().mean() >= 0.9, name
    assert (run(policy, seed=1).images - whole.images).abs().mean() > 0.01


def test_two_policies_start_from_the_same_noise(policy):
    seen, velocity = [], policy.velocity

    def watched(x, sigma, cond, rows, **options):
        seen.append(x.clone())
        return velocity(x, sigma, cond, rows, **options) * len(seen)

    policy.velocity = watched
    try:
        run(policy, steps=1)
        run(policy, steps=1)
    finally:
        del policy.velocity
    assert torch.equal(seen[0], seen[1]) and len(seen) == 2


def test_a_row_is_written_atomically_and_replaces_its_namesake(tmp_path, monkeypatch):
    prompts = [{"prompt": "a", "task": "x"}, {"prompt": "b", "task": "y"}]
    own = {"rows": [0, 1, 0, 1], "prompts": prompts}
    written(tmp_path, "before", [0.0, 1.0, 0.0, 1.0], **own, guidance="none")
    written(tmp_path, "before, guided", [1.0, 1.0, 0.0, 1.0], **own, guidance=3.0)
    record = written(tmp_path, "before", [0.0, 0.0, 0.0, 1.0], **own, guidance="none")
    assert record == json.loads((tmp_path / "evaluation.json").read_text())
    assert "paired" not in record
    assert [row["name"] for row in record["rows"]] == ["before, guided", "before"]
    row = record["rows"][1]
    assert row["metrics"]["r"]["mean"] == 0.25
    assert row["tasks"]["r"] == {"x": 0.0, "y": 0.5}
    assert row["guidance"] == "none"
    assert row["images"] == 4 and row["nfe"] == 3 and row["values"]["r"] == [0, 0, 0, 1]

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(files.os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        written(tmp_path, "after", [1.0, 1.0, 1.0, 1.0], **own)
    assert json.loads((tmp_path / "evaluation.json").read_text()) == record


def test_the_paired_difference_leaves_pairs_with_an_invalid_side_out(tmp_path):
    """Valid pairs: (0, 1), (0, 1), (1, 1): the mean difference is 2/3, whatever the invalid sides
    would have been."""
    nan, own = float("nan"), {"rows": [0, 1, 2, 3, 4], "prompts": "abcde"}
    written(tmp_path, "before", {"r": [0.0, nan, 0.0, 1.0, 0.5], "s": [nan] * 5}, **own)
    values = {"r": [1.0, 1.0, 1.0, 1.0, nan], "s": [1.0] * 5}
    record = written(tmp_path, "after", values, **own)
    paired = record["paired"]
    assert paired.keys() == {"r"} and paired["r"]["n"] == paired["r"]["clusters"] == 3
    assert paired["r"]["difference"] == pytest.approx(2 / 3)
    assert paired["r"]["ci"][0] <= 2 / 3 <= paired["r"]["ci"][1]
    before = record["rows"][0]
    assert before["values"]["r"][1] is None
    assert before["metrics"]["r"]["invalid"] == 1
    assert "s" not in before["metrics"]
    json.loads(
        (tmp_path / "evaluation.json").read_text(),
        parse_constant=lambda c: pytest.fail(f"{c} is not JSON"),
    )


def test_rows_of_equal_text_are_one_cluster(tmp_path):
    """Data that repeats a text knows no more about new prompts: means and differences resample its
    two texts, not its four rows."""
    values, own = [0.0, 1.0, 0.0, 0.2, 0.1, 0.9, 0.0, 0.3], {"rows": [0, 1, 2, 3] * 2}
    written(tmp_path, "before", values, prompts="abaa", **own)
    record = written(tmp_path, "after", [1.0] * 8, prompts="abaa", **own)
    metric, paired = record["rows"][0]["metrics"]["r"], record["paired"]["r"]
    texts = list("abaa") * 2
    assert metric["clusters"] == paired["clusters"] == 2 and paired["n"] == 8
    rounded = np.asarray(torch.tensor(values).tolist())
    assert metric["ci"] == list(mean_interval(rounded, groups=texts, resamples=2000).ci)
    by_row = mean_interval(rounded, groups=[0, 1, 2, 3] * 2, resamples=2000).ci
    assert metric["ci"][1] - metric["ci"][0] > 1.2 * (by_row[1] - by_row[0])


@pytest.mark.parametrize(("prompts", "known"), [("aaaa", (False, False)), ("abcd", (True, False))])
def test_few_texts_have_no_p_and_one_has_no_interval(tmp_path, prompts, known):
    own = {"rows": [0, 1, 2, 3], "prompts": prompts}
    written(tmp_path, "before", [0.0, 0.1, 0.2, 0.3], **own)
    record = written(tmp_path, "after", [0.2, 0.4, 0.6, 0.8], **own)
    entry, paired = record["rows"][0]["metrics"]["r"], record["paired"]["r"]
    assert (paired["ci"] is not None, paired["p"] is not None) == known
    assert (entry["ci"] is not None) == known[0]
    assert read_evaluation(tmp_path) == json.loads(
        json.dumps(record)
    )  # null is a value that the file may hold


def test_the_held_out_prompts_of_the_world_hold_texts_several_times(tmp_path):
    held = eval_prompts()
    record = written(tmp_path, "before", [0.0, 1.0] * 64, list(range(128)), held)
    assert record["rows"][0]["metrics"]["r"]["clusters"] == len({p["prompt"] for p in held}) < 128


def test_a_damaged_record_is_named(tmp_path):
    (tmp_path / "evaluation.json").write_text("{")
    with pytest.raises(ValueError, match=r"evaluation.json was edited or damaged"):
        written(tmp_path, "before", [0.0])


def test_a_prompt_that_a_reward_cannot_read_costs_its_own_images_only(policy):
    broken = {"prompt": "a broken circle", "include": [{}]}
    made = evaluate(policy, [PROMPTS[0], broken, PROMPTS[1]], REWARDS, images=6, steps=2)
    for name in ("shapes", "total", "shapes/partial", "shapes/strict"):
        assert made.values[name].isnan().tolist() == [False, True, False] * 2, name
    assert not made.values["jpeg"].isnan().any()


def test_a_task_mean_leaves_invalid_images_out(tmp_path):
    prompts = [{"prompt": "a", "task": "x"}]
    record = written(tmp_path, "before", [1.0, float("nan"), 0.0], prompts=prompts)
    assert record["rows"][0]["tasks"]["r"] == {"x": 0.5}


def test_pictures_of_both_rows_are_put_side_by_side(tmp_path):
    prompts = [{"prompt": "a"}, {"prompt": "b"}]
    for name in ("before", "before, guided", "after"):
        made = result({"strict": [1.0, 0.0]}, [0, 1], torch.rand(2, 3, 64, 64))
        save_images(tmp_path, name, made, prompts)
    names = {p.name for p in (tmp_path / "samples").iterdir()}
    assert names >= {"before.png", "before_guided.png", "after.png", "before_after.png"}


def test_videos_are_kept_whole_and_prompts_with_them(tmp_path):
    prompts = [{"prompt": "a"}, {"prompt": "b"}]
    videos = torch.rand(2, 4, 3, 16, 32)
    save_images(tmp_path, "before", result({"r": [1.0, 0.5]}, [0, 1], videos), prompts)
    found = sorted((tmp_path / "samples" / "before").iterdir())
    assert [p.name for p in found] == ["00.mp4", "01.mp4"] and read_frames(found[1]).shape == (
        4,
        3,
        16,
        32,
    )
    with np.load(tmp_path / "samples" / "before.npz") as kept:
        assert kept["prompts"].tolist() == ["a", "b"] and kept["images"].shape == (2, 3, 16, 32)


@pytest.mark.parametrize(
    ("before", "after", "drawn"),
    [
        ({"r": [1.0, float("nan")]}, {"r": [1.0, 0.0]}, ([True, None], [True, False])),
        ({"r": [1.0, 0.0]}, {"r": [float("nan"), 0.0]}, ([True, False], [None, False])),
        ({"r": [float("nan")] * 2}, {"r": [1.0, 0.0]}, None),
        ({"r": [0.5, 0.0]}, {"r": [1.0, 0.0]}, None),
        (
            {"r": [1.0, 0.0], "s": [1.0, 1.0]},
            {"r": [0.5, 0.0], "s": [0.0, 1.0]},
            ([True, True], [False, True]),
        ),
    ],
)
def test_verdicts_are_drawn_of_the_same_value_on_both_sides_or_on_none(
    tmp_path, monkeypatch, before, after, drawn
):
    prompts, seen, draw = [{"prompt": "a"}, {"prompt": "b"}], [], grids.before_after
    monkeypatch.setattr(
        grids,
        "before_after",
        lambda *a, verdicts: seen.append(verdicts) or draw(*a, verdicts=verdicts),
    )
    save_images(tmp_path, "before", result(before, [0, 1]), prompts)
    save_images(tmp_path, "after", result(after, [0, 1]), prompts)
    assert seen == [drawn] and (tmp_path / "samples" / "before_after.png").exists()


def test_the_command_evaluates_a_run_that_has_no_row_after(tmp_path):
    made = small.trainer(tmp_path / "run", iterations="3", optimizer__lr="1e-2")
    for it in made:
        if it.number == 2:
            break  # as a kill between iterations: a checkpoint of the first, and no row "after"
    answer = small.invoke("evaluate", made.path)
    assert answer.exit_code == 0, answer.output
    record = json.loads((made.path / "evaluation.json").read_text())
    assert [r["name"] for r in record["rows"]] == [
        "before",
        "evaluate, 2 steps, guidance none, seed 0",
    ]
    assert "paired" not in record
    assert record["rows"][1]["values"] != record["rows"][0]["values"]
    assert "evaluate, 2 steps" in (made.path / "report.html").read_text(encoding="utf-8")


def test_the_command_adds_a_row_of_the_averaged_weights(tmp_path):
    made = small.trainer(tmp_path / "run", iterations="1", optimizer__lr="1e-2").run()
    answer = small.invoke("evaluate", made.path)
    assert answer.exit_code == 0, answer.output
    again = json.loads((made.path / "evaluation.json").read_text())["rows"][-1]
    assert again["name"].startswith("evaluate")
    assert again["values"] == small.values(made.path, "after") and again["steps"] == 2
    answer = small.invoke(
        "evaluate", made.path, "--images", 3, "--steps", 1, "--guidance", 2, "--seed", 4
    )
    assert answer.exit_code == 0, answer.output
    rows = json.loads((made.path / "evaluation.json").read_text())["rows"]
    assert [r["name"] for r in rows][2:] == [
        again["name"],
        "evaluate, 1 steps, guidance 2.0, seed 4",
    ]
    assert rows[-1]["images"] == 3
    assert np.isfinite(rows[-1]["values"]["jpeg"]).all()
