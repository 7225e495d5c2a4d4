"""Every shipped config as shipped: each model, precision and memory preset, with every method.

    python scripts/bench/shipped.py [--output runs/shipped.jsonl] [--workers 2] [--only WORD ...]
    python scripts/bench/shipped.py --page runs/shipped.jsonl

A run is one of the 96 cells of small_models.py x PRECISIONS x configs/memory, in a process of its
own. In it flow_grpo and nft are trained, and two or three of the other methods, so that each of
these meets every model, every precision and every preset. A method is trained by the command line's
own function: `flowrl train` of two iterations with its self-check and evaluations, `flowrl train
--resume` of a third, and for flow_grpo and nft `flowrl generate`; in the cells of COMMAND flow_grpo
is started by the command itself. A small model of the same classes (small_models.py) stands in
place of the weights. What is replaced is printed first (REPLACED); guidance, types, schedules,
targets of LoRA and memory settings are those of the files.

A line each in the output; what has one is not run again unless it failed, and a failure stops
nothing. A refusal counts only where REFUSED knows its sentence, which must be true at real size,
too. At the end: how many weights the memory settings touched, and the table of docs/models.md,
which --page writes from a complete output. Exit code 1 where something failed or is missing.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent))

import small_models
import torch
from methods_by_kind import on_flows

from flowrl.config.compose import options
from flowrl.training.budget.architecture import read as read_architecture

PRECISIONS = {
    "bf16": ["model.dtype=bf16", "train.precision=bf16"],
    "fp32": ["model.dtype=fp32", "train.precision=no"],
    "fp16": ["model.dtype=fp16", "train.precision=no"],  # fp16 with a scaler needs a GPU
}
FULL = ("flow_grpo", "nft")
SMALL = {  # settings of every run, and why they are replaced
    "data": "file",
    "reward": "preference",
    "reward.preference.rounding": "false",
    "batch.prompts": "2",
    "batch.group": "2",
    "batch.updates": "1",
    "sampler.steps": "4",
    "eval.steps": "2",
    "eval.images": "2",
    "checkpoint.every": "1",
    "iterations": "2",
}
COUNTS: dict[str, dict[str, str]] = {  # of methods: what counts steps, branches or samples
    "awm": {"algorithm.steps": "2"},
    "branch_grpo": {"batch.group": "4", "algorithm.tree.splits": "[0,1]"},
    "branch_grpo_mix": {
        "batch.group": "4",
        "algorithm.tree.splits": "[0,1]",
        "algorithm.window.size": "1",
        "algorithm.window.every": "1",
    },
    "dgpo": {"algorithm.steps": "2"},
    "dpo": {"algorithm.steps": "2"},
    "flow_grpo_fast": {"algorithm.window.size": "1", "algorithm.window.high": "2"},
    "granular_grpo": {
        "batch.group": "4",
        "algorithm.tree.children": "2",
        "algorithm.tree.steps": "[0]",
        "algorithm.tree.strides": "[1,2]",
    },
    "mix_grpo": {"algorithm.window.size": "1", "algorithm.window.every": "1"},
    "mix_grpo_flash": {"algorithm.window.size": "1", "algorithm.window.every": "1"},
    "pref_grpo": {"batch.group": "4"},
    "raft": {"algorithm.steps": "2"},
    "rwr": {"algorithm.steps": "2"},
    "nft": {"algorithm.steps": "2"},
    "crd": {"algorithm.steps": "2"},
    "dense_grpo": {"batch.group": "8"},
    "tempflow_grpo": {"batch.group": "6", "algorithm.tree.children": "2"},
    "tree_grpo": {"batch.group": "3", "algorithm.window.size": "1"},
}
REPLACED = {  # every setting that a run has otherwise than the files say -> by what
    "model.source": "a small model of the same classes with random weights",
    "model.pipeline.height": "64, or 16 to 32 where frames or tiles are long",
    "model.pipeline.width": "64, or 272, which a decoder of videos cuts in tiles",
    "model.pipeline.num_frames": "5",
    "batch.prompts": "2",
    "batch.group": "2, or the leaves of the smaller tree",
    "batch.updates": "1",
    "sampler.steps": "4",
    "algorithm.steps": "2 noise levels",
    "algorithm.window.size": "1 step",
    "algorithm.window.every": "1 iteration",
    "algorithm.window.high": "step 2",
    "algorithm.tree.splits": "steps 0 and 1",
    "algorithm.tree.children": "2",
    "algorithm.tree.steps": "step 0",
    "algorithm.tree.strides": "1 and 2",
    "eval.steps": "2",
    "eval.images": "2",
    "iterations": "2, and a third after a resume",
    "checkpoint.every": "1",
    "data.train": "four prompts of a file",
    "data.eval": "the same four",
    "reward": "the preference of the embedded world, which has a gradient",
}
PROMPTS = (
    "a red circle",
    "two blue squares",
    "a green triangle above a red square",
    "one yellow circle",
)
COMMAND = ("bf16", "none")  # precision and preset of cells whose flow_grpo is a command of its own
BACKENDS = ("bitsandbytes", "torchao")
REFUSED = {  # start of a sentence -> why it is true at real size
    "model.encoders=leave is for frozen text encoders": "a trained encoder is read in each forward",
    "model.offload=all: the gradient of a reward passes": "both networks are read in one backward",
}
BEGIN, END = "<!-- table of scripts/bench/shipped.py -->", "<!-- end of its table -->"
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Cell:
    """A run."""

    model: str  # name of configs/model
    precision: str  # one of PRECISIONS
    memory: str  # name of configs/memory, or "none"

    @property
    def name(self) -> str:
        return f"{self.model}/{self.precision}/{self.memory}"


def presets() -> list[str]:
    return ["none", *options("memory")]


def cells() -> list[Cell]:
    """All runs, in twelve passes of one cell a model, in each of which all precisions and presets
    meet some: the first passes see most."""
    precisions, memory, models = list(PRECISIONS), presets(), small_models.names()
    passes = range(len(precisions) * len(memory))
    return [
        Cell(model, precisions[(p + i) % len(precisions)], memory[(p + i) % len(memory)])
        for p in passes
        for i, model in enumerate(models)
    ]


def methods_of(cell: Cell) -> list[str]:
    """What is trained in a cell: FULL, and the other methods whose number plus the model's counts
    to this precision and this preset: each of them meets each model, precision and preset."""
    others = [m for m in on_flows() if m not in FULL]
    model = small_models.names().index(cell.model)
    precision, preset = list(PRECISIONS).index(cell.precision), presets().index(cell.memory)
    own = [
        method
        for m, method in enumerate(others)
        if (m + model) % len(PRECISIONS) == precision and (m + model) % len(presets()) == preset
    ]
    return [*FULL, *own]


def words(cell: Cell, method: str, source: Path, prompts: Path) -> list[str]:
    """The words of `flowrl train`."""
    call = small_models.call_of(cell.model)
    settings = {
        **SMALL,
        **COUNTS.get(method, {}),
        "data.train": prompts,
        "data.eval": prompts,
        "model.source": source,
        **{f"model.pipeline.{key}": value for key, value in call.items()},
    }
    chosen = [f"model={cell.model}", f"algorithm={method}"]
    chosen += [f"memory={cell.memory}"] * (cell.memory != "none")
    return [*chosen, *PRECISIONS[cell.precision], *(f"{k}={v}" for k, v in settings.items())]


# ---------------------------------------------------------------------- a method in a cell


class Said(Exception):
    """What a command ended with, not 0: its exit code and its last sentence."""

    def __init__(self, code: int, sentence: str) -> None:
        super().__init__(sentence)
        self.code = code


def command(*arguments: object, own: bool = False) -> None:
    """`flowrl ARGUMENTS` by the command line's function; own: as a process."""
    given = [str(argument) for argument in arguments]
    if own:
        beside = Path(sys.executable).with_name("flowrl")
        ended = subprocess.run([beside, *given], capture_output=True, text=True, check=False)
        code, output, error = ended.returncode, ended.stdout + ended.stderr, None
    else:
        from typer.testing import CliRunner

        from flowrl.cli.main import app
        from flowrl.runtime.log import logger

        result = CliRunner().invoke(app, given)
        logger.handlers.clear()  # it wrote to the runner's stream
        code, output, error = result.exit_code, result.output, result.exception
    if code:
        said = re.findall(r"^flowrl: (.*)", output, re.MULTILINE)
        if not said and error is not None:
            said = ["".join(traceback.format_exception(error))[-2000:]]
        raise Said(code, said[-1] if said else output[-500:])


def check_metrics(run: Path, iterations: int) -> None:
    """Each iteration trained: finite numbers, rows, a gradient, no skipped update."""
    from flowrl.runtime.store.run_folder import read_metrics

    lines = read_metrics(run)
    if [line["iteration"] for line in lines] != list(range(1, iterations + 1)):
        raise ValueError(f"metrics.jsonl has {len(lines)} iterations of {iterations}")
    for line in lines:
        skipped, norm = line["policy/skipped"], line["policy/grad_norm"]
        if skipped or not line["policy/rows"] or not 0 < norm < float("inf"):
            raise ValueError(f"iteration {line['iteration']}: skipped {skipped}, gradient {norm}")


def check_outputs(run: Path, *, guided: bool) -> None:
    """The evaluations before (guided: also with guidance) and after, and the exported weights."""
    rows = [row["name"] for row in json.loads((run / "evaluation.json").read_text())["rows"]]
    wanted = ["before", *["before, guided"] * guided, "after"]
    if rows != wanted:
        raise ValueError(f"evaluated {rows}, not {wanted}")
    exported = [*run.glob("lora/*.safetensors"), *run.glob("heads/*.safetensors")]
    if not exported:
        raise ValueError("no weights were exported")


def attempt(cell: Cell, method: str, source: Path, folder: Path) -> dict[str, Any]:
    """A method in a cell, stage by stage, up to the first that fails."""
    from flowrl.config.load import load_config
    from flowrl.training import build

    run, prompts = folder / "run", folder / "prompts.txt"
    prompts.write_text("\n".join(PROMPTS) + "\n")
    given = words(cell, method, source, prompts)
    own = method == FULL[0] and (cell.precision, cell.memory) == COMMAND
    out: dict[str, Any] = {"cell": cell.name, "method": method, "command": own}
    held: list[Any] = []

    def kept(*arguments: Any, **how: Any) -> Any:
        held[:] = [made(*arguments, **how)]
        return held[0]

    made, began, stage = build.make_policy, seconds(), "train"
    try:
        with mock.patch.object(build, "make_policy", kept):
            command("train", *given, f"output={run}", own=own)
            out["train"] = round(seconds() - began, 1)
            check_metrics(run, 2)
            check_outputs(run, guided=load_config(None, given).eval.baseline_guidance is not None)
            stage = "resume"
            # a third changes a schedule of the learning rate over all of them
            fixed = load_config(None, given).optimizer.schedule == "constant"
            accept = [] if fixed else ["--accept-changes"]
            command("train", "--resume", run, "iterations=3", *accept, own=own)
            check_metrics(run, 3)
        out["touched"] = touched(held[0], run) if held else {}
        stage = "generate"
        if method in FULL:
            video = "num_frames" in small_models.call_of(cell.model)
            picture = folder / ("out.mp4" if video else "out.png")
            command("generate", run, PROMPTS[0], "--steps", 2, "-o", picture, own=own)
            if not picture.stat().st_size:
                raise ValueError(f"{picture.name} is empty")
        out["result"] = "passed"
    except Said as error:
        known = error.code == 2 and stage == "train" and reason(str(error))
        out |= {"result": "refused" if known else "failed", "stage": stage, "said": str(error)}
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        out |= {"result": "failed", "stage": stage, "said": said}
    return out | {"seconds": round(seconds() - began, 1)}


def seconds() -> float:
    """Seconds of all cores that this process and the commands that it started have worked."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


def reason(sentence: str) -> str | None:
    """Why a refusal is true at real size, too; None of one that is not known."""
    return next((why for start, why in REFUSED.items() if sentence.startswith(start)), None)


def touched(policy: Any, run: Path) -> dict[str, int]:
    """Weights of Linear layers, whole and quantised; trained ones with moments in 8 bits; calls of
    the decoder for one sample."""
    from safetensors import safe_open

    from flowrl.policy.weights.quantised import is_quantised

    out: Counter[str] = Counter()
    for network in policy.networks.values():
        for name, module in network.named_modules():
            if isinstance(module, torch.nn.Linear) and "lora_" not in name:
                size = module.in_features * module.out_features
                out["quantised" if is_quantised(module.weight) else "whole"] += size
    newest = max(run.glob("checkpoints/step-*"))
    with safe_open(newest / "optimizer.safetensors", "pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118
            tensor = tensors.get_tensor(name)
            if tensor.dtype == torch.uint8 and "state1" in name:
                out["eight_bit"] += tensor.numel()
    vae, calls = policy.prober.runner.pipe.vae, []
    hook = vae.decoder.register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        cond = policy.encode([PROMPTS[0]])
        x = torch.zeros(1, *policy.latent_shape)
        policy.decode(x, 0.0, cond, torch.tensor([0]))
    hook.remove()
    return {**out, "tiles": len(calls)}


# ---------------------------------------------------------------------- all of them


def in_cell(cell: Cell, methods: Sequence[str], models: Path, output: Path) -> list[dict[str, Any]]:
    """Train the methods of a cell -> their results, each a line more in output."""
    source, out = small_models.save(cell.model, models), []
    for method in methods:
        with tempfile.TemporaryDirectory() as folder:
            out.append(attempt(cell, method, source, Path(folder)))
        with output.open("a") as lines:
            lines.write(json.dumps(out[-1]) + "\n")
    return out


def read(path: Path) -> list[dict[str, Any]]:
    """The newest line of each method of a cell."""
    lines = path.read_text().splitlines() if path.exists() else []
    newest = {(r["cell"], r["method"]): r for r in map(json.loads, lines)}
    return list(newest.values())


def run(chosen: Sequence[Cell], workers: int, output: Path, models: Path) -> None:
    """Every cell in a process of its own, which inherits what was imported here."""
    for module in ("flowrl.cli.main", "flowrl.training.run", "flowrl.report.run_page", *BACKENDS):
        importlib.import_module(module)
    for cell in chosen:
        getattr(importlib.import_module("diffusers"), read_architecture(cell.model).pipeline)
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # of the commands
    done = {(r["cell"], r["method"]) for r in read(output) if r["result"] != "failed"}
    for model in {cell.model for cell in chosen}:
        small_models.save(model, models)
    fork = multiprocessing.get_context("fork")
    with fork.Pool(workers, maxtasksperchild=1) as pool:
        waiting = []
        for cell in chosen:
            left = [m for m in methods_of(cell) if (cell.name, m) not in done]
            if left:
                waiting.append(pool.apply_async(in_cell, (cell, left, models, output)))
        for one in waiting:
            for r in one.get():
                said = " ".join([r["result"], r.get("stage", ""), r.get("said", "")])
                print(f"{r['cell']} {r['method']}  {r['seconds']} s  {said[:300]}", flush=True)


def page(results: Sequence[dict[str, Any]]) -> str:
    """The table of docs/models.md: a line a model."""
    lines = [
        "| model | passed | refused | quantised: nf4, int8 | moments in 8 bits | decoder calls |",
        "|---|---|---|---|---|---|",
    ]
    for model in small_models.names():
        own = [r for r in results if r["cell"].split("/")[0] == model]
        count = Counter(r["result"] for r in own)
        failed = f", {count['failed']} failed" * (count["failed"] > 0)
        lines.append(
            f"| {model} | {count['passed']}{failed} | {count['refused']} |"
            f" {share(own, '24gb')}, {share(own, '40gb')} | {moments(own)} | {tiles(own)} |"
        )
    said = Counter(r["said"] for r in results if r["result"] == "refused")
    lines += ["", "What was refused:", ""]
    lines += [f'* {n} times: "{sentence}" ({reason(sentence)})' for sentence, n in said.items()]
    return "\n".join(lines)


def trained(own: Sequence[dict[str, Any]], preset: str) -> list[dict[str, int]]:
    """What a preset touched in the runs of flow_grpo that were looked into."""
    of_preset = [r for r in own if r["cell"].endswith(preset) and r["method"] == FULL[0]]
    return [r["touched"] for r in of_preset if r.get("touched")]


def share(own: Sequence[dict[str, Any]], preset: str) -> str:
    """Quantised weights of all weights of Linear layers."""
    found = {(t.get("quantised", 0), t.get("whole", 0)) for t in trained(own, preset)}
    return " or ".join(f"{some:,} of {some + whole:,}" for some, whole in sorted(found)) or "-"


def moments(own: Sequence[dict[str, Any]]) -> str:
    """Trained weights whose moments are in 8 bits."""
    found = {t.get("eight_bit", 0) for t in trained(own, "24gb")}
    return " or ".join(f"{n:,}" for n in sorted(found)) or "-"


def tiles(own: Sequence[dict[str, Any]]) -> str:
    """Calls of the decoder for a sample, whole and with model.tiling."""
    whole, tiled = ({t["tiles"] for t in trained(own, p)} for p in ("none", "24gb"))
    return f"{max(whole, default='-')}, with tiles {max(tiled, default='-')}"


def failures(results: Sequence[dict[str, Any]], chosen: Sequence[Cell]) -> list[str]:
    """What failed, what is missing, and what a preset should have touched and did not."""
    out = [f"{r['cell']} {r['method']}" for r in results if r["result"] == "failed"]
    have = {(r["cell"], r["method"]) for r in results}
    wanted = [(cell.name, m) for cell in chosen for m in methods_of(cell)]
    out += [f"{name} {m} is missing" for name, m in wanted if (name, m) not in have]
    for model in {cell.model for cell in chosen}:
        own = [r for r in results if r["cell"].split("/")[0] == model]
        for preset, key in (("24gb", "quantised"), ("40gb", "quantised"), ("24gb", "eight_bit")):
            if any(not t.get(key) for t in trained(own, preset)):
                out.append(f"{model}: memory={preset} left {key} at 0")
        calls = [{t["tiles"] for t in trained(own, preset)} for preset in ("none", "24gb")]
        if all(calls) and not max(calls[0]) < min(calls[1]):
            out.append(f"{model}: memory=24gb decoded no tiles")
    return out


def arguments() -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--output", type=Path, default=Path("runs/shipped.jsonl"))
    parser.add_argument("--models", type=Path, default=Path("runs/shipped_models"))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", nargs="*", default=[], help="cells whose name holds all of these")
    parser.add_argument("--page", type=Path, help="write docs/models.md from this output")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    chosen = [cell for cell in cells() if all(word in cell.name for word in args.only)]
    for setting, by in REPLACED.items():
        print(f"replaced: {setting} by {by}")
    output = args.page or args.output
    if not args.page:
        output.parent.mkdir(parents=True, exist_ok=True)
        run(chosen, args.workers, output, args.models)
    results = read(output)
    table, wrong = page(results), failures(results, chosen)
    print(table)
    if args.page and not wrong:
        path = ROOT / "docs/models.md"
        before, _, rest = path.read_text().partition(BEGIN)
        path.write_text(f"{before}{BEGIN}\n\n{table}\n\n{END}{rest.partition(END)[2]}")
    print("\n".join(f"failed: {one}" for one in wrong))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
