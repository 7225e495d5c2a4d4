"""Seconds, images a second, MFU and peak memory of each phase of an iteration, with random weights.

    python scripts/bench/throughput.py --arch sd3.5-medium --algorithm mix_grpo batch.micro=16
    python scripts/bench/throughput.py --arch flux.1-dev train.compile=blocks --no-reference
    python scripts/bench/throughput.py --arch shapes-sd3 --iterations 2         # a CPU, seconds

No hub and no weights: the pipeline of configs/architecture is made on the device, and the run's own
loop trains it with random rewards. Beside it, for Stable Diffusion 3, Flow-GRPO (or DiffusionNFT)
as its authors' code runs it (reference_loop.py), with all steps trained. MFU is FLOPs over those of
large matmuls in the same time, which are measured first, in the same process and type. On a CPU
FLOPs and memory are counted in an iteration of their own. On a GPU that would take minutes: FLOPs
are those that the run's metrics say, in the reference loop as many a network row, and memory is the
highest that the allocator held, weights included. `--budget h100` prints what `flowrl budget` says
for that device as a loop of its own. Further words are settings of the config. Prints Markdown.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import random_pipeline
import torch
from reference_loop import LOOPS, Loop, Settings

from flowrl.config.build import DTYPES
from flowrl.config.load import load_config
from flowrl.config.schema import Config, ModelConfig
from flowrl.policy.weights.targets import ATTENTION
from flowrl.runtime.ledger import Ledger
from flowrl.training.budget import roofline
from flowrl.training.budget.meter import Meter
from flowrl.training.budget.planner import Planner
from flowrl.training.budget.rehearsal import scores
from flowrl.training.budget.roofline import GIB
from flowrl.training.loop import Trainer

METHODS = ("flow_grpo", "mix_grpo", "tree_grpo", "nft")
PHASES = ("encode", "rollout", "decode", "reference", "update")
SHARED = [
    "data.eval=null",
    "trackers=[]",
    "model.self_check=false",
    "guard.check_rewards=false",
    "eval.at_start=false",
    "eval.baseline_guidance=null",
    "batch.prompts=2",
    "batch.updates=1",
]


@dataclass(slots=True)
class Phase:
    """What a phase of an iteration takes."""

    seconds: float = 0.0  # median over iterations
    flops: float = 0.0  # of one iteration
    gb: float = 0.0  # highest memory while it lasts
    rows: float = 0.0  # rows that go through the network


Phases = dict[str, Phase]


def config(arch: str, algorithm: str, words: list[str]) -> Config:
    """The run's config: the model's own settings, where it has some."""
    model = "shapes-sd3" if arch in random_pipeline.EMBEDDED else arch
    named = [f"model={model}", f"algorithm={algorithm}", "reward=jpeg", "data=shapes"]
    return load_config(None, [*named, *SHARED, *words])


def prompts(cfg: Config, iterations: int) -> list[dict[str, str]]:
    """So many that none is encoded twice."""
    count = cfg.batch.prompts * (iterations + 1)
    return [{"prompt": f"a red circle {k}"} for k in range(count)]


def trainer_of(cfg: Config, pipe: Any, folder: Path, iterations: int) -> Trainer:
    """The run on a live pipeline, with random rewards, encoding booked apart."""
    # the pipeline stands in for the source; how it is called and held is the config's
    model = cfg.model.model_copy(update={"source": ModelConfig.model_fields["source"].default})
    cfg = cfg.model_copy(update={"output": str(folder), "model": model})
    rewards = {"random": scores("random")}
    trainer = Trainer(cfg, policy=pipe, prompts=prompts(cfg, iterations), rewards=rewards)
    encode = type(trainer.policy).encode

    def booked(*asked: Any) -> Any:
        with trainer.ledger.phase("encode"):
            return encode(trainer.policy, *asked)

    trainer.policy.encode = booked  # type: ignore[method-assign]
    return trainer


def guidance_of(cfg: Config, algorithm: str) -> float:
    """The scale of rollouts and of the loss; 1: one branch."""
    given = "none" if algorithm == "nft" else cfg.sampler.guidance
    if given == "pipeline":
        return float(cfg.model.pipeline.get("guidance_scale", 1.0))
    return 1.0 if isinstance(given, str) else float(given)


def reference_of(
    cfg: Config, algorithm: str, pipe: Any, *, micro: int, trained: tuple[int, ...] | None = None
) -> Loop:
    """The reference loop of a config. micro: samples in a forward. trained: which steps are; None:
    all but the last."""
    steps, nft = cfg.sampler.steps, algorithm == "nft"
    steps_trained = trained or tuple(range(steps - 1))
    call = {k: v for k, v in cfg.model.pipeline.items() if k != "guidance_scale"}
    settings = Settings(
        prompts=[prompt["prompt"] for prompt in prompts(cfg, 0)],
        group=cfg.batch.group,
        steps=steps,
        guidance=guidance_of(cfg, algorithm),
        micro=micro,
        call=call,
        rank=cfg.train.lora.rank,
        alpha=cfg.train.lora.alpha,
        targets=list(cfg.train.lora.targets or ATTENTION),
        noisy=() if nft else steps_trained,
        trained=() if nft else steps_trained,
        levels=max(int(steps * 0.99), 1),
        eta=cfg.sampler.eta,
        kl_weight=float(cfg.algorithm.get("kl_weight", 0.0)),
        lr=cfg.optimizer.lr,
        decode=cfg.batch.decode,
    )
    return LOOPS["nft" if nft else "grpo"](pipe, settings)


# ---------------------------------------------------------------------------
# measuring


@contextmanager
def metered(ledger: Ledger) -> Iterator[Phases]:
    """FLOPs of each phase inside, and its peak of tensors above those at the start."""
    meter, phase, found = Meter(), ledger.phase, defaultdict(Phase)
    stack, before = ["other"], 0.0

    def book() -> None:
        nonlocal before
        own = found[stack[-1]]
        own.flops += meter.flops - before
        own.gb = max(own.gb, meter.reset_peak() / GIB)
        before = meter.flops

    @contextmanager
    def booked(name: str) -> Iterator[None]:
        book()
        stack.append(name)
        with phase(name):
            yield
        book()
        stack.pop()

    ledger.phase = booked  # type: ignore[method-assign]
    try:
        with meter:
            yield found
            book()
    finally:
        ledger.phase = phase  # type: ignore[method-assign]


def measured(iterate: Callable[[], dict[str, float]], ledger: Ledger, times: int) -> Phases:
    """One iteration to warm up, the medians of `times` that are timed, and on a CPU one that is
    counted."""
    say("warm-up", iterate())
    lines = []
    for _ in range(times):
        lines.append(iterate())
        say("timed", lines[-1])
    found: Phases = {}
    if ledger.cuda:
        for name in PHASES:
            peak = max(line.get(f"memory/{name}_gb", 0.0) for line in lines)
            found[name] = Phase(flops=lines[-1].get(f"flops/{name}", 0.0), gb=peak)
    else:
        with metered(ledger) as found:  # each operator passes through Python: the last one
            say("counted", iterate())
    for name, phase in found.items():
        phase.seconds = statistics.median(line.get(f"time/{name}", 0.0) for line in lines)
        phase.rows = lines[-1].get(f"nfe/{name}", 0.0)
    found["iteration"] = Phase(
        seconds=statistics.median(line["time/iteration"] for line in lines),
        flops=sum(phase.flops for phase in found.values()),
        gb=max(phase.gb for phase in found.values()),
    )
    return dict(found)


def say(what: str, line: dict[str, float]) -> None:
    """An iteration's seconds and gigabytes on stderr, as soon as it is done."""
    names = [name for name in (*PHASES, "iteration") if line.get(f"time/{name}")]
    seconds = ", ".join(f"{name} {line[f'time/{name}']:.3g} s" for name in names)
    print(f"{what}: {seconds}; {line['memory/peak_gb']:.3g} GB", file=sys.stderr, flush=True)


def numbered(trainer: Trainer, seen: list[dict[str, float]]) -> Callable[[], dict[str, float]]:
    """The next iteration at each call -> its metrics, which are appended to `seen`."""
    count = iter(range(1 << 30))

    def iterate() -> dict[str, float]:
        seen.append(dict(trainer.iterate(next(count)).metrics))
        return seen[-1]

    return iterate


def predicted(cfg: Config, device: str) -> Phases:
    """What the budget says of an iteration on a device, as roofline.device names it."""
    budget = Planner(cfg, roofline.device(device)).budget(cfg)
    found = {
        name: Phase(seconds=cost.seconds, flops=cost.flops, gb=budget.resident + cost.gb)
        for name, cost in budget.phases.items()
    }
    found["iteration"] = Phase(seconds=budget.seconds, flops=budget.flops, gb=budget.peak)
    return found


def ceilings(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """FLOP/s of a large matmul and of fused attention."""
    cuda = device.type == "cuda"
    size, length, heads = (8192, 4096, 24) if cuda else (1024, 512, 6)
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    q = torch.randn(2, heads, length, 64, device=device).to(dtype)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    with torch.no_grad():
        return {
            "matmul": 2 * size**3 / _seconds(lambda: a @ b, device),
            "attention": 4 * 2 * heads * length**2 * 64 / _seconds(lambda: sdpa(q, q, q), device),
        }


def _seconds(call: Callable[[], object], device: torch.device, *, repeats: int = 10) -> float:
    """Least seconds of a call, of three rounds."""
    rounds = []
    for _ in range(4):  # the first one warms up
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize(device)
            start.record()
            for _ in range(repeats):
                call()
            end.record()
            torch.cuda.synchronize(device)
            rounds.append(start.elapsed_time(end) / 1000 / repeats)
            continue
        began = time.perf_counter()
        for _ in range(repeats):
            call()
        rounds.append((time.perf_counter() - began) / repeats)
    return min(rounds[1:])


# ---------------------------------------------------------------------------
# what is printed


def table(loops: dict[str, Phases], images: int, ceilings: dict[str, float]) -> str:
    """Markdown: a row for each phase of each loop. ceilings: FLOP/s that MFU is a share of."""
    head = "| loop | phase | seconds | images/s | GFLOP | MFU | peak GB |"
    lines = [head, "|-|-|-|-|-|-|-|"]
    for loop, phases in loops.items():
        for name in (*PHASES, "iteration"):
            p = phases.get(name, Phase())
            if not p.seconds:
                continue
            share = p.flops / (p.seconds * ceilings[loop])
            lines.append(
                f"| {loop} | {name} | {p.seconds:.3g} | {images / p.seconds:.3g} |"
                f" {p.flops / 1e9:.4g} | {share:.1%} | {p.gb:.3g} |"
            )
    return "\n".join(lines)


def where(device: torch.device, dtype: torch.dtype, cfg: Config) -> str:
    """A sentence about the machine and the run."""
    import diffusers

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    threads = "" if device.type == "cuda" else f", {torch.get_num_threads()} threads"
    batch = f"{cfg.batch.prompts} prompts x {cfg.batch.group}, {cfg.sampler.steps} steps"
    return (
        f"{name}{threads}, {str(dtype).removeprefix('torch.')}, torch {torch.__version__},"
        f" diffusers {diffusers.__version__}; {batch}, micro {cfg.batch.micro}"
    )


def of_flowrl(
    arch: str, cfg: Config, device: torch.device, iterations: int
) -> tuple[Phases, dict[str, float]]:
    """The run's own loop, measured, and what its first iteration says about ratios."""
    pipe = random_pipeline.build(arch, device, DTYPES[cfg.model.dtype])
    seen: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(cfg, pipe, Path(folder) / "run", iterations + 2)
        phases = measured(numbered(trainer, seen), trainer.ledger, iterations)
    return phases, {k: v for k, v in seen[0].items() if k.startswith("policy/ratio")}


def of_reference(
    arch: str, algorithm: str, cfg: Config, device: torch.device, iterations: int
) -> Phases:
    """The reference loop, measured, with as many network rows in a forward."""
    pipe = random_pipeline.build(arch, device, DTYPES[cfg.model.dtype])
    micro = max(1, cfg.batch.micro // (2 if guidance_of(cfg, algorithm) > 1 else 1))
    loop = reference_of(cfg, algorithm, pipe, micro=micro)
    return measured(loop.iterate, loop.ledger, iterations)


def as_many_a_row(phases: Phases, known: Phases) -> None:
    """Give phases the FLOPs that `known` ones have a network row."""
    for name in PHASES:
        if name in known and known[name].rows:
            phases[name].flops = known[name].flops / known[name].rows * phases[name].rows
    phases["iteration"].flops = sum(phases[name].flops for name in PHASES if name in phases)


def run(
    arch: str,
    algorithm: str,
    cfg: Config,
    *,
    iterations: int,
    reference: bool,
    budget: str | None = None,
) -> str:
    """Measure -> what is printed."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = DTYPES[cfg.model.dtype]
    found = ceilings(device, dtype)
    rates = ", ".join(f"{name} {rate / 1e12:.3g} TFLOP/s" for name, rate in found.items())
    own, ratios = of_flowrl(arch, cfg, device, iterations)
    loops = {"flowrl": own}
    gc.collect()  # the policy's parts know each other
    if budget:
        loops["budget"] = predicted(cfg, budget)
    if reference and (arch in random_pipeline.EMBEDDED or arch.startswith("sd3")):
        loops["reference"] = theirs = of_reference(arch, algorithm, cfg, device, iterations)
        if device.type == "cuda":
            as_many_a_row(theirs, own)
    images = cfg.batch.prompts * cfg.batch.group
    title = f"{arch}, {algorithm}: {where(device, dtype, cfg)}\nceilings: {rates}\n"
    if ratios:
        title += ", ".join(f"{name} {value:.3g}" for name, value in ratios.items()) + "\n"
    shares = dict.fromkeys(loops, found["matmul"])
    if budget:
        shares["budget"] = roofline.device(budget).ceiling
    return title + "\n" + table(loops, images, shares)


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--arch", default="shapes-sd3", help=", ".join(random_pipeline.names()))
    parser.add_argument("--algorithm", default="mix_grpo", choices=METHODS)
    parser.add_argument("--iterations", type=int, default=3, help="that are timed")
    parser.add_argument("--no-reference", action="store_true")
    parser.add_argument("--random-weights", action="store_true", help="as always")
    parser.add_argument("--budget", help="a device of flowrl budget, as h100")
    parser.add_argument("--threads", type=int, help="of a CPU")
    parser.add_argument("settings", nargs="*", help="as batch.micro=16")
    given = parser.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    arch = random_pipeline.named(given.arch)
    cfg = config(arch, given.algorithm, given.settings)
    reference = not given.no_reference
    how = {"iterations": given.iterations, "reference": reference, "budget": given.budget}
    print(run(arch, given.algorithm, cfg, **how))


if __name__ == "__main__":
    main()
