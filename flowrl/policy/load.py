"""load_policy: a live pipeline, folder, hub id, named model or plain module becomes a Policy."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants
from torch import Tensor, nn

from flowrl.policy.base import Policy
from flowrl.policy.module import ModulePolicy
from flowrl.policy.pipeline import PipelinePolicy
from flowrl.policy.replay.record import blaming
from flowrl.runtime import hub
from flowrl.runtime.log import quiet
from flowrl.runtime.registry import did_you_mean

LOADED_WITH = ("source", "lora", "dtype", "device", "shape", "kind", "cond", "example")


def load_policy(
    source: Any,
    *,
    lora: dict[str, Any] | None = None,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    shape: tuple[int, ...] | None = None,
    kind: str | None = None,
    cond: Callable[[list[str]], Tensor] | None = None,
    example: Mapping[str, Any] | None = None,
    **pipeline_kwargs: Any,
) -> Policy:
    """A Policy from `source`: a live DiffusionPipeline, its folder or hub id, a name in
    configs/model, or an nn.Module f(x, t, cond).

    lora: {"rank", "alpha", "targets", "init"} puts adapter "default" on every denoiser, fp32
    whatever dtype is; None trains all weights. dtype: of the networks (default: fp32; of a live
    pipeline, as it is). shape, kind, cond: for an nn.Module, see ModulePolicy. pipeline_kwargs:
    arguments of the pipeline's own call (height, width, num_frames, guidance_scale,
    negative_prompt, max_sequence_length, image ...); they hold for the policy's life. example:
    conditions that differ from prompt to prompt, of one prompt (Policy.encode takes those of
    all). A pipeline whose loop cannot be inferred raises UnreplayableError (a ValueError).
    """
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    if isinstance(source, nn.Module):
        if shape is None or pipeline_kwargs:
            raise ValueError(
                "an nn.Module policy needs shape=(*L) and takes no pipeline arguments (got"
                f" {sorted(pipeline_kwargs)})"
            )
        module = source.to(device=device, dtype=dtype)
        return ModulePolicy(module, tuple(shape), kind or "flow", cond, lora)
    if shape is not None or kind is not None or cond is not None:
        raise ValueError("shape, kind and cond describe an nn.Module; a pipeline brings its own")
    if isinstance(source, str | Path):
        source, named = resolve_source(source)
        dtype = dtype or torch.float32
        source, pipeline_kwargs = _pretrained(source, dtype), {**named, **pipeline_kwargs}
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    with quiet():  # loading and probing make the libraries warn of nothing real
        if device is not None:
            source.to(device)
        if dtype is not None:
            _cast(source, dtype)
        with blaming(source, pipeline_kwargs, but=ValueError):
            return PipelinePolicy(source, lora, pipeline_kwargs, example)


def call_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of the pipeline's call from a config or a command line; one that load_policy itself
    has a name for -> ValueError."""
    for name in given:
        if name in LOADED_WITH:
            raise ValueError(
                f"model.pipeline.{name} is no argument of a pipeline's call; in a config the type"
                " of the weights is model.dtype and the LoRA's settings are train.lora"
            )
    return dict(given)


def resolve_source(source: str | Path) -> tuple[str, dict[str, Any]]:
    """A name of configs/model -> (its source, its call arguments); anything else as it is.

    "package:module/folder" points into an installed package. An unknown name -> ValueError.
    """
    if Path(source).exists() or "/" in str(source):
        return str(source), {}
    folder = resources.files("flowrl.configs") / "model"
    listed = folder / f"{source}.yaml"
    if not listed.is_file():
        files = [entry.name for entry in folder.iterdir()]
        names = [name.removesuffix(".yaml") for name in files if name.endswith(".yaml")]
        raise ValueError(
            f'unknown model "{source}"{did_you_mean(str(source), names)} (a folder, or a hub id'
            ' "owner/name", works too)'
        )
    import yaml

    entry = yaml.safe_load(listed.read_text(encoding="utf-8"))["model"]
    return str(entry["source"]), dict(entry.get("pipeline") or {})


def _pretrained(source: str, dtype: torch.dtype) -> Any:
    """A pipeline from a folder or the hub; components that its index lists as absent (SD3 without
    T5) stay absent."""
    from diffusers import DiffusionPipeline

    if source.startswith("package:"):
        package, _, folder = source.removeprefix("package:").partition("/")
        source = str(resources.files(package) / folder)
    with quiet(), warnings.catch_warnings():
        # diffusers' own argument, and a name without an alternative in its 0.40
        warnings.filterwarnings("ignore", "The `local_dir_use_symlinks`", UserWarning)
        warnings.filterwarnings("ignore", "`torch_dtype` is deprecated", FutureWarning)
        name, revision = source, {}
        if not Path(source).exists():
            name, revision = hub.split(source)[0], hub.options(source)
        try:
            index = DiffusionPipeline.load_config(name, **revision)
        except OSError as error:
            raise ValueError(_unavailable(source, error)) from error
        listed = [(name, e) for name, e in index.items() if isinstance(e, list | tuple)]
        absent = {name: None for name, entry in listed if entry[0] is None}
        pipe = DiffusionPipeline.from_pretrained(name, torch_dtype=dtype, **revision, **absent)
    if not Path(source).exists():
        hub.note(source)
    return pipe


def _unavailable(source: str, error: OSError) -> str:
    """Why a model cannot be loaded."""
    if Path(source).is_file():
        return (
            f'model "{source}" is a single file, and a diffusers folder is needed; write one with'
            f' diffusers: StableDiffusionPipeline.from_single_file("{source}").save_pretrained('
            '"folder"), with the class of your model'
        )
    if constants.HF_HUB_OFFLINE and not Path(source).exists():
        why = "HF_HUB_OFFLINE is set, and the cache does not hold it"
    else:
        why = " ".join(str(error).split())[:300]
    return f'model "{source}" is not a diffusers folder, and cannot be fetched: {why}'


def _cast(pipe: Any, dtype: torch.dtype) -> None:
    """Networks and text encoders to dtype; the VAE stays in fp32 for gradients and scores."""
    for name, part in pipe.components.items():
        if isinstance(part, nn.Module):
            part.to(dtype=torch.float32 if name == "vae" else dtype)
