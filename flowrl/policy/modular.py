"""A modular pipeline of diffusers in the form of a classic one.

A modular pipeline runs blocks over a state, takes any keyword, and computes without gradients. The
copy made here has a call whose parameters are the blocks' own inputs, and blocks that keep
gradients. It shares the components, so that recording, probing and replay work as for any other
pipeline.
"""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch

from flowrl.policy.folder import MODULAR, first_sentence
from flowrl.runtime.memory import ran_out
from flowrl.runtime.store import files

# outputs of blocks that are media, in the order in which they are looked for
MEDIA = ("images", "videos", "image", "video")


def index_of(name: str, how: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Read the index of a modular pipeline's folder or hub repository; None if it has none."""
    import diffusers

    try:
        return diffusers.ModularPipeline.load_config(name, **how)
    except OSError:
        if (Path(name) / MODULAR).is_file():
            raise
        return None


def load(name: str, types: Mapping[str, torch.dtype], how: Mapping[str, Any]) -> Any:
    """Load a modular pipeline and its components from a folder or the hub; code that lies there is
    not run. types: component, or "default" -> type of its weights."""
    import diffusers

    pipe = diffusers.ModularPipeline.from_pretrained(name, trust_remote_code=False, **how)
    loaded = {}
    for part in pipe.pretrained_component_names:
        spec = pipe.get_component_spec(part)
        place = spec.pretrained_model_name_or_path
        if place is None:  # the index lists it as absent
            continue
        # what lies beside the index has its revision
        own = {"pretrained_model_name_or_path": name, **how} if place in (".", name) else {}
        try:
            loaded[part] = spec.load(dtype=types.get(part, types["default"]), **own)
        except Exception as error:
            cause = error.__context__ or error  # diffusers' own error quotes that of the part
            if ran_out(cause):
                raise cause from None
            where = f"{own.get('pretrained_model_name_or_path', place)}/{spec.subfolder or ''}"
            said = first_sentence(cause)
            raise ValueError(f"its {part}, {where}, should be fetched again: {said}") from error
    pipe.update_components(**loaded)
    return pipe


def as_pipeline(pipe: Any) -> Any:
    """Copy a modular pipeline into the form of a classic one; return anything else unchanged.

    The copy's class is named after the blocks. Its call takes their inputs, and returns their media
    alone, (media,); for output_type="latent" the blocks after the loop do not run, and it returns
    the latents. `reads(given)` names the inputs that blocks read if these are given.
    """
    import diffusers

    if not isinstance(pipe, diffusers.ModularPipeline):
        return pipe
    blocks = pipe.blocks  # a copy, so that other users of the pipeline keep theirs
    for block in _each(blocks):
        _free(block)
    inputs, media = blocks.inputs, _media_of(blocks)

    def call(self: Any, **given: Any) -> tuple[Any]:
        state = _state(inputs, given)
        latent = given.get("output_type") == "latent"
        for block in _until_loop(blocks) if latent else [blocks]:
            _, state = block(self, state)
        return (state.get("latents" if latent else media),)

    def reads(self: Any, given: Collection[str]) -> set[str]:
        run = blocks.get_execution_blocks(**dict.fromkeys(given, True))
        return {own.name or own.kwargs_type for own in run.inputs}

    def save(self: Any, folder: str | Path, **how: Any) -> None:
        _save(self, type(pipe), Path(folder), how)

    made, decorated = copy.copy(pipe), cast("Any", torch.no_grad()(call))
    decorated.__signature__ = _signature(inputs)
    own = {
        "__call__": decorated,
        "reads": reads,
        "save_pretrained": save,
        # bars of the copy's blocks are off, and those of the original's are left alone
        "set_progress_bar_config": lambda self, **_: None,
    }
    made.__class__ = type(type(blocks).__name__, (type(pipe),), own)
    return made


def _each(block: Any) -> Iterator[Any]:
    """Yield a block and all blocks in it."""
    yield block
    for own in block.sub_blocks.values():
        yield from _each(own)


def _free(block: Any) -> None:
    """Let a block keep gradients, and show no progress bar."""
    kind = type(block)
    block.__class__ = type(kind.__name__, (kind,), {"__call__": inspect.unwrap(kind.__call__)})
    if hasattr(block, "set_progress_bar_config"):
        block.set_progress_bar_config(disable=True)


def _media_of(blocks: Any) -> str:
    """Name the output of blocks that holds their media."""
    names = [output.name for output in blocks.outputs]
    return next((name for name in MEDIA if name in names), names[-1])


def _until_loop(blocks: Any) -> list[Any]:
    """List the outermost blocks up to the last that uses the scheduler: the others decode."""
    from diffusers.modular_pipelines import SequentialPipelineBlocks

    in_turn = isinstance(blocks, SequentialPipelineBlocks)
    if not in_turn:
        return [blocks]
    outer = list(blocks.sub_blocks.values())
    used = [k for k, block in enumerate(outer) if "scheduler" in block.component_names]
    return outer[: used[-1] + 1] if used else outer


def _state(inputs: list[Any], given: dict[str, Any]) -> Any:
    """Make the state that blocks start from. An input without a name stands for a group of values,
    which is given as a mapping under the group's name."""
    from diffusers.modular_pipelines import PipelineState

    state = PipelineState()
    for own in inputs:
        if own.name is not None:
            state.set(own.name, given.get(own.name, own.default), own.kwargs_type)
        else:
            for name, value in (given.get(own.kwargs_type) or {}).items():
                state.set(name, value, own.kwargs_type)
    return state


def _signature(inputs: list[Any]) -> inspect.Signature:
    """Make the signature of a call that takes these inputs by name."""
    keyword = inspect.Parameter.KEYWORD_ONLY
    defaults = {own.name or own.kwargs_type: own.default for own in inputs}
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    return inspect.Signature(
        [own, *(inspect.Parameter(name, keyword, default=v) for name, v in defaults.items())]
    )


def _save(pipe: Any, kind: type, folder: Path, how: Mapping[str, Any]) -> None:
    """Save components and index under the name of the pipeline's own class. The index says that
    they lie beside it, so that the folder can be moved."""
    own = copy.copy(pipe)
    own.__class__ = kind
    own.save_pretrained(str(folder), **{"overwrite_modular_index": True, **how})
    place = folder / MODULAR
    index = json.loads(place.read_text(encoding="utf-8"))
    for entry in index.values():
        spec = entry[2] if isinstance(entry, list) and len(entry) == 3 else {}
        if spec.get("pretrained_model_name_or_path") == str(folder):
            spec["pretrained_model_name_or_path"] = "."
    files.write(place, json.dumps(index, indent=2) + "\n")
