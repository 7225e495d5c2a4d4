"""Explain a library's error inside a pipeline's call: its place, the arguments of the user that
could matter there, and the library's own words."""

from __future__ import annotations

import contextlib
import inspect
import re
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from PIL import Image
from torch import nn

from flowrl.policy.replay.errors import CallError, TooFewSteps, UnreplayableError
from flowrl.policy.replay.items import is_picture
from flowrl.runtime.memory import ran_out
from flowrl.runtime.text import printable

# words of torch's messages about types
ABOUT_TYPES = r"dtype|scalar type|Input type|should be the same"
# arguments that make a loop leave out steps
SHORTENING = ("strength", "denoising_start", "denoising_end")
WAY = (
    "a column of the prompts (or conditions=), or one value for all, model.pipeline.NAME"
    " (generate: --pipeline NAME=VALUE)"
)
BLIND = (
    f"it has an IP-Adapter and no picture for it: give ip_adapter_image, {WAY}, or take the adapter"
    " out with pipe.unload_ip_adapter()"
)
# folder of the package: frames outside it belong to libraries
OURS = str(Path(__file__).parents[2])


@contextlib.contextmanager
def blaming(
    pipe: Any, given: Mapping[str, Any], doing: str, but: Any = (CallError, UnreplayableError)
) -> Iterator[None]:
    """An error inside, other than `but`, becomes a CallError. given: arguments of the call that the
    user chose; doing: purpose of the call, such as "while media are decoded"."""
    try:
        yield
    except Exception as error:
        if isinstance(error, but) or ran_out(error):
            raise
        raise _explained(pipe, given, doing, error) from error


def _explained(pipe: Any, given: Mapping[str, Any], doing: str, error: Exception) -> CallError:
    own, message = type(pipe).__name__, printable(error)
    if missing := re.search(r"missing \d+ required [\w-]+ arguments?: (.*)", str(error)):
        return CallError(f"{own} needs {printable(missing[1])}: {WAY}")
    if missing := re.search(r"Required input '(\w+)' is missing", str(error)):
        return CallError(f"{own} needs {missing[1]}: {WAY}")
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    code = inspect.unwrap(type(pipe).__call__).__code__
    calls = [k for k, frame in enumerate(frames) if frame.f_code is code]
    values = frames[calls[0]].f_locals if calls else {}
    if tuple(getattr(values.get("timesteps"), "shape", (1,))) == (0,):
        short = [f"{k}={values[k]:g}" for k in SHORTENING if values.get(k) is not None]
        return TooFewSteps(
            f"{own} has no denoising step left {doing}: {' and '.join(short) or 'its call'} leaves"
            " out all (strength x steps is below one); raise strength (model.pipeline.strength), or"
            " the steps (sampler.steps, --steps)"
        )
    where, read = _place(pipe, frames[calls[0] + 1 :] if calls else frames)
    # a picture that the library itself names, and that nobody gave, is the whole reason
    absent = [name for name in _lacking(read or values, values) if _names(str(error), name)]
    if absent:
        return CallError(f"{own} needs {' and '.join(absent)}: {WAY}")
    message = message or str(traceback.extract_tb(error.__traceback__)[-1].line)
    advice = _advice(pipe, given, str(error), read or tuple(values), values)
    last = frames[-1].f_code.co_filename
    if last.startswith(OURS):
        advice = (
            f"this is flowrl's own {Path(last).name}:{frames[-1].f_lineno}, which cannot follow"
        )
        advice += " this pipeline, or was given other data than it expects"
    return CallError(
        f"{own} fails {doing}, in {where}: {type(error).__name__}: {message}; {advice}"
    )


def _advice(
    pipe: Any,
    given: Mapping[str, Any],
    message: str,
    read: Sequence[str],
    values: Mapping[str, Any],
) -> str:
    """Say what the user may do. read: arguments of the method that fails; values: arguments of the
    call, with their values."""
    if re.search(ABOUT_TYPES, message) and (types := _types_of(pipe)):
        return f"its networks are of different types ({types}): give them one, as pipe.to(...) does"
    named = [name for name in given if _names(message, name)]
    if not named and _blind(pipe, given):
        return BLIND
    lacking = _lacking(read, values)
    if not named and lacking:
        return f"it may need {' and '.join(lacking)}: {WAY}"
    could = named or [name for name in given if name in read]
    if could or "prompt" in read:
        each = ", ".join(f"{name}={short(given[name])}" for name in could) or "the prompts"
        return f"correct or leave out what model.pipeline or the prompts give: {printable(each)}"
    absent = [name for name, part in pipe.components.items() if part is None]
    if absent and hasattr(pipe, "update_components"):  # a modular pipeline
        return f"it has no {' and no '.join(absent)}; give it those that it needs"
    return (
        "no argument that model.pipeline or the prompts give is read; does the pipeline run by"
        " itself, as pipe(prompt)? If not, its parts do not fit together"
    )


def _lacking(read: Iterable[str], values: Mapping[str, Any]) -> list[str]:
    """Arguments of pictures that are read, and that nobody gave."""
    return [name for name in read if is_picture(name) and values.get(name, 0) is None]


def _names(message: str, argument: str) -> bool:
    return re.search(rf"\b{re.escape(argument)}\b", message) is not None


def short(value: Any) -> str:
    """Write a value into a sentence: pictures by number and size, which their texts do not tell."""
    if isinstance(value, list) and value and all(isinstance(v, Image.Image) for v in value):
        return f"{len(value)} pictures, the first {short(value[0])}"
    if isinstance(value, Image.Image):
        return f"{value.width} x {value.height} pixels"
    return repr(value)


def _place(pipe: Any, frames: Sequence[FrameType]) -> tuple[str, Sequence[str]]:
    """Find the place of an error, among the frames below the pipeline's call -> (in words;
    arguments of the pipeline's method, none in the call itself)."""
    theirs = [frame for frame in frames if not frame.f_code.co_filename.startswith(OURS)]
    names = {id(part): name for name, part in pipe.components.items() if part is not None}
    found = (names.get(id(frame.f_locals.get("self"))) for frame in theirs)
    part = next((name for name in found if name), None)
    method = next((frame.f_code for frame in theirs if frame.f_locals.get("self") is pipe), None)
    if method is None:
        return part or (theirs[0].f_code.co_name if theirs else "its loop"), ()
    read = method.co_varnames[1 : method.co_argcount + method.co_kwonlyargcount]
    where = f"{method.co_name} ({part})" if part else method.co_name
    return where, read  # a property has no arguments: it reads attributes that the call has set


def _blind(pipe: Any, given: Mapping[str, Any]) -> bool:
    """Whether the pipeline has an IP-Adapter, but no picture for it."""
    networks = (part for part in pipe.components.values() if isinstance(part, nn.Module))
    has = any("IPAdapter" in type(m).__name__ for network in networks for m in network.modules())
    return has and not any(name.startswith("ip_adapter_image") for name in given)


def _types_of(pipe: Any) -> str:
    """Name the floating-point types of each network but the VAE, which may have another; "" if all
    have the same."""
    found = {
        name: sorted({str(p.dtype)[6:] for p in part.parameters() if p.is_floating_point()})
        for name, part in pipe.components.items()
        if isinstance(part, nn.Module) and name != "vae"
    }
    if len(set().union(*found.values())) < 2:
        return ""
    return ", ".join(f"{name} {' and '.join(kinds)}" for name, kinds in found.items() if kinds)
