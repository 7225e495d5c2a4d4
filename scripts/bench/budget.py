"""What `flowrl budget` predicts for this machine's CPU, beside what runs then take.

    python scripts/bench/budget.py [--model shapes-sd3] [--model middle] [--method mix_grpo ...]
        [--threads 1] [--no-time]

Memory is what torch's profiler counts: the most that each phase of the second iteration allocates
above its beginning. Seconds are those of the third iteration, CPU seconds with one thread. Rows and
FLOPs are compared exactly. "middle" is an SD3 of 8 blocks and width 384 with random weights. Keep
the machine free: rates of the CPU are tried in the same process. Exit code 1 where rows or FLOPs
differ, a peak is more than 15% off, or seconds are 25% (shapes-sd3: a factor of two, since its
tensors are too small to take time themselves).
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar
from unittest import mock

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from flowrl.config.load import load_config
from flowrl.config.schema import Config
from flowrl.runtime.ledger import Ledger
from flowrl.training.budget.planner import Budget, Planner
from flowrl.training.budget.rehearsal import scores
from flowrl.training.budget.roofline import this_cpu
from flowrl.training.loop import Trainer

METHODS = ("flow_grpo", "mix_grpo", "tree_grpo", "nft")
SHARED = [
    "data=shapes",
    "data.eval=null",
    "reward=shapes",
    "trackers=[]",
    "model.self_check=false",
    "guard.check_rewards=false",
    "eval.at_start=false",
    "eval.baseline_guidance=null",
]
PHASES = ("rollout", "decode", "reward", "reference", "update")
SECONDS = {"shapes-sd3": (0.5, 2.0), "middle": (0.75, 1.25)}  # predicted over measured
MARK = "flowrl.phase:"
OTHER = "other"  # between phases
MEMORY = "[memory]"  # the profiler's name of an allocation
T = TypeVar("T")


def config(model: str, method: str, *more: str) -> Config:
    """The config that both sides take."""
    return load_config(None, [f"model={model}", f"algorithm={method}", *SHARED, *more])


def middle(folder: Path) -> Path:
    """An SD3 pipeline of 8 blocks and width 384 with random weights, in a folder."""
    from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline

    from flowrl.shapes import build

    tok = build.tokenizer()
    torch.manual_seed(0)
    transformer = SD3Transformer2DModel(
        sample_size=32,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=8,
        attention_head_dim=64,
        num_attention_heads=6,
        joint_attention_dim=128,
        caption_projection_dim=384,
        pooled_projection_dim=128,
        pos_embed_max_size=32,
        qk_norm="rms_norm",
    )
    parts = {"text_encoder": build.text_encoder(tok), "text_encoder_2": build.text_encoder(tok)}
    pipe: StableDiffusion3Pipeline = build.pipeline(
        {"vae": build.vae(), "transformer": transformer, **parts}, tok
    )
    pipe.save_pretrained(folder)
    return folder


def trainer_of(cfg: Config) -> Trainer:
    """The run, with the prompts and rewards of a rehearsal."""
    prompts = [{"prompt": f"a red circle {k}"} for k in range(4 * cfg.batch.prompts)]
    reward = {label: scores(label) for label in cfg.reward}
    return Trainer(cfg, prompts=prompts, rewards=reward)


def seconds(trainer: Trainer, iteration: int) -> dict[str, float]:
    """Metrics of an iteration, with CPU seconds of its phases where one thread computes."""
    if torch.get_num_threads() > 1:
        return trainer.iterate(iteration).metrics
    clock = time.perf_counter
    time.perf_counter = time.process_time  # the ledger's
    try:
        return trainer.iterate(iteration).metrics
    finally:
        time.perf_counter = clock


def above_the_start(predicted: Budget) -> dict[str, float]:
    """Predicted GiB of the ledger's phases above what stays."""
    gb = {name: phase.gb for name, phase in predicted.phases.items()}
    inside = {"rollout": "encode", "update": "optimizer"}
    for phase, other in inside.items():
        gb[phase] = max(gb[phase], gb.pop(other))
    return gb


def allocated(ledger: Ledger, run: Callable[[], T]) -> tuple[T, dict[str, float]]:
    """What `run` returns, and the most GiB that live in each of the ledger's phases meanwhile,
    above what lives when it begins.

    A process's resident size is mostly libraries, and never falls. torch's profiler sees every
    allocation as it is made and freed, as a device's allocator does; but what was allocated before
    is not seen when it is freed.
    """
    phase, stack = ledger.phase, [OTHER]

    def mark(name: str) -> None:
        with record_function(MARK + name):
            pass

    @contextmanager
    def marked(name: str) -> Iterator[None]:
        stack.append(name)
        mark(name)
        try:
            with phase(name):
                yield
        finally:
            stack.pop()
            mark(stack[-1])

    seen = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with mock.patch.object(ledger, "phase", marked), seen:
        result = run()
    return result, {name: size / 2**30 for name, size in peaks(seen).items() if name in PHASES}


def peaks(seen: profile) -> dict[str, int]:
    """The most bytes that live in each phase that was marked, in the order of time."""
    moments = [
        (event.start_ns(), event.name(), event.nbytes() if event.name() == MEMORY else 0)
        for event in seen.profiler.kineto_results.events()
        if event.name() == MEMORY or event.name().startswith(MARK)
    ]
    highest: dict[str, int] = defaultdict(int)
    phase, live = OTHER, 0
    for _, name, nbytes in sorted(moments, key=lambda moment: moment[0]):
        if name != MEMORY:
            phase = name.removeprefix(MARK)
        live += nbytes
        highest[phase] = max(highest[phase], live)
    return dict(highest)


def compare(cfg: Config, predicted: Budget, limits: tuple[float, float] | None) -> bool:
    """Print both -> whether memory, rows and FLOPs hold, and seconds, where they have limits."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(cfg.model_copy(update={"output": str(Path(folder) / "run")}))
        first = trainer.iterate(0).metrics
        metrics, real_gb = allocated(trainer.ledger, lambda: trainer.iterate(1).metrics)
        took = seconds(trainer, 2) if limits else {}
        trainer.parts.lock.release() if trainer.parts.lock else None
    rows = {name: round(metrics.get(name, 0.0)) for name in predicted.rows}
    own = {name: round(first.get(name, 0.0)) for name in predicted.first}
    exact = rows == predicted.rows and own == predicted.first
    flops = {name: predicted.phases[name].flops for name in ("rollout", "update")}
    counted = {name: metrics[f"flops/{name}"] for name in flops}
    same = all(abs(flops[name] / counted[name] - 1) < 1e-9 for name in flops)
    above = above_the_start(predicted)
    whole = max(above.values()) / max(real_gb.values())
    print(f"  rows {'equal' if exact else f'{rows} {own}'}; FLOPs {'equal' if same else counted}")
    print(f"  peak {max(above.values()):.3f} of {max(real_gb.values()):.3f} GB: {whole:.2f}")
    for name in above:
        if real_gb.get(name):
            gb, real = above[name], real_gb[name]
            print(f"    {name:10} {gb:.4f} of {real:.4f} GB: {gb / real:.2f}")
    near = True
    if limits:
        names = {"rollout": ("encode", "rollout"), "decode": ("decode",)}
        names |= {"reference": ("reference",), "update": ("update", "optimizer")}
        real = {name: took.get(f"time/{name}", 0.0) for name in names}
        ours = {n: sum(predicted.phases[p].seconds for p in ps) for n, ps in names.items()}
        for name in names:
            if real[name]:
                print(f"    {name:10} {ours[name]:.3f} of {real[name]:.3f} s")
        ratio = sum(ours.values()) / sum(real.values())
        print(f"  seconds {sum(ours.values()):.2f} of {sum(real.values()):.2f}: {ratio:.2f}")
        near = limits[0] <= ratio <= limits[1]
    return exact and same and near and abs(whole - 1) <= 0.15


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", action="append", choices=["shapes-sd3", "middle"])
    parser.add_argument("--method", action="append", choices=METHODS)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--no-time", action="store_true")
    parser.add_argument("settings", nargs="*", help="settings of a config, as batch.prompts=4")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    device = this_cpu()
    print({name: f"{rate / 1e9:.1f} GFLOP/s" for name, rate in device.rates.items()})
    print({name: f"{rate / 1e9:.1f} GB/s" for name, rate in device.bandwidth.items()})
    print(f"host {device.host * 1e6:.2f} us an operator")
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        for model in given.model or ["shapes-sd3", "middle"]:
            source = model if model == "shapes-sd3" else str(middle(Path(folder) / model))
            for method in given.method or METHODS:
                words = []
                if source != model:
                    leaves = ["batch.group=27"] if method == "tree_grpo" else []
                    words = [f"model.source={source}", *MIDDLE, *leaves]
                cfg = config("shapes-sd3", method, *words, *given.settings)
                print(f"{model} {method}")
                limits = None if given.no_time else SECONDS[model]
                if not compare(cfg, Planner(cfg, device).budget(), limits):
                    failed.append(f"{model} {method}")
    if failed:
        raise SystemExit(f"beyond the limits: {', '.join(failed)}")


MIDDLE = [
    "batch.prompts=1",
    "batch.updates=1",
    "batch.group=12",
    "batch.micro=8",
    "batch.decode=8",
    "sampler.steps=6",
]


if __name__ == "__main__":
    main()
