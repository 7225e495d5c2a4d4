"""A budget counts what a run does before its first iteration as a real start does it: rows of the
network, texts that encoders read, and media that the VAE decodes, to the digit."""

import functools
import inspect
from collections import Counter
from dataclasses import replace

import long
import pytest
import thin
import zoo

from flowrl.cli.budget import started
from flowrl.config.load import load_config
from flowrl.training import outputs
from flowrl.training.budget import planner, start
from flowrl.training.budget.roofline import GPUS
from flowrl.training.loop import Trainer

ZOO = zoo.cases()
CPU = replace(GPUS["h100"], name="cpu", cuda=False, reserve=0.0, memory=None)
NAMES = ["sd15", "sdxl", "sd3", "flux", "qwenimage", "wan21", "z_image", "flux2_klein", "sana"]
NAMES += ["wan22_5b"]
SMALL = [
    "algorithm=flow_grpo",
    "reward=jpeg",
    "data=file",
    "batch.prompts=2",
    "batch.group=4",
    "batch.updates=1",
    "sampler.steps=3",
    "eval.images=3",
    "eval.steps=2",
    "model.dtype=fp32",
    "train.precision=no",
    "trackers=[]",
]


class Counted:
    """Counts the work of a pipeline's classes, while it is entered."""

    def __init__(self, pipe, monkeypatch):
        self.found, self.inside = Counter(), False
        for name, part in pipe.components.items():
            if name.startswith(("transformer", "unet")) and part is not None:
                self.watch(type(part), "forward", "rows", monkeypatch)
            if name.startswith("text_encoder") and part is not None:
                self.watch(type(part), "forward", "encodes", monkeypatch)
        decoder = pipe.components.get("vqvae") or pipe.vae
        self.watch(type(decoder), "decode", "decodes", monkeypatch)

    def watch(self, cls, method, what, monkeypatch):
        real = getattr(cls, method)
        if hasattr(real, "counted"):  # two encoders of one class
            return
        names = inspect.signature(real)

        @functools.wraps(real)
        def counting(module, *args, **kwargs):
            given = names.bind(module, *args, **kwargs).arguments
            given = {**given, **given.get("kwargs", {})}
            known = ("input_ids", "hidden_states", "sample", "x", "z", "h")
            value = next(given[name] for name in known if given.get(name) is not None)
            outer, self.inside = self.inside, True  # an encoder may hold one of another class
            self.found[what] += 0 if outer else len(value)
            try:
                return real(module, *args, **kwargs)
            finally:
                self.inside = outer

        counting.counted = True
        monkeypatch.setattr(cls, method, counting)

    def take(self):
        found, self.found = self.found, Counter()
        return {name: found[name] for name in ("rows", "encodes", "decodes")}


def config(name, folder, *more):
    """A run of a case that lies in a folder."""
    ZOO[name].make().save_pretrained(folder / "model")
    (folder / "train.txt").write_text("a red fox\na blue bird\na green car\n")
    (folder / "eval.txt").write_text("a yellow boat\na white house\n")
    data = [f"data.train={folder / 'train.txt'}", f"data.eval={folder / 'eval.txt'}"]
    own = [f"model={folder / 'model'}", f"output={folder / 'run'}", *data, *SMALL, *more]
    cfg = load_config(None, own)
    model = cfg.model.model_copy(update={"pipeline": dict(ZOO[name].call)})
    return cfg.model_copy(update={"model": model})


def told(cfg):
    """What a budget counts in each part of the start."""
    parts = planner.Planner(cfg, CPU).start()
    assert all(work.seconds > 0 for work in parts.values())
    names = ("rows", "encodes", "decodes")
    return {key: {name: getattr(work, name) for name in names} for key, work in parts.items()}


def summed(parts):
    total = sum(map(Counter, parts), Counter())
    return {name: total[name] for name in ("rows", "encodes", "decodes")}


@pytest.mark.parametrize("name", long.but(NAMES, {*NAMES} - {"flux", "qwenimage"}))
def test_a_start_is_counted_to_the_digit(name, tmp_path, monkeypatch):
    """What loads a policy is probing and self-check; what starts a run is the trial of its rewards
    and two evaluations."""
    guided = "null" if name == "flux" else 4  # it has no second branch
    cfg = config(name, tmp_path, f"eval.baseline_guidance={guided}")
    parts = told(cfg)
    counted = Counted(ZOO[name].make(), monkeypatch)
    trainer = Trainer(cfg)
    assert counted.take() == summed([parts["probing"], parts["self-check"]])
    outputs.start(trainer)
    assert counted.take() == summed([parts["trial of rewards"], parts["evaluation"]])
    assert [*parts] == ["loading", "probing", "self-check", "trial of rewards", "evaluation"]


def test_a_start_is_printed_with_its_total():
    parts = {"probing": start.Work(rows=1000, seconds=0.5), "trial": start.Work(encodes=2)}
    cells = [list(column.cells) for column in started(parts).columns]
    assert [*zip(*cells, strict=True)] == [
        ("probing", "1,000", "", "", "0.5"),
        ("trial", "", "2", "", "0"),
        ("total", "1,000", "2", "", "0.5"),
    ]


def test_a_start_without_checks_and_evaluation_is_probing(tmp_path, monkeypatch):
    off = ["model.self_check=false", "guard.check_rewards=false", "data.eval=null"]
    cfg = config("flux", tmp_path, *off)
    parts = told(cfg)
    assert [*parts] == ["loading", "probing"]
    counted = Counted(ZOO["flux"].make(), monkeypatch)
    outputs.start(Trainer(cfg))
    assert counted.take() == parts["probing"] == {"rows": 2, "encodes": 6, "decodes": 1}


REAL = {  # of each recipe: rows and media of probing and self-check, texts, rows of both last parts
    "flux.1-dev": ((2, 16), (1, 4), 6, 2 + 8 * 5, 64 * 28),
    "qwen-image": ((4, 40), (1, 6), 4, 2 * (2 + 8 * 7), 64 * 25 * 2),
    "wan2.1-14b": ((4, 32), (1, 4), 4, 2 * (2 + 8 * 9), 32 * 30 * 2),
}


@pytest.mark.parametrize("model", long.but(REAL, {*REAL} - {"flux.1-dev"}))
def test_real_sizes_are_counted_without_values(model, monkeypatch):
    """By hand: branches of guidance times rows of the calls; a trial of 8 samples of two prompts,
    whose samples share their noise and so the first answer; one evaluation. Networks have fewer
    layers, which changes seconds and no count."""
    read = planner.read

    def thinner(source):
        known = read(source)
        parts = {part: {**numbers, **thin.fewer(numbers)} for part, numbers in known.parts.items()}
        return replace(known, parts=parts)

    monkeypatch.setattr(planner, "read", thinner)
    cfg = load_config(None, [f"experiment={model}"])
    parts = planner.Planner(cfg, GPUS["h100"]).start()
    probed, checked, tried, evaluated = [*parts.values()][1:]
    rows, media, texts, trial, evaluation = REAL[model]
    assert (probed.rows, checked.rows) == rows and (probed.decodes, checked.decodes) == media
    assert probed.encodes == texts and checked.encodes == 0
    assert tried.rows == trial and tried.decodes == 8
    assert evaluated.rows == evaluation and evaluated.decodes == cfg.eval.images
    assert all(work.seconds > 0 for work in parts.values())
