"""Two processes train what one trains: prompts are dealt out, statistics and gradients are
global."""

import contextlib
import json
import os
import signal

import masked
import processes
import pytest
import small
import torch
from torchvision.io import write_png

import flowrl
from flowrl.cli.main import app
from flowrl.config import load
from flowrl.rewards import load_set
from flowrl.runtime import signals
from flowrl.runtime.store import checkpoint
from flowrl.training import build, loop

TASKS = ("counting", "position")
RUN = {
    "iterations": "2",
    "batch__group": "3",
    "optimizer__eps": "1e-3",
}  # eps: Adam blows rounding up
RUNS = {
    "nft": {**RUN, "algorithm__std": "global"},
    # its groups lie whole in one process, but their features are gathered
    "flow_grpo": {
        **RUN,
        "algorithm__std": "group",
        "data__eval": "null",
        "diversity__features": "shapes",
        "diversity__novelty": "1",
        "diversity__entropy": "0.5",
        "watch__detectors": "[saturation,diversity,drift]",
    },
    # two trajectories of a prompt, each with its four completions
    "dense_grpo": {**RUN, "batch__group": "8", "data__eval": "null"},
    # the second update leaves out steps that have moved too far
    "flow_dppo": {
        **RUN,
        "batch__prompts": "4",
        "batch__updates": "2",
        "optimizer__lr": "0.03",
        "algorithm__window__size": "1",
        "algorithm__window__high": "2",
        "data__eval": "null",
    },
    # two anchors of a group, each compared with all of its members
    "neighbor_grpo": {**RUN, "algorithm__anchors": "2", "data__eval": "null"},
    # every group counts as flat, so that each process adds a fresh prompt of its own; the second
    # iteration trains groups of the first again
    "dgpo": {
        **RUN,
        "algorithm__steps": "2",
        "data__eval": "null",
        "draw__mode": "refill",
        "draw__rounds": "1",
        "draw__spread": "100",
        "replay__size": "1",
    },
}
# files in place of samples, or frozen teachers; no reward counts
RUNS |= {
    name: {**RUN, "data__eval": "null", "reward__jpeg__weight": "0", "batch__group": group}
    for name, group in {"opd": "2", "sft": "1", "dpo": "2"}.items()
}
# tokens of a module in a file
TOKENS = ("trace_rl", "unigrpo")
RUNS |= {name: {**RUN, "train__mode": "full", "data__eval": "null"} for name in TOKENS}
MIXED = {
    **RUN,
    "reward": "preference",
    "reward__preference__rounding": "false",
    "reward__climbed__name": "preference",
    "reward__climbed__rounding": "false",
    "reward__climbed__mode": "grad",
    "gradient__samples": "2",
    # ranks are those of all processes' samples
    "reward__saturation__weight": "0",
    "algorithm__kl_weight": "0.1",
    "algorithm__kl_gate__main": "preference",
    "algorithm__kl_gate__auxiliary": "[saturation]",
    "algorithm__kl_gate__share": "0.5",
    "data__eval": "null",
    "guard__check_rewards": "false",
}
SIGNALLED = {**RUNS["flow_grpo"], "iterations": "5", "checkpoint__every": "50"}
for method in RUNS:
    small.ALGORITHMS.setdefault(method, {})


def files(folder, algorithm):
    """Words of a run that name files of the folder: media that dgpo trains, too, five for the four
    of an iteration; those that sft trains, and pairs of them with soft labels; two teachers, of a
    file of prompts each."""
    media, parts = folder / "media", [f"{folder}/{name}.jsonl" for name in TASKS]
    mixed = [f"{{path: {path}, domain: {name}}}" for path, name in zip(parts, TASKS, strict=True)]
    own = {"model": f"{masked.__file__}:policy", "data__train": f"{masked.__file__}:texts"}
    return {
        **dict.fromkeys(TOKENS, own),
        "dgpo": {"anchor__data__weight": "0.1", "anchor__data__source": media},
        "sft": {"data__offline": media, "algorithm__prompt_dropout": "0.5"},
        "dpo": {
            "data__offline": folder / "pairs.jsonl",
            "data__labels": "soft",
            "algorithm__steps": "2",
        },
        "opd": {
            "data__mixture": f"[{', '.join(mixed)}]",
            **{f"algorithm__teachers__{k}__adapter": folder / k for k in TASKS},
            **{f"algorithm__teachers__{k}__domains": f"[{k}]" for k in TASKS},
            **{f"algorithm__teachers__{k}__guidance": g for k, g in zip(TASKS, "21", strict=True)},
        },
    }.get(algorithm, {})


def write_files(folder):
    """The files that `files` names."""
    (folder / "media").mkdir()
    for i in range(5):
        picture = torch.full((3, 64, 64), 50 * i, dtype=torch.uint8)
        write_png(picture, str(folder / f"media/{i}.png"))
        (folder / f"media/{i}.txt").write_text(f"a square {i}")
    pair = {"prompt": "a square", "chosen": "media/0.png"}
    says = [{"label": 1}, {"label": 0.5}, {"margin": -0.7}, {"label": 0, "repeats": 2}]
    lists = {
        "pairs": [{**pair, "rejected": f"media/{i}.png", **own} for i, own in enumerate(says, 1)]
    }
    for task in TASKS:
        lists[task] = [{"prompt": f"{task} of {i} circles"} for i in range(3)]
    for name, rows in lists.items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text)
    small.taught(folder, TASKS)


def smooth(media, *_):
    """A reward that never ties and, unlike a JPEG's size, moves by 1e-7 when pixels do."""
    return media.flatten(1).std(1)


def words_of(folder, algorithm, output):
    """The words of RUNS, with files of the folder."""
    return small.words(output, algorithm, **RUNS[algorithm], **files(folder, algorithm))


def lonely(folder):
    """A run of which one process often has no row to train: no picture shows a star, so its group's
    rewards tie."""
    clauses = {name: [{"shape": name, "count": 1, "color": None}] for name in ("circle", "star")}
    data = folder / "prompts.jsonl"
    data.write_text(
        "".join(
            json.dumps({"prompt": f"a {name}", "include": clause}) + "\n"
            for name, clause in clauses.items()
        )
    )
    return small.words(
        folder / "lonely",
        reward="shapes",
        reward__shapes__reading="partial",
        data__train=data,
        data__eval="null",
        batch__group="8",
        iterations="3",
        sampler__steps="8",
    )


def signalled(media, *_):
    """The same, from a process whose first one to score ends it."""
    if os.environ["RANK"] == "1":
        signal.raise_signal(signal.SIGTERM)
    return smooth(media)


def train_all(folder):
    """In each of two processes: twelve runs, the last one through the command line, and what they
    print in a file."""
    signals.GRACE = 900
    runs = [
        (None, lonely(folder)),
        (None, small.words(folder / "mixed", **MIXED)),
        *((smooth, words_of(folder, name, folder / name)) for name in RUNS if name != "nft"),
        (signalled, small.words(folder / "signalled", "flow_grpo", **SIGNALLED)),
    ]
    load_rewards = build.load_set
    with (folder / "stdout.txt").open("a", 1) as out, contextlib.redirect_stdout(out):
        for reward, words in runs:
            own = {"spread": reward}
            build.load_set = (lambda _, own=own: load_set(own)) if reward else load_rewards
            trainer = loop.Trainer(load.load_config(None, words))
            with signals.StopRequest(trainer):
                list(trainer)
            name = getattr(reward, "__name__", "")
            print("ended:", os.environ["RANK"], name, trainer.stopped)
        build.load_set = lambda _: load_set({"spread": smooth})
        with pytest.raises(SystemExit) as end:
            app(["train", *small.words(folder / "nft", **RUNS["nft"])])
        assert not end.value.code


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """The runs of two CPU processes that talk by gloo -> their folder."""
    folder = tmp_path_factory.mktemp("two")
    write_files(folder)
    processes.on(2, lambda: train_all(folder))
    printed = (folder / "stdout.txt").read_text()
    assert "on 2 process(es)" in printed and printed.count("Run folder:") == 1
    return folder


def step_by_step(run):
    return [
        {k: v for k, v in line.items() if not k.startswith((*small.CHANGING, "nfe/", "flops"))}
        for line in small.lines(run)
    ]


@pytest.mark.parametrize("algorithm", RUNS)
def test_two_processes_equal_one(two, tmp_path, monkeypatch, algorithm):
    monkeypatch.setattr(build, "load_set", lambda _: load_set({"spread": smooth}))
    one = flowrl.train(load.load_config(None, words_of(two, algorithm, tmp_path / "one")))
    assert_equal(one.path, two / algorithm)
    for mine, theirs in zip(*map(step_by_step, (one.path, two / algorithm)), strict=True):
        total = mine.get("reward/total")
        assert (total is None) == (algorithm in ("sft", "dpo"))
        assert theirs.get("reward/total") == pytest.approx(total, abs=1e-6)
    assert algorithm != "flow_dppo" or small.lines(one.path)[0]["trust/dropped_good"] > 0
    if algorithm == "nft":
        assert small.values(two / algorithm, "after")["spread"] == pytest.approx(
            small.values(one.path, "after")["spread"], abs=1e-5
        )


def test_a_climbed_reward_on_two_processes_equals_one(two, tmp_path):
    one = flowrl.train(load.load_config(None, small.words(tmp_path / "one", **MIXED)))
    assert_equal(
        one.path, two / "mixed", rel=1e-2, atol=1e-5
    )  # the scorer rounds by chunk, at 1e-5
    assert all("gradient/reward" in line for line in small.lines(one.path))


def assert_equal(one, other, rel=1e-3, atol=1e-6):
    """Two runs, of one process and of two."""
    a, b = step_by_step(one), step_by_step(other)
    assert [line["iteration"] for line in b] == [1, 2]
    for mine, theirs in zip(a, b, strict=True):
        assert mine.keys() == theirs.keys() and mine["policy/grad_norm"] > 0
        for name in mine:
            assert theirs[name] == pytest.approx(mine[name], rel=rel, abs=1e-6), name
    x, y = small.weights(one), small.weights(other)
    assert x.keys() == y.keys()
    for name in (n for n in x if n.startswith(("policy/", "ema/", "old/"))):
        torch.testing.assert_close(y[name], x[name], rtol=1e-4, atol=atol)


def test_a_process_without_a_row_to_train_does_not_stall_the_others(two):
    lines = small.lines(two / "lonely")
    assert len(lines) == 3 and any(line["policy/rows"] for line in lines)
    assert all(
        line["policy/rows"] <= 16 for line in lines
    )  # of the two groups of 8 x 2, only the circle's


def test_a_signal_to_one_process_ends_both_after_its_iteration_with_a_checkpoint(two):
    said = (two / "stdout.txt").read_text()
    assert [f"ended: {rank} signalled SIGTERM received" in said for rank in (0, 1)] == [True] * 2
    assert len(small.lines(two / "signalled")) == 1
    assert checkpoint.steps(two / "signalled")[-1].name == "step-000001"


def test_the_first_reason_to_stop_is_every_process_s(monkeypatch):
    from types import SimpleNamespace

    from flowrl.runtime.processes import world as distributed

    world = distributed.World(
        SimpleNamespace(process_index=1, num_processes=3, is_main_process=False)
    )
    for heard, agreed in (
        ([None, "SIGTERM received", None], "SIGTERM received"),
        ([None, None, None], None),
    ):
        monkeypatch.setattr(world, "_everyone", lambda _, heard=heard: heard)
        assert world.agree(None) == agreed
    monkeypatch.setattr(world, "_everyone", lambda mine: [{}, mine, {"policy/kl": 2.0}])
    assert world.sum_metrics({"policy/kl": torch.tensor(0.5)}) == {"policy/kl": 2.5}
    largest = "trust/divergence_max"
    monkeypatch.setattr(world, "_everyone", lambda mine: [{largest: 3.0}, mine])
    assert world.sum_metrics({largest: torch.tensor(0.5)}) == {largest: 3.0}


class Pretend:
    """An accelerator of one of `size` processes, all of which hold the same."""

    def __init__(self, rank, size, counts):
        self.process_index, self.num_processes, self.is_main_process, self.device = (
            rank,
            size,
            rank == 0,
            "cpu",
        )
        self.counts = counts

    def gather(self, value):
        if value.dtype == torch.int64 and value.shape == (1,):
            return torch.tensor(self.counts)
        return torch.cat([value] * self.num_processes)


def test_rows_of_any_number_are_gathered_and_found_again():
    from flowrl.runtime.processes import world as distributed

    world = distributed.World(Pretend(1, 3, [2, 3, 0]))
    mine = torch.tensor([[1.0], [2.0], [3.0]])
    assert world.gather(mine).flatten().tolist() == [1, 2, 1, 2, 3] and world.part(3) == slice(2, 5)
    nothing = distributed.World(Pretend(1, 3, [0, 0, 0]))
    assert nothing.gather(torch.empty(0, 2)).shape == (0, 2)


def test_features_of_a_process_that_showed_no_media_are_nan(monkeypatch):
    from flowrl.runtime.processes import world as distributed

    world = distributed.World(Pretend(1, 2, [2, 3]))
    monkeypatch.setattr(world, "_everyone", lambda mine: [2, mine])
    found = world._gather_features(torch.empty(3, 0))
    assert found.shape == (5, 2) and bool(found.isnan().all())
    assert world._gather_features(None) is None


def test_each_update_trains_the_same_prompts_on_any_number_of_processes():
    """8 prompts, 2 updates: the first 4 and the last 4, on 1, 2 and 4 processes."""
    from flowrl.runtime.processes import world as distributed

    for size in (1, 2, 4):
        first, second = set(), set()
        for rank in range(size):
            mine = list(range(8))[distributed.World(Pretend(rank, size, None)).share(8)]
            for row, prompt in enumerate(mine):
                (first if row * 2 // len(mine) == 0 else second).add(prompt)
        assert first == {0, 1, 2, 3} and second == {4, 5, 6, 7}
