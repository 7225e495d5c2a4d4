"""What an export is asked for, judged by words and small files alone, before torch is imported."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from flowrl.config.load import read_config
from flowrl.config.schema import Config
from flowrl.runtime import registry
from flowrl.runtime.excerpt import part
from flowrl.runtime.paths import nearby
from flowrl.runtime.store.run_folder import config_file, read_peak

HEADS = ("step_noise", "initial_noise")  # parts of train.parts that lie beside the model
PICKLES = (".ckpt", ".pt", ".bin", ".pth")
REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


@dataclass(frozen=True, kw_only=True)
class Order:
    """An export whose words are right."""

    run: Path  # folder of the run
    cfg: Config  # settings of the run
    form: str  # "diffusers", "comfyui", "kohya" or "merged"
    dtype: str | None  # "fp32", "bf16" or "fp16"; None: as the weights are
    output: Path  # folder, or a .safetensors file, to be written
    push: str | None  # repository of the hub, "owner/name"
    source: Path  # folder of a LoRA that the run wrote, or of a checkpoint
    iteration: int | None  # iteration of the weights; None: the last one

    @property
    def file(self) -> bool:
        """Whether a single file is written, not a folder."""
        return self.output.suffix == ".safetensors"


def judge(
    run: Path,
    form: str,
    *,
    checkpoint: str | None = None,
    dtype: str | None = None,
    output: Path | None = None,
    push: str | None = None,
) -> Order:
    """Return what is asked for; ValueError for words that cannot be meant."""
    if not run.is_dir():
        raise ValueError(f'"{run}" is not a folder{nearby(run)}; give the folder of a run')
    cfg = read_config(config_file(run))
    output = output or Path(f"{run.resolve().name}-{form}")
    # what the run trained and the place can take, then its files, then the hub
    for wrong, sentence in _refusals(run, cfg, form, output):
        if wrong:
            raise ValueError(sentence)
    source, iteration = _source(run, form, checkpoint)
    if push is not None:
        _check_push(push, output)
    return Order(
        run=run,
        cfg=cfg,
        form=form,
        dtype=dtype,
        output=output,
        push=push,
        source=source,
        iteration=iteration,
    )


def _refusals(run: Path, cfg: Config, form: str, output: Path) -> list[tuple[bool, str]]:
    """List what may be wrong with a run and a place: (whether it is, the sentence that says so)."""
    file, trained = output.suffix == ".safetensors", cfg.train
    taken = output.exists() and (file or not output.is_dir() or any(output.iterdir()))
    whole = "use --format merged, which writes the whole pipeline"
    if registry.is_outside("flowrl.models", cfg.model.source):
        whole += "; a model that is none is loaded in Python: flowrl.load_policy"
    return [
        (
            set(trained.parts) <= set(HEADS) and not trained.init_lora,
            f"{run} trained {' and '.join(trained.parts)} alone, a small network beside the model"
            " that no other program reads; use it by flowrl generate RUN PROMPTS",
        ),
        (
            trained.mode == "full" and form != "merged",
            f"{run} trained all weights (train.mode=full), which are no LoRA; {whole}",
        ),
        (
            file and form == "merged",
            f"--output {output}: --format merged writes a pipeline; give a folder",
        ),
        (
            output.suffix in PICKLES,
            f"--output {output}: {output.suffix} is not written; end it in .safetensors, or give a"
            " folder",
        ),
        (taken, f"--output {output} exists; remove it, or give another place"),
    ]


def _source(run: Path, form: str, chosen: str | None) -> tuple[Path, int | None]:
    """Return the folder of a LoRA, or else of a checkpoint, and its iteration; None: the last."""
    folders = part("flowrl.runtime.store.checkpoint", "steps")(run)
    steps = {int(folder.name.removeprefix("step-")): folder for folder in folders}
    steps.pop(0, None)  # it holds the untrained weights
    listed = "it has no checkpoint of trained weights yet"
    if steps:
        listed = f"its checkpoints are of iterations {', '.join(map(str, steps))}"
    number, lora = max(steps, default=0), run / "lora"
    if chosen == "best":
        if not (peak := read_peak(run)):
            raise ValueError(
                f"--checkpoint best: {run} has no peak.json, as no peak of a held-out reward"
                f" (watch.held_out) was found; give an iteration, or leave it out; {listed}"
            )
        number, lora = int(peak["checkpoint"].removeprefix("step-")), run / (peak["lora"] or "-")
    elif chosen is not None:
        if not chosen.isdecimal():
            raise ValueError(f"--checkpoint {chosen} should be best or an iteration; {listed}")
        number, lora = int(chosen), run / "-"
    if form != "merged" and lora.is_dir():
        return lora, number if chosen else None
    if number not in steps:
        raise ValueError(f"{run} keeps no trained weights of iteration {number}; {listed}")
    return steps[number], number


def _check_push(push: str, output: Path) -> None:
    from huggingface_hub import constants, get_token

    if not REPOSITORY.fullmatch(push):
        raise ValueError(f"--push {push} should be OWNER/NAME, a repository of huggingface.co")
    if output.suffix == ".safetensors":
        raise ValueError(f"--push uploads a folder, and --output {output} is a file; leave it out")
    if constants.HF_HUB_OFFLINE:
        raise ValueError(f"--push {push} needs a network, and HF_HUB_OFFLINE is set; unset it")
    if get_token() is None:
        raise ValueError(f"--push {push} needs a token of huggingface.co: run hf auth login")
