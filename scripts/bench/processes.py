"""Several processes train what one trains: a table of how far their numbers lie apart.

    python scripts/bench/processes.py
    python scripts/bench/processes.py --sizes 2 --methods flow_grpo nft --bases sharded
    python scripts/bench/processes.py --full --methods flow_grpo nft
    python scripts/bench/processes.py --model wan21 --bases shared --methods flow_grpo nft

An iteration of each method on one process, and on processes that talk by gloo, with the whole
network on each of them (replicated), a share of it (sharded), or all of it, each call shared by two
processes (shared: train.sequence_parallel=2, which needs --model flux or wan21, tiny pipelines of
tests/helpers with random weights). --full trains all weights in place of LoRA. Compared are the
prompts, the final states of samples, their rewards, the advantages of trained rows, the gradient
of each update, the step that the optimizer takes from it and what the weights moved by. A figure is
the norm of the difference over the norm of one process's values.
What weights moved by is the difference of two fp32 numbers. With --full these are thousands of
times larger than the step, which is rounded to their last digit. Then `rounding` is compared in its
place: how much further apart a weight is than the steps that it took, in units of the last digit
that it had before or after, at most of all weights. AdamW computes in fp32: where a weight is no
larger than its step, the root, two quotients, the product, decay and the sum round at that digit.
With --micro 1 each row goes through the network alone. With more, processes may call it with other
numbers of rows than one process does, and kernels round differently then. A second update starts
from weights that differ in their last digits. Then a run that is resumed on 4, 2 and 1 processes,
and on 1, 2 and 4, against one that never stopped. Exit code 1 where a figure exceeds --most.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, PartialState
from torch import Tensor

import flowrl
from flowrl.runtime.processes import shares
from flowrl.training.loop import Trainer

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "helpers"))

COMMON = [
    "iterations=1",
    "batch.prompts=4",
    "ema.every=1",
    "batch.decode=1",
    "sampler.steps=4",
    "sampler.guidance=none",
    "data.eval=null",
    "eval.baseline_guidance=null",
    "model.self_check=false",
    "guard.check_rewards=false",
    "optimizer.eps=1e-3",  # Adam's first step is g / (|g| + eps): a small eps blows rounding up
    "trackers=[]",
    "checkpoint.every=1",
]
METHODS = {
    "flow_grpo": ["batch.group=4"],  # a chain
    "mix_grpo": ["batch.group=4", "algorithm.window.size=2"],  # a window
    "tree_grpo": ["batch.group=9", "algorithm.window.size=2"],  # a tree
    "nft": ["batch.group=4", "algorithm.steps=2"],  # the forward process
}
BASES = {
    "replicated": [],
    "sharded": ["train.shard=[denoiser]"],
    "shared": ["train.sequence_parallel=2"],
}
ROUNDED = 8.0  # units of the last digit that a step of AdamW may round
RESUMED = 2e-5  # with --full, runs that are resumed
FORK = multiprocessing.get_context("fork")
Seen = dict[str, Tensor]


def spread(media: Tensor, *_: Any) -> Tensor:
    """A reward that never ties and is as smooth as the pixels are."""
    return media.flatten(1).std(1)


def words(method: str, base: str, output: Path, *more: str) -> list[str]:
    """The command line of a run."""
    own = [f"algorithm={method}", f"output={output}", *METHODS[method], *BASES[base]]
    return [*COMMON, *own, *more]


def train(policy: Any, asked: list[str], resume: Path | None = None) -> Seen:
    """Iterate to the end -> what this process saw."""
    cfg = None if resume else flowrl.load_config(None, asked)
    live = {"rewards": {"spread": spread}, "prompts": "shapes:train"}
    trainer = Trainer(cfg, resume=resume, policy=policy, **live)
    seen: dict[str, list[Tensor]] = {}
    before = policy.state()
    follow(trainer, seen)
    for it in trainer:
        leaf_key = it.rollout.leaf_key
        seen.setdefault("prompts", []).append(it.batch.ids)
        seen.setdefault("samples", []).append(it.rollout.leaves)
        seen.setdefault("rewards", []).append(it.rewards.total)
        seen.setdefault("keys", []).append(leaf_key)
    out = {name: torch.cat(parts) for name, parts in seen.items()}
    return out | moved(before, policy.state())


def moved(before: Seen, after: Seen) -> Seen:
    """The weights after a run, and what they moved by."""
    names = sorted(after)
    return {
        "weights": torch.cat([after[k].flatten() for k in names]),
        "moved": torch.cat([(after[k] - before[k]).flatten() for k in names]),
    }


def follow(trainer: Trainer, seen: dict[str, list[Tensor]]) -> None:
    """Note the advantages of trained rows, the gradient of each update and the optimizer's step."""
    learner, update, apply = trainer.learner, trainer.learner.update, trainer.learner.apply

    def noted_update(trained: Any, columns: Any, more: Any = ()) -> Any:
        seen.setdefault("advantages", []).append(columns.adv)
        return update(trained, columns, more)

    def noted_apply() -> None:
        trained = [p for _, p in sorted(learner.weights.parameters.items()) if p.grad is not None]
        grads = [shares.whole(p.grad).flatten() for p in trained]
        seen.setdefault("gradient", []).append(torch.cat(grads))
        apply()
        steps = [step_of(learner.weights.adamw, p).flatten() for p in trained]
        seen.setdefault("step", []).append(torch.cat(steps))

    learner.update, learner.apply = noted_update, noted_apply  # type: ignore[method-assign]


def step_of(adamw: torch.optim.Optimizer, weight: Tensor) -> Tensor:
    """What AdamW just took from a weight, but for weight decay, in fp64: not yet rounded to the
    weight's last digit (arXiv:1711.05101, algorithm 2)."""
    (group,), state = adamw.param_groups, adamw.state[weight]
    mean, square = (shares.whole(state[k]).double() for k in ("exp_avg", "exp_avg_sq"))
    t, (b1, b2) = float(state["step"]), group["betas"]
    return group["lr"] * (mean / (1 - b1**t)) / ((square / (1 - b2**t)).sqrt() + group["eps"])


# ---------------------------------------------------------------------------
# processes


def on(size: int, work: Callable[[], Any]) -> list[Any]:
    """What `work` returns in each of `size` processes."""
    port, told = free_port(), FORK.Queue()
    started = [FORK.Process(target=_rank, args=(r, size, port, work, told)) for r in range(size)]
    for process in started:
        process.start()
    try:
        found = [told.get(timeout=900) for _ in range(size)]
    finally:
        for process in started:
            process.join(20)
            process.kill()
    if errors := [f"rank {rank}: {said}" for rank, said, _ in found if said]:
        raise SystemExit("\n".join(errors))
    return [value for *_, value in sorted(found, key=lambda part: part[0])]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _rank(rank: int, size: int, port: int, work: Callable[[], Any], told: Any) -> None:
    torch.set_num_threads(1)
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState._reset_state()
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "ACCELERATE_USE_CPU": "true"}
    place |= {"OMP_NUM_THREADS": 1}  # accelerate would take as many as there are cores
    os.environ.update({name: str(value) for name, value in place.items()})
    error, value = "", None
    try:
        value = work()
        if isinstance(value, dict):  # tensors travel by files that end with this process
            value = {name: tensor.numpy() for name, tensor in value.items()}
    except BaseException as raised:
        error = f"{type(raised).__name__}: {raised}"
    told.put((rank, error, value))
    told.close()
    told.join_thread()
    os._exit(0)


def together(parts: list[dict[str, Any]], members: int = 1) -> Seen:
    """What all processes saw, as one would: samples in the order of their names, rows in that of
    their values; sums over processes are everybody's, and so are samples of a team's members."""
    each = [{name: torch.from_numpy(value) for name, value in part.items()} for part in parts]
    teams = each[::members]
    whole = {name: torch.cat([part[name] for part in teams]) for name in teams[0]}
    order = whole.pop("keys").argsort()
    for name in ("samples", "rewards"):
        whole[name] = whole[name][order]
    for name in ("prompts", "advantages"):
        whole[name] = whole[name].sort().values
    for name in ("gradient", "step", "weights", "moved"):
        whole[name] = each[0][name]
        assert all(torch.equal(whole[name], part[name]) for part in each), f"{name} differ by rank"
    return whole


def apart(one: Seen, other: Seen) -> dict[str, float]:
    """Norm of the difference over the norm, by name; inf where not even the numbers of rows are
    equal."""
    out = {}
    for name, value in one.items():
        if name == "weights":
            continue
        if value.shape != other[name].shape:
            out[name] = float("inf")
            continue
        a, b = value.double().flatten(), other[name].double().flatten()
        out[name] = float((a - b).norm() / a.norm().clamp(min=1e-300))
    return out


def rounding(one: Seen, other: Seen) -> float:
    """How much further apart weights are than their steps, in units of their last digit: the most
    of all."""
    after, moved = one["weights"], one["moved"]
    apart = (after.double() - other["weights"].double()).abs()
    steps = (one["step"] - other["step"]).view(-1, len(after)).sum(0).abs()
    size = torch.maximum(after.abs(), (after - moved).abs())
    digit = (torch.nextafter(size, torch.tensor(torch.inf)) - size).double()
    return float(((apart - steps) / digit).max())


# ---------------------------------------------------------------------------
# what is compared


def methods(policy: Any, folder: Path, names: list[str], bases: list[str], sizes: list[int]) -> Any:
    """(method, base, processes, figures) of every combination."""
    for method in names:
        asked = words(method, "replicated", folder / method)
        one = together(on(1, lambda asked=asked: train(policy, asked)))
        for base in bases:
            for size in sizes:
                asked = words(method, base, folder / f"{method}-{base}-{size}")
                parts = on(size, lambda asked=asked: train(policy, asked))
                found = together(parts, members=2 if base == "shared" else 1)
                yield method, base, size, apart(one, found) | {"rounding": rounding(one, found)}


def resumed(policy: Any, folder: Path, sizes: list[int], base: str) -> float:
    """A run of an iteration on each of these numbers of processes against a whole one: how far
    apart is what the weights moved by."""
    iterations = f"iterations={len(sizes)}"
    asked = words("flow_grpo", "replicated", folder / f"whole-{base}-{sizes[0]}", iterations)
    one = together(on(1, lambda: train(policy, asked)))
    run = folder / f"resumed-{base}-{sizes[0]}"
    for stage, size in enumerate(sizes, 1):
        words_ = words("flow_grpo", base, run, f"iterations={stage}")
        cfg = flowrl.load_config(None, words_)
        found = on(size, lambda cfg=cfg, stage=stage: stage_of(policy, cfg, run, stage))
    return apart({"moved": one["moved"]}, {"moved": torch.from_numpy(found[0]["moved"])})["moved"]


def stage_of(policy: Any, cfg: Any, run: Path, stage: int) -> Seen:
    """One iteration more of a run -> its weights, and what all of them moved by."""
    before = policy.state()
    resume = run if stage > 1 else None
    live = {"rewards": {"spread": spread}, "prompts": "shapes:train"}
    trainer = Trainer(cfg, resume=resume, policy=policy, **live)
    list(trainer)
    return moved(before, policy.state())


def policy_of(model: str, lora: dict[str, Any] | None) -> Any:
    """The embedded model, or a tiny pipeline of tests/helpers."""
    if model == "shapes-sd3":
        return flowrl.load_policy(model, lora=lora)
    import tiny

    return tiny.policy(model, lora=lora)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    bases = ["replicated", "sharded"]
    parser.add_argument("--model", default="shapes-sd3", choices=("shapes-sd3", "flux", "wan21"))
    parser.add_argument("--bases", nargs="+", default=bases, choices=BASES)
    parser.add_argument("--sizes", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--micro", type=int, default=1, help="batch.micro")
    parser.add_argument("--updates", type=int, default=1, choices=(1, 2), help="batch.updates")
    parser.add_argument("--most", type=float, default=1e-6, help="largest figure that passes")
    parser.add_argument("--full", action="store_true", help="train all weights, not LoRA")
    parser.add_argument("--no-resume", action="store_true", help="leave the resumed runs out")
    asked = parser.parse_args()
    COMMON.extend([f"batch.micro={asked.micro}", f"batch.updates={asked.updates}"])
    if asked.full:
        COMMON.append("train.mode=full")
    torch.set_num_threads(1)
    torch.manual_seed(0)  # of the adapters' first values
    policy = policy_of(asked.model, None if asked.full else {"rank": 4, "alpha": 4})
    last = "rounding" if asked.full else "moved"
    names = ("prompts", "samples", "rewards", "advantages", "gradient", "step", last)
    worst, digits, stopped = 0.0, 0.0, 0.0
    print("| method | base | processes | " + " | ".join(names) + " |")
    print("|---" * (3 + len(names)) + "|")
    with tempfile.TemporaryDirectory() as where:
        folder = Path(where)
        for method, base, size, found in methods(
            policy, folder, asked.methods, asked.bases, asked.sizes
        ):
            worst = max(worst, *(found[name] for name in names if name != "rounding"))
            digits = max(digits, found["rounding"] if asked.full else 0.0)
            row = " | ".join(f"{found[name]:.1e}" for name in names)
            print(f"| {method} | {base} | {size} | {row} |", flush=True)
        for base in () if asked.no_resume else asked.bases:
            for sizes in ([4, 2], [2, 4]) if base == "shared" else ([4, 2, 1], [1, 2, 4]):
                found = resumed(policy, folder, sizes, base)
                # with --full, weights that were rounded otherwise go into the next iteration
                if asked.full:
                    stopped = max(stopped, found)
                else:
                    worst = max(worst, found)
                way = " then ".join(map(str, sizes))
                print(f"resumed on {way} processes, {base}: moved {found:.1e}")
    print(f"largest: {worst:.1e}" + (f", rounding {digits:.2f}" if asked.full else ""))
    rounded = ROUNDED * asked.updates
    raise SystemExit(worst > asked.most or digits > rounded or stopped > RESUMED)


if __name__ == "__main__":
    main()
