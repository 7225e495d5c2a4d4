"""What real_size.py does with a model or a reward, in a process of its own.

    python scripts/bench/real_parts.py CASE FOLDER MINUTES

Commands of flowrl run in this process, as a user types them. encoder_calls: what text
encoders computed. gb: the most memory of an iteration, beyond what the
process held when the command began. After MINUTES no further part is begun: without
the instructions for bf16 a processor takes ten times as long.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import json
import math
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import real_cases
import torch
from real_cases import GIB, HELD_OUT, ROWS, Place
from real_folder import with_changes, write
from real_rewards import REWARDS, pictures
from real_tokenizers import CLASSES

from flowrl.training.budget.architecture import read

ROUNDING = 2**-7  # of bf16: relative, of a whole network


class Failed(Exception):
    """A part failed; the message says how."""


class Memory:
    """The resident memory of this process in bytes, looked at every 20 ms."""

    def __init__(self) -> None:
        self.base = self.highest = self.now()
        threading.Thread(target=self._watch, daemon=True).start()

    def now(self) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))

    def _watch(self) -> None:
        while True:
            self.highest = max(self.highest, self.now())
            time.sleep(0.02)

    def restart(self) -> None:
        self.highest = self.now()


class Process:
    """This process: runs commands of flowrl, and counts what they do."""

    def __init__(self) -> None:
        import diffusers  # noqa: F401, before memory is looked at
        import peft  # noqa: F401
        import transformers

        import flowrl.training.loop

        self.memory, self.calls, self.peaks = Memory(), 0, list[int]()
        for name in CLASSES:
            self._count(getattr(transformers, name))
        trainer = flowrl.training.loop.Trainer
        iterate = trainer.iterate

        def watched(run: Any, iteration: int) -> Any:
            freed()  # what a start left is no need of an iteration
            self.memory.restart()
            found = iterate(run, iteration)
            self.peaks.append(self.memory.highest - self.memory.base)
            return found

        trainer.iterate = watched  # type: ignore[method-assign]

    def _count(self, encoder: Any) -> None:
        """Count what this class computes; what flowrl knows already does not come here."""
        forward = encoder.forward

        @functools.wraps(forward)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return forward(*args, **kwargs)

        encoder.forward = counted

    def __call__(self, *words: str) -> dict[str, Any]:
        """Run a command -> what was counted; another exit code than 0 -> Failed."""
        from flowrl.cli.main import app

        print("\n$ flowrl", *words, flush=True)
        freed()
        self.calls, self.peaks, self.memory.base = 0, [], self.memory.now()
        sys.argv = ["flowrl", *words]
        try:
            app()
        except SystemExit as end:
            if end.code:
                raise Failed(f"flowrl {words[0]} ended with exit code {end.code}") from None
        found: dict[str, Any] = {"encoder_calls": self.calls}
        return found | ({"gb": max(self.peaks) / GIB} if self.peaks else {})


def freed() -> None:
    """Give memory back that a part has left."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)


def part(place: Place, name: str, run: Callable[[], Mapping[str, Any] | None]) -> bool:
    """Run a part unless it passed before, and note what came of it -> whether it passed."""
    if place.done(name):
        return True
    freed()
    began, worked = time.perf_counter(), time.process_time()
    try:
        found: Mapping[str, Any] = {"passed": True, **(run() or {})}
    except Exception as error:
        import traceback

        traceback.print_exc()
        found = {"passed": False, "why": f"{type(error).__name__}: {error}"[:300]}
    took = {"seconds": time.perf_counter() - began, "cpu": time.process_time() - worked}
    place.note(name, **{key: round(value, 1) for key, value in took.items()}, **found)
    return bool(found["passed"])


# ---------------------------------------------------------------------------
# a reward


def reward(place: Place, flowrl: Process) -> bool:
    """All parts of a reward -> whether they passed."""
    weights, name = place.folder / "weights", place.name
    weights.mkdir(exist_ok=True)
    settings = [f"{name}.{word}" for word in REWARDS[name](weights)]
    passed = [part(place, "score", lambda: scored(place, settings, flowrl))]
    if name == real_cases.TRAINED:
        passed.append(part(place, "train", lambda: trained_by(place, settings, flowrl)))
    return all(passed)


def scored(place: Place, settings: list[str], flowrl: Process) -> dict[str, Any]:
    """Score eight pictures; their scores have to be numbers, and to differ."""
    out = place.folder / "scores.jsonl"
    out.unlink(missing_ok=True)  # of a part that failed
    asked = [word for setting in (place.name, *settings) for word in ("--reward", setting)]
    media = [str(path) for path in pictures(place.folder)]
    flowrl("score", *media, "--prompt", real_cases.PROMPTS[0], *asked, "-o", str(out))
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    found = [line["scores"][place.name] for line in lines]
    if len(set(found)) != len(media) or not all(map(math.isfinite, found)):
        raise Failed(f"scores of {len(media)} pictures: {found}")
    return {"low": min(found), "high": max(found)}


def trained_by(place: Place, settings: list[str], flowrl: Process) -> dict[str, Any]:
    """Train the first model for an iteration with this reward."""
    own = next(iter(real_cases.MODELS))
    beside = Place(name=own, folder=place.folder.parent / own, results=place.results)
    prepared(beside)
    words = [word for word in real_cases.settings(beside) if not word.startswith("reward=")]
    words += [f"reward={place.name}", *(f"reward.{setting}" for setting in settings)]
    run = place.folder / "run"
    shutil.rmtree(run, ignore_errors=True)
    return flowrl("train", *words, "algorithm=nft", "iterations=1", f"output={run}")


# ---------------------------------------------------------------------------
# a model


def prepared(place: Place) -> None:
    """Write the folder of a model, and its prompts."""
    case, weights = real_cases.MODELS[place.name], place.folder / "weights"
    place.folder.mkdir(parents=True, exist_ok=True)
    (place.folder / "train.txt").write_text("\n".join(real_cases.PROMPTS) + "\n")
    (place.folder / "eval.txt").write_text("\n".join(HELD_OUT) + "\n")
    if not (weights / "model_index.json").is_file():
        write(with_changes(read(place.name), case.fewer), weights, torch.bfloat16)


def model(place: Place, flowrl: Process, until: float = math.inf) -> bool:
    """The parts of a model that begin before `until` (time.monotonic) -> whether they passed."""
    weights, run = place.folder / "weights", place.folder / "flow_grpo"
    prepared(place)
    words = real_cases.settings(place)
    parts: dict[str, Callable[[], Mapping[str, Any] | None]] = {
        "check": lambda: flowrl(*checked(place.name, weights)),
        "budget": lambda: budgets(place, words, flowrl),
        "flow_grpo": lambda: trained(place, words, "flow_grpo", 2, flowrl),
        "resume": lambda: trained(place, words, "flow_grpo", 3, flowrl),
        "nft": lambda: trained(place, words, "nft", 2, flowrl),
        "sft": lambda: trained(place, supervised(place, words), "sft", 2, flowrl),
        "evaluate": lambda: flowrl("evaluate", str(run)),
        "generate": lambda: generated(place, run, flowrl),
        "lora": lambda: lora(weights, run),
    }
    passed = []
    for name, run_it in parts.items():
        if time.monotonic() > until:
            print(f"left for another time: {name}")
        else:
            passed.append(part(place, name, run_it))
    return all(passed)


def checked(name: str, weights: Path) -> list[str]:
    """The words of `flowrl check` with the model's own type and arguments."""
    from flowrl.config.load import load_config

    cfg = load_config(None, [f"model={name}", "data=ocr", "reward=jpeg"]).model
    call = {**cfg.pipeline, **real_cases.MODELS[name].size}
    own = [word for key, value in call.items() for word in ("--pipeline", f"{key}={value!r}")]
    return ["check", str(weights), "--dtype", cfg.dtype, *own]


def budgets(place: Place, words: list[str], flowrl: Process) -> dict[str, Any]:
    """Peak and rows of each method, as `flowrl budget` says them."""
    found = {}
    for method in real_cases.METHODS:
        file = place.folder / f"budget-{method}.json"
        asked = [*words, f"algorithm={method}", "--device", "cpu", "--json", str(file)]
        flowrl("budget", *asked)
        told = json.loads(file.read_text())
        rows = {key: told["phases"].get(key, {}).get("rows", 0) for key in ROWS}
        found[method] = {"rows": rows, "gb": told["gb"]["peak"]}
    return found


def trained(
    place: Place, words: list[str], method: str, iterations: int, flowrl: Process
) -> dict[str, Any]:
    """Train, or train on after two iterations; rows, peak and encoder calls of the newest one."""
    run = place.folder / method
    own = [*words, f"algorithm={method}", f"output={run}"]
    if iterations == 2:
        shutil.rmtree(run, ignore_errors=True)  # of a part that failed
    else:
        own = ["--resume", str(run)]
    counts = flowrl("train", *own, f"iterations={iterations}")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "nfe/update" in line]
    if len(steps) != iterations:
        raise Failed(f"{len(steps)} iterations are in {run}/metrics.jsonl, not {iterations}")
    if not (run / "lora").is_dir():
        raise Failed(f"{run} holds no LoRA")
    rows = {key: round(steps[-1].get(f"nfe/{key}", 0)) for key in ROWS}
    names = [row["name"] for row in json.loads((run / "evaluation.json").read_text())["rows"]]
    return {**counts, "rows": rows, "evaluations": names}


def supervised(place: Place, words: list[str]) -> list[str]:
    """The words of a run on media of its own; videos are lists of one file, whose frames differ."""
    own = place.folder / "own"
    own.mkdir(exist_ok=True)
    frames = real_cases.MODELS[place.name].size.get("num_frames")
    for number, path in enumerate(pictures(own, 4)):
        path.with_suffix(".txt").write_text(real_cases.PROMPTS[number % 3])
        if frames:
            filmed(path, frames)
    kept = [word for word in words if not word.startswith(("data=", "data.train="))]
    mine = [f"data.offline={own}", "data.crop=center", "reward.jpeg.weight=0", "batch.group=1"]
    return [*kept, *mine]


def filmed(path: Path, frames: int) -> None:
    """Put a video of a picture that darkens in its place."""
    import imageio.v3 as iio
    import numpy as np

    still = iio.imread(path)
    shades = [(still * (1 - k / (2 * frames))).astype(np.uint8) for k in range(frames)]
    iio.imwrite(path.with_suffix(".mp4"), np.stack(shades), fps=8)
    path.unlink()


def generated(place: Place, run: Path, flowrl: Process) -> dict[str, Any]:
    video = "num_frames" in real_cases.MODELS[place.name].size
    out = place.folder / ("video.mp4" if video else "picture.png")
    out.unlink(missing_ok=True)
    found = flowrl("generate", str(run), HELD_OUT[0], "--steps", "2", "-o", str(out))
    if not out.is_file():
        raise Failed(f"{out} was not written")
    return found


def lora(weights: Path, run: Path) -> dict[str, Any]:
    """A run's LoRA, loaded by diffusers alone and by flowrl: the denoiser's answers to one call."""
    from diffusers import DiffusionPipeline

    from flowrl.config.build import trained as as_trained
    from flowrl.config.load import read_config

    cfg = read_config(run / "config.yaml").model
    pipe = DiffusionPipeline.from_pretrained(weights, torch_dtype=torch.bfloat16)
    pipe.load_lora_weights(str(run / "lora"))
    denoiser = pipe.unet if hasattr(pipe, "unet") else pipe.transformer
    seen: list[tuple[Any, Any, torch.Tensor]] = []

    def keep(module: Any, args: Any, kwargs: Any, answer: Any) -> None:
        seen.append((args, kwargs, answer[0].float()))

    # one call of the pipeline says what its denoiser is given
    hook = denoiser.register_forward_hook(keep, with_kwargs=True)
    pipe(HELD_OUT[0], num_inference_steps=1, output_type="latent", **cfg.pipeline)
    hook.remove()
    args, kwargs, theirs = seen[0]
    with torch.no_grad():
        denoiser.disable_adapters()
        base = denoiser(*args, **kwargs)[0].float()
    # two models at once do not fit
    del pipe, denoiser, hook
    freed()
    policy: Any = as_trained(run, {})
    denoiser = policy.pipe.unet if hasattr(policy.pipe, "unet") else policy.pipe.transformer
    with torch.no_grad():
        ours = denoiser(*args, **kwargs)[0].float()
    size = theirs.norm()
    apart, moved = (float((x - theirs).norm() / size) for x in (ours, base))
    if not apart <= ROUNDING or not moved > apart:
        raise Failed(f"the run's answer is {apart:.2e} from the LoRA's, which moves it {moved:.2e}")
    return {"apart": apart, "moved": moved}


def main() -> None:
    (name, folder, minutes), began = sys.argv[1:], time.monotonic()
    place = Place(name=name, folder=Path(folder) / name, results=Path(folder) / "results.jsonl")
    place.folder.mkdir(parents=True, exist_ok=True)
    with (place.folder / "log.txt").open("a") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    if name in REWARDS:
        passed = reward(place, Process())
    else:
        passed = model(place, Process(), began + 60 * float(minutes))
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
