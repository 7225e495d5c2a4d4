"""Which pipelines of diffusers are policies: tiny random ones of many classes, tried in every part.

    python scripts/bench/pipelines.py [NAME ...] [--workers 2] [--output runs/pipelines.jsonl]
    python scripts/bench/pipelines.py --resume
    python scripts/bench/pipelines.py --page runs/pipelines.jsonl
    python scripts/bench/pipelines.py --second [NAME/wide NAME/still ...]
    python scripts/bench/pipelines.py --far|--text [NAME ...]

Each case of tests/helpers/zoo is loaded (its call is inferred), compared with the pipeline itself
(self-check), asked for rows of its prompts, trained through (every LoRA matrix gets a gradient,
decoding has one), sampled from, and trained for one iteration of flow_grpo and one of nft. A line
each in the output, with the reason of the first part that fails; --resume runs the cases that have
no line yet. Exit code 1 if one fails that is not known to. --page runs nothing: it writes tables of
docs/models.md from the output of a complete run, and keeps that in docs/results/pipelines.jsonl;
the second of them has the classes that diffusers exports and no case tries, each with its reason
(tests/helpers/zoo/untried.yaml).
--second: the same with two more sets of arguments for each case that passes
(tests/helpers/zoo/second.py), without training. --far: a case that passes is put on the device of
tests/helpers/far.py, which computes on the CPU and raises where an operator is given tensors of two
devices, as a GPU would. --text: whose text encoders can be trained: LoRA on them alone is moved off
its start, and the gradient of the sum of squared velocities is taken through the replayed call and
through the pipeline's own loop.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import functools
import json
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from rich.table import Table
from torch import Tensor

import flowrl
from flowrl.cli.common import show
from flowrl.policy.check import relative
from flowrl.policy.replay.decode import Decoder

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "docs/results/pipelines.jsonl"
KEPT_SECOND = ROOT / "docs/results/pipelines_second.jsonl"
sys.path.insert(0, str(ROOT / "tests" / "helpers"))

import far  # noqa: E402
from zoo import cases  # noqa: E402
from zoo.case import PROMPTS, Case  # noqa: E402
from zoo.exported import exported, unnamed, untried  # noqa: E402
from zoo.second import REFUSED, SETS, changed, second  # noqa: E402

LORA = {"rank": 2, "alpha": 2.0, "targets": None, "init": "gaussian"}
SMALL = [
    f"reward={Path(__file__).resolve()}:redness",
    "batch.prompts=2",
    "batch.group=2",
    "batch.updates=1",
    "sampler.steps=4",
    "sampler.guidance=none",
    "data.eval=null",
    "eval.baseline_guidance=null",
    "ema.every=1",
    "trackers=[]",
    "guard.check_rewards=false",
    "iterations=1",
]
ROWS = {
    "batch": "prompts together",
    "copies": "one prompt, several copies",
    "repeated": "one prompt, repeated",
    "lists": "one prompt and condition, repeated",
    "alone": "one row",
}
BEGIN, END = "<!-- table of scripts/bench/pipelines.py{} -->", "<!-- end of the table{} -->"
METHODS = {"grpo": ["algorithm=flow_grpo"], "nft": ["algorithm=nft", "algorithm.steps=2"]}
KINDS = {  # options, each of which asks something else of the cases
    "--second": "other arguments for each case",
    "--far": "on a device that is not there",
    "--text": "the gradient of text encoders",
}
TEXT = 1e-4  # most that gradients of text encoders may differ, relative


@flowrl.reward(scale="mean red minus mean of green and blue, in [-1, 1]")
def redness(media, prompts, context=None):
    red, green, blue, *_ = media.mean((-2, -1)).unbind(-1)  # some have a fourth, alpha
    score = red - (green + blue) / 2
    return score if score.ndim == 1 else score.mean(1)


# ---------------------------------------------------------------------------
# the parts, in order; each raises where it fails


def load(case: Case, pipe: Any, parts: list[str] | None = None) -> Any:
    example = case.conditions[0] if case.conditions else None
    return flowrl.load_policy(pipe, lora=LORA, example=example, parts=parts, **case.call)


def gather(policy: Any, case: Case) -> None:
    """Rows [1, 0] of two prompts are rows [0, 1] the other way round."""
    x = torch.randn(2, *policy.latent_shape, generator=torch.Generator().manual_seed(0))
    cond, rows = policy.encode(list(PROMPTS), list(case.conditions) or None), torch.tensor([0, 1])
    sigma = policy.schedule(8).sigmas[2].item()
    with torch.no_grad():
        v = policy.velocity(x, sigma, cond, rows)
        swapped = policy.velocity(x.flip(0), sigma, cond, rows.flip(0)).flip(0)
        crossed = policy.velocity(x, sigma, cond, rows.flip(0))
    if not relative(swapped, v) <= 1e-4:
        raise ValueError(f"rows in another order differ by {relative(swapped, v):.1e}")
    if not relative(crossed, v) > 1e-3:
        raise ValueError("both prompts give the same velocity")


def gradient(policy: Any, case: Case) -> None:
    """A gradient reaches every LoRA matrix that the pipeline's own loop body has one for."""
    generator = torch.Generator().manual_seed(0)
    own = list(case.conditions) or None
    cond, rows = policy.encode(list(PROMPTS), own), torch.tensor([0, 1])
    x = torch.randn(2, *policy.latent_shape, generator=generator)
    parameters = {name: p for part in policy.parts.values() for name, p in part.items()}
    kept = {name: p.detach().clone() for name, p in parameters.items()}
    with torch.no_grad():  # where the second matrices are zero, the first ones have no gradient
        for p in parameters.values():
            p.copy_(0.02 * torch.randn(p.shape, generator=generator))
    sigmas = policy.schedule(8).sigmas
    reached: list[set[str]] = []
    for velocity in (
        lambda sigma: policy.velocity(x, sigma, cond, rows),
        lambda sigma: policy.reentry(x, sigma, list(PROMPTS), own),
    ):
        for sigma in (sigmas[1].item(), sigmas[-3].item()):  # two networks may share the loop
            velocity(sigma).square().sum().backward()
        reached.append({n for n, p in parameters.items() if p.grad is not None and p.grad.any()})
        for p in parameters.values():
            p.grad = None
    with torch.no_grad():
        for name, p in parameters.items():
            p.copy_(kept[name])
    ours, own = reached
    if not ours or own - ours:
        missing = min(own - ours, default="all")
        raise ValueError(f"no gradient reaches {len(own - ours)} of {len(own)}, such as {missing}")


def decode(policy: Any, case: Case) -> None:
    """Media in [0, 1] with a gradient."""
    x = torch.randn(2, *policy.latent_shape, generator=torch.Generator().manual_seed(0))
    cond = policy.encode(list(PROMPTS), list(case.conditions) or None)
    media = policy.decode(x.requires_grad_(), 0.0, cond, torch.tensor([0, 1]))
    if not (media.min() >= 0 and media.max() <= 1):
        raise ValueError(f"media in [{media.min():.3f}, {media.max():.3f}]")
    media.sum().backward()
    if x.grad is None or not x.grad.abs().max() > 0:
        raise ValueError("no gradient passes the decoder")


def generate(policy: Any, case: Case, steps: int) -> None:
    own = list(case.conditions) or None
    media = flowrl.generate(policy, list(PROMPTS), steps=steps, seed=0, conditions=own)
    if not bool(torch.isfinite(media).all()) or torch.equal(media[0], media[1]):
        raise ValueError("media are not finite, or the same for both prompts")


def train(policy: Any, case: Case, words: list[str], folder: Path) -> None:
    """One iteration that moves the weights."""
    from flowrl.config.load import load_config
    from flowrl.training import build
    from flowrl.training.loop import Trainer

    output = f"output={folder / words[0].partition('=')[2]}"
    prompts = written(case, folder)
    cfg = load_config(None, [*words, *SMALL, "data=file", f"data.train={prompts}", output])
    with mock.patch.object(build, "make_policy", lambda cfg, **_: policy):
        it = next(iter(Trainer(cfg)))
    if not it.metrics["policy/grad_norm"] > 0:
        raise ValueError(f"the gradient is {it.metrics['policy/grad_norm']}")


def written(case: Case, folder: Path) -> Path:
    """A prompt file with the case's conditions as columns."""
    rows = []
    for i, prompt in enumerate(PROMPTS):
        row: dict[str, Any] = {"prompt": prompt}
        for key, value in (case.conditions[i] if case.conditions else {}).items():
            many = value if isinstance(value, list) else [value]
            names = [f"{key}-{i}-{k}.png" for k in range(len(many))]
            for name, picture in zip(names, many, strict=True):
                picture.save(folder / name)
            row[key] = names if isinstance(value, list) else names[0]
        rows.append(json.dumps(row))
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(rows))
    return path


def in_short(policy: Any) -> dict[str, str]:
    """What was inferred: how rows are asked for, coordinates, network calls, guidance, decoder."""
    replay, coords, runner = policy.replay, policy.coords, policy.prober.runner
    calls = [f"{c.module}({c.blocks} x)" for r in replay.regimes for c in r.calls]
    rules = list(dict.fromkeys(r.guidance.describe() for r in replay.regimes))
    return {
        "rows": ROWS[runner.form],
        "latents": "x".join(map(str, replay.shape)),
        "scheduler": f"{coords.kind}, {coords.prediction}",
        "calls": ", ".join(calls) or "the loop's own body",
        "guidance": " or ".join(rules) or "the pipeline's own",
        "decoder": "the VAE" if isinstance(policy.decoder, Decoder) else "the pipeline's tail",
    }


def elsewhere(policy: Any, case: Case) -> None:
    """All tensors of a call are on the far device, and so is what comes of it."""
    noise = torch.randn(2, *policy.latent_shape, generator=torch.Generator().manual_seed(0))
    rows, own = torch.tensor([0, 1]), list(case.conditions) or None
    cond, sigmas = policy.encode(list(PROMPTS), own), policy.schedule(8).sigmas
    x = policy.start(far.far(noise), sigmas[0].item(), cond, rows)
    v = policy.velocity(x, sigmas[2].item(), cond, rows)
    v.square().mean().backward()
    media = policy.decode(x, 0.0, cond, rows)
    if not (isinstance(v, far.Far) and isinstance(media, far.Far)):
        raise ValueError("a result is not on the device")


class GradientsDiffer(Exception):
    """The replayed call gives text encoders another gradient than the pipeline's own loop."""


def text(policy: Any, case: Case) -> dict[str, float]:
    """Differences of the velocity and of the gradient that reaches the text encoders."""
    generator, own = torch.Generator().manual_seed(0), list(case.conditions) or None
    parameters = policy.parts["text_encoder"]
    with torch.no_grad():  # where the second matrices are zero, the first ones have no gradient
        for parameter in parameters.values():
            parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
    x = torch.randn(2, *policy.latent_shape, generator=generator)
    sigma = policy.schedule(8).sigmas[1].item()
    cond, rows = policy.encode(list(PROMPTS), own), torch.tensor([0, 1])
    ours = through(lambda: policy.velocity(x, sigma, cond, rows), parameters)
    theirs = through(lambda: policy.reentry(x, sigma, list(PROMPTS), own), parameters)
    if not theirs[1].any():
        raise ValueError("the pipeline's own loop gives no gradient")
    pairs = zip(("velocity", "gradient"), ours, theirs, strict=True)
    found = {name: relative(a, b) for name, a, b in pairs}
    if found["gradient"] > TEXT:
        raise GradientsDiffer(f"by {found['gradient']:.0e}")
    return found


def through(velocity: Callable[[], Tensor], parameters: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """(the velocity, the gradient of its squares, all parameters in a row)."""
    v = velocity()
    v.square().sum().backward()
    each = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters.values()]
    for parameter in parameters.values():
        parameter.grad = None
    return v.detach(), torch.cat([gradient.flatten() for gradient in each])


def parts_of(what: str, out: dict[str, Any], folder: Path) -> dict[str, Callable[..., Any]]:
    """What is asked of a case, in order; each is given its policy and the case."""

    def checked(policy: Any, case: Case) -> None:
        out["errors"] = policy.self_check().errors

    if what == "far":
        return {"check": checked, "far": elsewhere}
    if what == "text":
        return {"text": lambda policy, case: out.update(errors=text(policy, case))}
    steps = {"usual": 4, "second": 7}[what]
    parts = {"check": checked, "gather": gather, "gradient": gradient, "decode": decode}
    parts["generate"] = functools.partial(generate, steps=steps)
    for key, words in METHODS.items() if what == "usual" else ():
        parts[key] = functools.partial(train, words=words, folder=folder)
    return parts


def attempt(name: str, what: str = "usual") -> dict[str, Any]:
    """All parts of a case, up to the first that fails; NAME/SET is asked what --second asks."""
    what = "second" if "/" in name else what
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    case, began = cases()[name.partition("/")[0]], time.perf_counter()
    out: dict[str, Any] = {"name": name, "failed": None, "why": None}
    policy: Any = None

    def loaded(*_: Any) -> None:
        nonlocal case, policy
        pipe = case.make()
        out["pipeline"] = type(getattr(pipe, "blocks", pipe)).__name__  # modular: the blocks
        if what == "second":
            case = changed(name, pipe)
        policy = load(case, pipe, ["text_encoder"] if what == "text" else None)
        out["call"] = in_short(policy)

    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if what == "far":
            stack.enter_context(far.whole_runs(stack.enter_context(pytest.MonkeyPatch.context())))
        # a part that fails leaves nothing that the next could be judged by
        for part, run in {"load": loaded, **parts_of(what, out, folder)}.items():
            start = time.perf_counter()
            try:
                run(policy, case)
            except Exception as error:
                out["failed"], out["why"] = part, f"{type(error).__name__}: {error}"
                break
            out[f"seconds/{part}"] = round(time.perf_counter() - start, 2)
    return out | {"seconds": round(time.perf_counter() - began, 1)}


# ---------------------------------------------------------------------------


def page(results: list[dict[str, Any]]) -> str:
    """The table of docs/models.md."""
    known = cases()
    lines = [
        "| pipeline | case | result | rows of a run | scheduler | calls | guidance | decoder |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in sorted(results, key=lambda r: (r["failed"] is not None, r.get("pipeline", "~"))):
        call = r.get("call") or {}
        said = "passes" if r["failed"] is None else known[r["name"]].refused or r["why"]
        cells = [r.get("pipeline", ""), r["name"], said]
        cells += [call.get(k, "") for k in ("rows", "scheduler", "calls", "guidance", "decoder")]
        lines.append("| " + " | ".join(" ".join(c.replace("|", "/").split()) for c in cells) + " |")
    passing = [r for r in results if r["failed"] is None]
    classes = {r["pipeline"] for r in passing}
    lines += [
        "",
        f"{len(passing)} of {len(results)} cases pass, of {len(classes)} pipeline classes.",
    ]
    return "\n".join(lines)


def untried_page(results: list[dict[str, Any]]) -> str:
    """The table of docs/models.md of classes that no case tries, and how many there are of each
    kind."""
    tried = {r["pipeline"] for r in results if "pipeline" in r}
    if said := unnamed(tried):
        raise SystemExit(said)
    lines = ["| not tried, because | classes |", "|---|---|"]
    lines += [f"| {why} | {', '.join(sorted(names))} |" for why, names in untried().items()]
    passing = {r["pipeline"] for r in results if r["failed"] is None} & exported()
    refused = (tried & exported()) - passing
    left = sum(map(len, untried().values()))
    count = f"{len(passing)} pass, {len(refused)} are refused, and {left} were not tried"
    return "\n".join([*lines, "", f"Of {len(exported())} exported classes {count}."])


def read(path: Path) -> list[dict[str, Any]]:
    """Results that a run left, a line each."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def second_page(results: list[dict[str, Any]]) -> str:
    """The table of docs/models.md with other arguments: latents, and the largest error."""
    found = {r["name"]: r for r in results}
    lines = [f"| pipeline | case | {' | '.join(SETS)} |", "|---|---|" + "---|" * len(SETS)]
    for name in dict.fromkeys(r["name"].partition("/")[0] for r in results):
        both = [found[f"{name}/{kind}"] for kind in SETS]
        cells = [
            f"{r['call']['latents']}, {max(r['errors'].values()):.0e}"
            if r["failed"] is None
            else REFUSED.get(r["name"], f"{r['failed']}: {r['why']}")
            for r in both
        ]
        lines.append("| " + " | ".join([both[0].get("pipeline", ""), name, *cells]) + " |")
    passing = sum(r["failed"] is None for r in results)
    return "\n".join([*lines, "", f"{passing} of {len(results)} sets of arguments pass."])


def write_page(results: list[dict[str, Any]], what: str) -> None:
    other = what == "second"
    kept = [{k: v for k, v in r.items() if not k.startswith("seconds/")} for r in results]
    (KEPT_SECOND if other else KEPT).write_text("".join(json.dumps(r) + "\n" for r in kept))
    if other:
        write_table(" --second", second_page(results))
    else:
        write_table("", page(results))
        write_table(", not tried", untried_page(results))


def write_table(which: str, made: str) -> None:
    """Put a table between its marks in docs/models.md."""
    path, begin, end = ROOT / "docs/models.md", BEGIN.format(which), END.format(which)
    before, _, rest = path.read_text().partition(begin)
    path.write_text(f"{before}{begin}\n\n{made}\n\n{end}{rest.partition(end)[2]}")


def table(results: list[dict[str, Any]]) -> Table:
    out = Table("case", "pipeline", "seconds", "largest error", "result", box=None)
    for r in results:
        worst = f"{max(r['errors'].values()):.0e}" if "errors" in r else ""
        said = "passes" if r["failed"] is None else f"{r['failed']}: {r['why'][:200]}"
        out.add_row(r["name"], r.get("pipeline", ""), f"{r['seconds']}", worst, said)
    return out


def arguments() -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path("runs/pipelines.jsonl"))
    parser.add_argument("--resume", action="store_true")
    for name, text in KINDS.items():
        const = name.removeprefix("--")
        parser.add_argument(name, dest="what", action="store_const", const=const, help=text)
    parser.set_defaults(what="usual")
    parser.add_argument("--page", type=Path)
    args = parser.parse_args()
    known, usual = second() if args.what == "second" else list(cases()), None
    if args.what == "far":
        usual = [r["name"] for r in read(KEPT) if r["failed"] is None]
    if args.what == "text":
        usual = [name for name, case in cases().items() if not case.refused]
    if args.page and args.what not in ("usual", "second"):
        parser.error(f"--page shows nothing of --{args.what}")
    if unknown := sorted(set(args.names) - set(known)):
        parser.error(f"unknown {unknown[0]}; there are {', '.join(known)}")
    for path in [args.page] * (args.page is not None) + [args.output] * args.resume:
        if not path.is_file():
            parser.error(f"{path} is not a file that a run left")
    if args.page and (missing := {*known} ^ {r["name"] for r in read(args.page)}):
        parser.error(f"{args.page} is of other cases, see {min(missing)}; run all of them first")
    args.names = args.names or usual or known
    return args


def run(names: list[str], what: str, workers: int, output: Path) -> Iterator[dict[str, Any]]:
    """Results in the order of names, each a line more in output."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    spawn = multiprocessing.get_context("spawn")
    with (
        output.open("a") as lines,
        concurrent.futures.ProcessPoolExecutor(workers, mp_context=spawn) as pool,
    ):
        for result in pool.map(functools.partial(attempt, what=what), names):
            said = "passes" if result["failed"] is None else f"{result['failed']}: {result['why']}"
            print(f"{result['name']}  {result['seconds']} s  {said[:300]}", flush=True)
            lines.write(json.dumps(result) + "\n")
            lines.flush()
            yield result


def main() -> int:
    args = arguments()
    if args.page:
        write_page(read(args.page), args.what)
        return 0
    args.output.parent.mkdir(parents=True, exist_ok=True)
    if not args.resume:
        args.output.unlink(missing_ok=True)
    results = read(args.output) if args.resume else []
    done = {r["name"] for r in results}
    left = [name for name in args.names if name not in done]
    results += run(left, args.what, args.workers, args.output)
    show(table(results))
    passing = sum(r["failed"] is None for r in results)
    classes = {r.get("pipeline") for r in results if r["failed"] is None}
    print(f"{passing} of {len(results)} pass, {len(classes)} pipeline classes")
    failed = [r for r in results if r["failed"]]
    if args.what == "text":  # some cannot train their text encoders, and say so
        return int(any("GradientsDiffer" in r["why"] for r in failed))
    known = cases()
    refused = {name for name, case in known.items() if case.refused} | REFUSED.keys()
    return int(any(r["name"] not in refused for r in failed))


if __name__ == "__main__":
    sys.exit(main())
