"""What an export is asked for, judged by words and small files alone, before torch is imported."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrl.config.load import read_config
from flowrl.config.schema import Config
from flowrl.runtime.excerpt import part
from flowrl.runtime.paths import nearby
from flowrl.runtime.store.run_folder import config_file, read_peak

FORMATS = ("diffusers", "comfyui", "kohya", "merged")
HEADS = ("step_noise", "initial_noise")  # parts of train.parts that lie beside the model
REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


@dataclass(frozen=True, kw_only=True)
class Order:
    """An export whose words are right."""

    run: Path  # folder of the run
    cfg: Config  # settings of the run
    form: str  # one of FORMATS
    dtype: str | None  # "fp32", "bf16" or "fp16"; None: as the weights are
    output: Path  # folder, or a .safetensors file, to be written
    push: str | None  # repository of the hub, "owner/name"
    lora: Path | None  # folder of the LoRA that the run wrote; None: it is read from a checkpoint
    step: Path | None  # folder of the checkpoint that is read; None: `lora` is enough
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
    # what the run's files can give, then what the place and the hub can take
    _check_trained(run, cfg, form)
    lora, step, iteration = _weights(run, cfg, form, checkpoint)
    output = output or Path(f"{run.resolve().name}-{form}")
    _check_output(output, form)
    if push is not None:
        _check_push(push, output)
    return Order(
        run=run,
        cfg=cfg,
        form=form,
        dtype=dtype,
        output=output,
        push=push,
        lora=lora,
        step=step,
        iteration=iteration,
    )


def _check_trained(run: Path, cfg: Config, form: str) -> None:
    """ValueError where a run trained what a format cannot hold."""
    own = [name for name in cfg.train.parts if name not in HEADS]
    if not own and not cfg.train.init_lora:
        raise ValueError(
            f"{run} trained {' and '.join(cfg.train.parts)} alone, a small network beside the"
            " model that no other program reads; use it by flowrl generate RUN PROMPTS"
        )
    if cfg.train.mode == "full" and form != "merged":
        raise ValueError(
            f"{run} trained all weights (train.mode=full), which are no LoRA; use --format merged,"
            " which writes the whole pipeline"
        )


def _weights(
    run: Path, cfg: Config, form: str, checkpoint: str | None
) -> tuple[Path | None, Path | None, int | None]:
    """Return the LoRA or else the checkpoint to read, and the iteration of its weights."""
    folders = part("flowrl.runtime.store.checkpoint", "steps")(run)
    steps = {int(folder.name.removeprefix("step-")): folder for folder in folders}
    # the checkpoint of iteration 0 holds the untrained weights
    trained = {number: folder for number, folder in steps.items() if number}
    listed = f"its checkpoints are of iterations {', '.join(map(str, trained)) or 'none yet'}"
    if checkpoint is None:
        if form != "merged" and (run / "lora").is_dir():
            return run / "lora", None, None
        if not trained:
            raise ValueError(f"{run} has trained nothing yet: it has no checkpoint; let it train")
        return None, trained[max(trained)], max(trained)
    if checkpoint == "best":
        peak: Any = read_peak(run)
        if not peak:
            raise ValueError(
                f"--checkpoint best: {run} has no peak.json, as no peak of a held-out reward"
                f" (watch.held_out) was found; give an iteration, or leave it out; {listed}"
            )
        number = int(peak["checkpoint"].removeprefix("step-"))
        if form != "merged" and peak["lora"] and (run / peak["lora"]).is_dir():
            return run / peak["lora"], None, number
    elif not checkpoint.isdecimal():
        raise ValueError(f"--checkpoint {checkpoint} should be best or an iteration; {listed}")
    else:
        number = int(checkpoint)
    if number == 0 or number not in trained:
        raise ValueError(f"--checkpoint {checkpoint}: {run} does not keep it; {listed}")
    return None, trained[number], number


def _check_output(output: Path, form: str) -> None:
    if output.suffix == ".safetensors" and form == "merged":
        raise ValueError(f"--output {output}: --format merged writes a pipeline; give a folder")
    if output.suffix in (".ckpt", ".pt", ".bin", ".pth", ".gguf"):
        raise ValueError(
            f"--output {output}: {output.suffix} is not written; end it in .safetensors, or give a"
            " folder"
        )
    taken = output.exists() and (not output.is_dir() or any(output.iterdir()))
    if taken or (output.suffix == ".safetensors" and output.is_dir()):
        raise ValueError(f"--output {output} exists; remove it, or give another place")


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
