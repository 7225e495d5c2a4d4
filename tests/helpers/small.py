"""Whole runs that take seconds: the embedded model, two prompts, two samples each, and JPEG size as
a reward that never ties."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import diffusers
import methods_by_kind
import torch
import transformers
from typer.testing import CliRunner

from flowrl.config import build
from flowrl.config.load import load_config
from flowrl.runtime import log
from flowrl.runtime.log import logger
from flowrl.runtime.store import checkpoint
from flowrl.training import build as training_build
from flowrl.training.loop import Trainer

SETTINGS = {
    "reward": "jpeg",
    "batch.prompts": "2",
    "batch.group": "2",
    "batch.updates": "1",
    "sampler.steps": "4",
    "sampler.guidance": "none",
    "ema.every": "1",
    "eval.every": "0",
    "eval.images": "4",
    "eval.steps": "2",
    "eval.baseline_guidance": "null",
    "checkpoint.every": "1",
    "trackers": "[]",
    # a third of a small run each; the tests that are about them set them
    "model.self_check": "false",
    "guard.check_rewards": "false",
}
NAMED = [
    "data=ocr",
    "reward=jpeg",
]  # what a config of another model than the embedded ones must say
ALGORITHMS = {
    "nft": {"algorithm.steps": "2"},
    "flow_grpo": {},
    "dance_grpo": {},
    "mix_grpo": {
        "algorithm.window.every": "1",
        "algorithm.window.size": "1",
    },  # the window moves each iteration
    "flow_grpo_fast": {"algorithm.window.size": "1", "algorithm.window.high": "2"},
}
# what a config of a method must say of data and teachers, beside its name and reward=jpeg
TAUGHT = "algorithm.teachers.own"
NEEDED = {
    "sft": ["data.offline=media", "reward.jpeg.weight=0"],
    "opd": [f"{TAUGHT}.model=shapes-sd3", f"{TAUGHT}.guidance=none", "reward.jpeg.weight=0"],
}
TOKENS = "model=shapes-masked"  # the embedded masked generator
CHANGING = ("time/", "memory/", "mfu")  # metrics that depend on the machine

# their handlers would keep the stream of the first command, which is closed after it
diffusers.logging.set_verbosity_error()
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


def needed(algorithm):
    """The words of NEEDED for a file of configs/algorithm, and of methods on tokens their model."""
    return [TOKENS] * methods_by_kind.unmasks(algorithm) + NEEDED.get(algorithm, [])


def words(output, algorithm="nft", **changes):
    """Command-line words of a small run; keyword `batch__group="4"` overrides batch.group, None
    takes a word away."""
    settings = {
        "algorithm": algorithm,
        **SETTINGS,
        **ALGORITHMS[algorithm],
        **{k.replace("__", "."): v for k, v in changes.items()},
    }
    return [
        *(f"{key}={value}" for key, value in settings.items() if value is not None),
        f"output={output}",
    ]


def config(output, algorithm="nft", **changes):
    return load_config(None, words(output, algorithm, **changes))


def trainer(output, algorithm="nft", **changes):
    return Trainer(config(output, algorithm, **changes))


def taught(place, tasks=("counting", "position")):
    """Words of a run with a teacher for each task: LoRA of drawn weights, in folders of `place`."""
    cfg, given = config(place / "run", train__lora__rank="3"), {"reward__jpeg__weight": "0"}
    for seed, task in enumerate(tasks):
        policy, g = build.make_policy(cfg), torch.Generator().manual_seed(seed)
        for weight in policy.parts["denoiser"].values():
            weight.data = 0.1 * torch.randn(weight.shape, generator=g)
        policy.save_lora(place / task / "lora")
        own = f"algorithm__teachers__{task}__"
        given |= {f"{own}adapter": str(place / task), f"{own}domains": f"[{task}]"}
        given |= {f"{own}guidance": "none" if seed else "2"}
    return given


POLICIES = {}


def load_once(monkeypatch):
    """For runs that are refused before they train: one policy serves all of the same settings."""

    def make_policy(cfg, **options):
        named = {name: value for name, value in options.items() if name != "algorithm"}
        key = repr((cfg.model, cfg.train, cfg.seed, named))
        if key not in POLICIES:
            POLICIES[key] = build.make_policy(cfg, **options)
        return POLICIES[key]

    monkeypatch.setattr(training_build, "make_policy", make_policy)


def invoke(*arguments):
    """The command line in this process -> result with exit_code and output (stdout and stderr)."""
    from flowrl.cli.main import app

    logger.handlers.clear()  # those of a trainer of another test may print elsewhere
    log._shared = None
    try:
        return CliRunner().invoke(app, [str(a) for a in arguments])
    finally:
        logger.handlers.clear()
        logger.propagate = True


def start(*arguments, **options):
    """The command line as a process of its own."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    code = "import torch; torch.set_num_threads(1); from flowrl.cli.main import main; main()"
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def lines(run):
    """Whole lines of a run's metrics.jsonl so far."""
    path = Path(run) / "metrics.jsonl"
    return (
        [
            json.loads(line)
            for line in path.read_text().splitlines(keepends=True)
            if line.endswith("\n")
        ]
        if path.exists()
        else []
    )


def numbers(run):
    """metrics.jsonl without what depends on the machine."""
    return [{k: v for k, v in line.items() if not k.startswith(CHANGING)} for line in lines(run)]


def weights(run):
    """Every tensor of a run's newest checkpoint, by file and name."""
    tensors, _ = checkpoint.load(checkpoint.latest(run))
    return {
        f"{stem}/{name}": value for stem, group in tensors.items() for name, value in group.items()
    }


def same(one, other):
    """Whether two runs have the same metrics and, bit for bit, the same newest checkpoint."""
    a, b = weights(one), weights(other)
    equal = a.keys() == b.keys() and all(torch.equal(value, b[name]) for name, value in a.items())
    return equal and numbers(one) == numbers(other)


def values(run, row):
    """Per-image values of a row of evaluation.json."""
    record = json.loads((Path(run) / "evaluation.json").read_text())
    return next(r["values"] for r in record["rows"] if r["name"] == row)


def use_rewards(made, rewards):
    """Score this trainer's samples with other rewards -> the trainer."""
    made.source = dataclasses.replace(made.source, rewards=rewards)
    made.parts = dataclasses.replace(made.parts, source=made.source)
    made.parts.guards.rewards = rewards
    return made
