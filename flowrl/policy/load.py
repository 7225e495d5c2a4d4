"""load_policy: a live pipeline, folder, hub id, named model or plain module becomes a Policy."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import flowrl.policy.amused as amused
import flowrl.policy.modular as modular
import flowrl.policy.wrapped as wrapped
from flowrl.policy.base import Policy
from flowrl.policy.folder import check_index, variant_of, why_not
from flowrl.policy.module import ModulePolicy
from flowrl.policy.named import GROUP, declare, hints_of, made
from flowrl.policy.pipeline import PipelinePolicy
from flowrl.policy.replay.blame import blaming
from flowrl.policy.replay.errors import UnreplayableError
from flowrl.policy.replay.hints import hints_for
from flowrl.policy.replay.record import Encoding, denoisers_of
from flowrl.policy.text import check_tokenizers, text_encoders
from flowrl.policy.tokens import TokenPolicy
from flowrl.policy.weights.parts import adapter_of
from flowrl.policy.weights.quantised import check_kind, kind_of, quantise
from flowrl.policy.weights.waiting import Waiting
from flowrl.runtime import hub, registry
from flowrl.runtime.log import quiet, waiting
from flowrl.runtime.memory import ran_out
from flowrl.runtime.paths import expanded, packaged
from flowrl.runtime.registry import did_you_mean
from flowrl.runtime.typed_text import takes_text

PARTS = ("denoiser", "text_encoder")
DESCRIBED = "shape, kind, cond and decode describe an nn.Module; a pipeline brings its own"
TOKENS, OF_TOKENS = "tokens", ("mask", "empty")  # kind of a masked generator, and its arguments
OTHERWISE = (
    "hints can declare what is not inferred (docs/policies.md), and a network can be given without"
    " its pipeline (docs/your_own_module.md)"
)
# name of the setting `encoding` in errors
ENCODING = "encoding (model.encoders, model.prompt_cache)"


@waiting("load the model")
def load_policy(
    source: Any,
    *,
    lora: dict[str, Any] | Path | None = None,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    shape: tuple[int, ...] | None = None,
    kind: str | None = None,
    cond: Callable[[list[str]], Tensor] | None = None,
    decode: Callable[[Tensor], Tensor] | None = None,
    example: Mapping[str, Any] | None = None,
    hints: Mapping[str, Any] | str | None = None,
    parts: Sequence[str] | None = None,
    encoding: Encoding | None = None,
    quantize: str = "none",
    split: bool = False,
    **pipeline_kwargs: Any,
) -> Policy:
    """Make a Policy of `source`: a live DiffusionPipeline or ModularPipeline, its folder or hub id,
    a name in configs/model, an nn.Module f(x, t, cond), a user's own factory
    ("path/to/file.py:NAME"), one of an installed package, or a Policy, which is returned unchanged.

    parts: names of the trained parts, by default ["denoiser"]; "text_encoder": a pipeline's. lora:
    {"rank", "alpha", "targets", "init"} puts adapter "default" on these, in fp32; the Path of a
    LoRA, one that holds it on the layers that it changes; None trains all their weights. dtype: of
    the networks (fp32; a live pipeline keeps its own). quantize: frozen weights of a pipeline's
    denoiser as "int8" or "nf4". shape, kind, cond, decode: for an nn.Module, see ModulePolicy;
    kind="tokens", mask, empty: see TokenPolicy. pipeline_kwargs: arguments of the pipeline's own
    call (height, num_frames ...). example: the conditions of one prompt, if they differ
    (Policy.encode takes those of all). hints: see named.hints_of. encoding: place of text encoders
    and of their answers. split: networks wait in host memory. UnreplayableError: it cannot be
    inferred.
    """
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    named, own_hints = {}, hints_of(hints)
    check_kind(quantize)
    described: dict[str, Any] = {"shape": shape, "kind": kind, "cond": cond, "decode": decode}
    if isinstance(source, str | Path):  # a name may stand for any of the sources below
        source, named = found(source)
        dtype, device = dtype or torch.float32, device or _usual_device()
    if isinstance(source, Policy):
        described |= {"quantize": None if quantize == "none" else quantize, "hints": hints}
        return _unchanged(source, lora, parts, described | pipeline_kwargs | {ENCODING: encoding})
    parts = check_parts(parts or ["denoiser"])
    if isinstance(source, nn.Module):
        tokens = {name: pipeline_kwargs.pop(name, None) for name in OF_TOKENS}
        own = _shape_of(shape, parts, encoding, quantize, hints=hints, **pipeline_kwargs)
        return _of_module(source.to(device, dtype), lora, described | {"shape": own}, tokens)
    if any(given is not None for given in described.values()):
        raise ValueError(DESCRIBED)
    if isinstance(source, str):
        source = _pretrained(source, dtype or torch.float32)
    source, call = modular.as_pipeline(source), {**named, **pipeline_kwargs}
    place = (dtype, device, quantize, encoding)
    with _advising():
        _check_fresh(source, parts, own_hints, adapted=lora is not None)
        if type(source).__name__ == amused.CLASS:
            amused.check_plain(parts, quantize, encoding, own_hints)
        declare(source, own_hints)
        return _of_pipeline(source, place, lora, call, example, parts, split=split)


@contextlib.contextmanager
def _advising() -> Iterator[None]:
    """An UnreplayableError inside says at its end what else can be done."""
    try:
        yield
    except UnreplayableError as error:
        raise UnreplayableError(f"{error}; {OTHERWISE}") from error


def _of_pipeline(
    pipe: Any,
    place: tuple[torch.dtype | None, torch.device | str | None, str, Encoding | None],
    lora: Any,
    call: dict[str, Any],
    example: Mapping[str, Any] | None,
    parts: Sequence[str],
    *,
    split: bool,
) -> Policy:
    """Make the policy of a pipeline, of flows or of tokens. place: as _prepare takes it."""
    with quiet():  # quiet: loading and probing make the libraries warn without cause
        waiting = _prepare(pipe, *place, split=split)
        if type(pipe).__name__ == amused.CLASS:
            return amused.amused_policy(pipe, lora, call)
        with blaming(pipe, call, "while it becomes a policy", but=ValueError):
            return PipelinePolicy(pipe, lora, call, example, parts, place[-1], waiting)


def check_parts(parts: Sequence[str]) -> list[str]:
    """Return the names of the trained parts, each once; ValueError for an unknown name."""
    if isinstance(parts, str) or not parts or not set(parts) <= set(PARTS):
        raise ValueError(f"parts={parts!r} should be a list of some of {', '.join(PARTS)}")
    return list(dict.fromkeys(parts))


def _of_module(
    module: nn.Module, lora: Any, described: dict[str, Any], tokens: dict[str, Any]
) -> Policy:
    """Make the policy of a module of flows, or with kind="tokens" of a masked generator."""
    kind = described.pop("kind") or "flow"
    if kind == TOKENS:
        if isinstance(module, PreTrainedModel) and described["cond"] is not None:
            raise ValueError(
                f"{type(module).__name__} takes an attention mask where cond would be given; wrap"
                " it in a module f(tokens, cond) -> logits, as docs/masked.md does for BERT"
            )
        return TokenPolicy(module, lora=lora, **described, **tokens)
    if given := [name for name, value in tokens.items() if value is not None]:
        raise ValueError(
            f"{given[0]}={tokens[given[0]]} is of masked generators, and kind={kind!r}; give"
            f" kind='{TOKENS}' too, or leave it out"
        )
    return ModulePolicy(module, lora=lora, kind=kind, **described)


def _shape_of(
    shape: Any,
    parts: Sequence[str],
    encoding: Encoding | None,
    quantize: str,
    **others: Any,
) -> tuple[int, ...]:
    """Return the shape of a module's latents; ValueError if it is missing, or if an argument is
    given that modules do not take: one of `others` that is not None."""
    others = {name: value for name, value in others.items() if value is not None}
    if "text_encoder" in parts:
        raise ValueError(
            "an nn.Module policy has no text encoder to train; leave it out of train.parts"
        )
    if encoding is not None:
        raise ValueError(f"an nn.Module policy has no text encoder; leave {ENCODING} out")
    if quantize != "none":
        raise ValueError(
            f"model.quantize={quantize} is for the denoiser of a pipeline, and the model is an"
            " nn.Module; leave it out"
        )
    if shape is None or others:
        got = f", not {', '.join(sorted(others))}" if others else ""
        raise ValueError(
            f"an nn.Module policy needs shape=(*L), of one sample's latents{got}; a part of a"
            " pipeline is trained by giving the pipeline"
        )
    return tuple(shape) if isinstance(shape, Sequence) else shape


def as_policy(given: Any) -> Policy:
    """Return a Policy unchanged, and load any other source that load_policy takes."""
    return given if isinstance(given, Policy) else load_policy(given)


def found(source: str | Path) -> tuple[Any, dict[str, Any]]:
    """Look up the model behind a name -> (an object that a factory made, or a folder or hub id; its
    call arguments)."""
    thing = made(str(source))
    if not isinstance(thing, str):
        return thing, {}
    if registry.is_live(thing):
        raise ValueError(
            f"the model {thing} was a live object; pass it in Python, flowrl.train(..., policy=...)"
        )
    return resolve_source(thing)


def _usual_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _unchanged(
    policy: Policy,
    lora: dict[str, Any] | Path | None,
    parts: Sequence[str] | None,
    others: dict[str, Any],
) -> Policy:
    """Return the policy; ValueError if other adapters, parts or further arguments are given with
    it."""
    own, names = policy.trainable, policy.trainable.part_names
    if isinstance(lora, Path):
        raise ValueError(f"the model is a Policy already; load {lora} by its load_lora")
    if given := [name for name, value in others.items() if value is not None]:
        raise ValueError(f"the model is a Policy already; give {', '.join(given)} where it is made")
    if lora is not None and (own.lora is None or {**own.options, **lora} != own.options):
        has, mode = "trains all its weights", "train.mode=full"
        if own.lora is not None:
            has, mode = f"has the LoRA {own.options}", "train.mode=lora and train.lora to that"
        raise ValueError(
            f"the model is a Policy already, which {has}: leave lora= out, or in a config set"
            f" {mode}"
        )
    if parts is not None and set(parts) != set(names or parts):
        raise ValueError(
            f"the model is a Policy already, which trains {' and '.join(names)}: set"
            f" train.parts=[{','.join(names)}], or make it with parts=[...]"
        )
    return policy


def _check_fresh(
    pipe: Any, parts: Sequence[str], hints: Mapping[str, Any], *, adapted: bool
) -> None:
    """ValueError for an object that is not a pipeline, and for a pipeline that cannot become a
    policy in its present state."""
    if isinstance(pipe, type):
        raise ValueError(
            f"{pipe.__name__} is a class; give an object of it, such as what from_pretrained"
            " returns"
        )
    # what is not a pipeline at all, or one that is never taken
    if said := amused.beyond(type(pipe).__name__):
        raise ValueError(said)
    if hasattr(pipe, "init_pipeline"):
        raise ValueError(
            f"{type(pipe).__name__} is blocks without components; give the pipeline that"
            " blocks.init_pipeline() makes, after update_components(...)"
        )
    if not hasattr(pipe, "components"):
        raise ValueError(
            f"a model should be a diffusers pipeline, its folder or hub id, an nn.Module or a"
            f" Policy, not a {type(pipe).__name__}"
        )
    for name, part in pipe.components.items():
        if isinstance(part, nn.Module) and (own := adapter_of(part)):
            raise ValueError(
                f"this {type(pipe).__name__} is a policy already: its {name} has the adapter"
                f' "{own}"; pass that policy, or load the pipeline anew'
            )
    denoisers = denoisers_of(pipe, {**hints_for(pipe), **hints})
    check_tokenizers(pipe)
    text = text_encoders(pipe) if "text_encoder" in parts else {}
    wrapped.check({**denoisers, **text}, denoisers, adapted=adapted)


def call_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Check arguments of the pipeline's call from a config or a command line, and return them;
    ValueError for a name that load_policy itself takes."""
    ours = inspect.signature(load_policy).parameters.keys() - {"pipeline_kwargs"}
    for name, value in given.items():
        if name in ours:
            raise ValueError(
                f"model.pipeline.{name} is no argument of a pipeline's call; in a config the type"
                " of the weights is model.dtype and the LoRA's settings are train.lora"
            )
        if isinstance(value, bool | int | float) and takes_text(name):
            raise ValueError(
                f"model.pipeline.{name}={value} is a {type(value).__name__}, and should be a text;"
                f' put it in quotes where it is written, {name}: "..."'
            )
    return dict(given)


def resolve_source(source: str | Path) -> tuple[str, dict[str, Any]]:
    """Look up a name of configs/model -> (its source, its call arguments); return any other source
    unchanged.

    "package:module/folder" points into an installed package. An unknown name -> ValueError.
    """
    source = expanded(str(source))
    if Path(source).exists() or "/" in source:
        return source, {}
    folder = resources.files("flowrl.configs") / "model"
    listed = folder / f"{source}.yaml"
    if not listed.is_file():
        files = [entry.name for entry in folder.iterdir()]
        names = [name.removesuffix(".yaml") for name in files if name.endswith(".yaml")]
        names += registry.installed(GROUP)
        raise ValueError(
            f'unknown model "{source}"{did_you_mean(str(source), names)} (a folder, or a hub id'
            ' "owner/name", works too)'
        )
    import yaml

    entry = yaml.safe_load(listed.read_text(encoding="utf-8"))["model"]
    return str(entry["source"]), dict(entry.get("pipeline") or {})


def _pretrained(source: str, dtype: torch.dtype) -> Any:
    """Load a pipeline from a folder or the hub; components that its index lists as absent (SD3
    without T5) stay absent."""
    from diffusers import DiffusionPipeline

    source = packaged(source)
    with quiet(), warnings.catch_warnings():
        # diffusers passes the first argument on, and in 0.40 has no other name for the second
        warnings.filterwarnings("ignore", "The `local_dir_use_symlinks`", UserWarning)
        warnings.filterwarnings("ignore", "`torch_dtype` is deprecated", FutureWarning)
        name, how = source, {}
        if not Path(source).exists():
            name, how = hub.split(source)[0], hub.options(source)
        try:
            index = _index_of(name, how)
        except OSError as error:
            raise ValueError(why_not(source, error)) from error
        check_index(source, index)
        blocks = "_blocks_class_name" in index
        if Path(source).is_dir() and not blocks:
            how = {"variant": variant_of(source, index)}
        listed = [(name, e) for name, e in index.items() if isinstance(e, list | tuple)]
        absent = {name: None for name, entry in listed if entry[0] is None}
        try:
            # the decoder stays in fp32 for gradients and scores
            types = {"default": dtype} | ({"vae": torch.float32} if "vae" in index else {})
            if blocks:
                pipe = modular.load(name, types, how)
            else:
                pipe = DiffusionPipeline.from_pretrained(name, torch_dtype=types, **how, **absent)
        # diffusers, transformers and tokenizers raise errors of their own
        except Exception as error:
            if ran_out(error):
                raise
            raise ValueError(why_not(source, error)) from error
    _check_whole(source, pipe)
    if not Path(source).exists():
        hub.note(source)
    return pipe


def _index_of(name: str, how: Mapping[str, Any]) -> Mapping[str, Any]:
    """Read the index of a classic pipeline's folder or hub repository, or else of a modular one."""
    from diffusers import DiffusionPipeline

    try:
        return DiffusionPipeline.load_config(name, **how)
    except OSError:
        index = modular.index_of(name, how)
        if index is None:
            raise
        return index


def _check_whole(source: str, pipe: Any) -> None:
    """ValueError for a network whose files lack some of its weights: diffusers leaves those on the
    meta device."""
    for part, module in pipe.components.items():
        if isinstance(module, nn.Module):
            lacking = [name for name, weight in module.named_parameters() if weight.is_meta]
            if lacking:
                raise ValueError(
                    f'model "{source}": the files of its {part} lack {len(lacking)} weights,'
                    f" {lacking[0]} first; was it saved with LoRA in its layers? Merge the LoRA"
                    " (pipe.fuse_lora, pipe.unload_lora_weights) before saving"
                )


def _move(
    pipe: Any, device: torch.device | str, *, leave: bool, waiting: Sequence[nn.Module]
) -> None:
    """Move the pipeline to a device. Its own `to` asks each part for a dtype, which a plain
    nn.Module does not have. leave: text encoders that stay in host memory; waiting: networks that
    do."""
    parts = [part for part in pipe.components.values() if isinstance(part, nn.Module)]
    staying = [part for part in parts if any(part is network for network in waiting)]
    if leave:
        staying += [part for part in parts if isinstance(part, PreTrainedModel)]
    elif not staying and all(hasattr(part, "dtype") for part in parts):
        pipe.to(device)
        return
    for part in parts:
        if not any(part is other for other in staying):
            part.to(device)


def _prepare(
    pipe: Any,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
    kind: str,
    encoding: Encoding | None,
    *,
    split: bool = False,
) -> Waiting | None:
    """Cast a pipeline to its type, quantise its denoisers and move it to the device; None: no
    change. encoding, split: select the parts that are not moved, see load_policy."""
    leave = encoding is not None and encoding.leave
    if dtype is not None:
        _cast(pipe, dtype)
    own = denoisers_of(pipe, hints_for(pipe)) if split or kind != "none" else {}
    if kind != "none":
        here = next(next(iter(own.values())).parameters()).device
        quantise(own, kind, here if device is None else device)
    waits = split and device is not None
    if device is not None:
        _move(pipe, device, leave=leave, waiting=list(own.values()) if waits else [])
    return Waiting(own.values(), device) if waits else None


def _cast(pipe: Any, dtype: torch.dtype) -> None:
    """Cast networks and text encoders to dtype; the VAE stays in fp32 for gradients and scores."""
    for name, part in pipe.components.items():
        if isinstance(part, nn.Module) and kind_of(part) == "none":
            cast(part, torch.float32 if name == "vae" else dtype)


def cast(network: nn.Module, dtype: torch.dtype) -> None:
    """Cast a network's floating-point weights to a type, except those that its class keeps in fp32,
    in the same way as from_pretrained (Wan's norms and time embedding, T5's outputs in fp16)."""
    kept = set(getattr(network, "_keep_in_fp32_modules", None) or ())
    if isinstance(network, PreTrainedModel):
        strict = set(network._keep_in_fp32_modules_strict or ())
        kept = kept | strict if dtype == torch.float16 else strict
    named = (*network.named_parameters(), *network.named_buffers())
    wide = {id(tensor) for name, tensor in named if kept & set(name.split("."))}

    def typed(tensor: Tensor) -> Tensor:
        own = torch.float32 if id(tensor) in wide else dtype
        return tensor.to(own) if tensor.is_floating_point() else tensor

    # `to` calls _apply, too, but its function cannot see the names of weights
    network._apply(typed)
