"""The base class of rewards, and how a reward is found by its name.

A reward is a module rewards/<name>.py that exposes `REWARD`, a subclass of Reward with a pydantic
`Settings` schema. The file is the registration: nothing else has to be edited. Shared parts are in
the folders of rewards/. A function in a user's own file is one too: decorated with `reward`, it is
named "path/to/file.py:function"; a package that is installed may bring one as an entry point
(flowrl/runtime/registry.py).
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, ClassVar, Literal

import pydantic
import torch
from torch import Tensor, nn

from flowrl.rewards.core.settings import Settings, parse
from flowrl.rewards.core.sizes import published
from flowrl.runtime import registry
from flowrl.runtime.install import line_for
from flowrl.runtime.log import waiting
from flowrl.runtime.registry import did_you_mean
from flowrl.types import MediaContext

COLUMNS = tuple(field.name for field in dataclasses.fields(MediaContext))
SHOWN = ("colour", "shape", "count", "relation", "swap")  # attributes that prompts of objects state
WRITTEN = ("word", "letter")  # attributes that a prompt of a text states
ORIGINS = {  # column -> who brings it; Python code or a reward server's client bring the others
    "meta": "every prompt of a data file brings it",
    "group": "a training run brings it, for its samples of one prompt",
    "source": 'it is the picture to edit, which a data file names in its column "image"',
}


class Reward:
    """Scores media for their prompts; higher is always better.

    A subclass sets these attributes; an instance may set them anew, as its settings decide.
    """

    Settings: ClassVar[type[Settings]] = Settings
    name: str = ""  # name of the reward in the log
    scale: str = ""  # one sentence that says what a number means
    needs: frozenset[str] = frozenset()  # MediaContext columns that it reads
    remedies: Mapping[str, str] = {}  # column -> setting with which the reward does not need it
    # keys of each prompt's meta that it needs; checked before a run
    reads: frozenset[str] = frozenset()
    reads_prompt: bool = False  # whether the text matters, so that an empty one is refused
    # "pictures": images and videos; "any": whatever a policy makes, (B, *D)
    takes: Literal["pictures", "any"] = "pictures"
    # whether it takes videos; it always takes images, unless this is "only"
    video: Literal["yes", "no", "only"] = "yes"
    # whether a gradient reaches the media, as loaded; where a setting `rounding` exists, it decides
    differentiable: bool = False
    # lowest and highest possible score, inf for an open end; None: not known
    range: tuple[float, float] | None = None
    quality: bool = False  # whether it is meant to put honest pictures above noise and blank ones
    # attributes of prompts (SHOWN and WRITTEN) in which it must tell right from wrong, or a check
    # fails
    verifies: frozenset[str] = frozenset()
    wrong: ClassVar[str] = ""  # what is wrong with the function that it was made of
    problem: str | None = None  # why samples of the last call failed
    answers: bool = False  # whether `told` has answers about pictures, which evaluation keeps
    # whether it may hold networks on the device. A mapping: hub name -> number of weights, for the
    # network that the setting base, backbone or weights names; see network_bytes
    networks: bool | Mapping[str, int] = True

    def __init__(self, settings: Any = None):
        """settings: an instance of this class's Settings; None: their defaults."""
        if self.wrong:
            raise ValueError(self.wrong)
        self.settings: Any = self.Settings() if settings is None else settings
        if hasattr(self.settings, "rounding"):
            self.differentiable = not self.settings.rounding

    def __call__(
        self, media: Tensor, prompts: list[str], context: MediaContext | None = None
    ) -> Tensor:
        """media: (B, 3, H, W) or (B, F, 3, H, W) fp32 in [0, 1]; where `takes` is "any", also other
        (B, *D) -> (B,) fp32 on media's device; NaN marks a sample that failed."""
        raise NotImplementedError(f"{type(self).__name__} does not define __call__")

    def inner_rewards(self) -> Sequence[Reward]:
        """The rewards that this one asks; the methods below pass their arguments on to them."""
        return ()

    def complaint(self, meta: Mapping[str, Any]) -> str | None:
        """The fault of the values that this reward reads of a prompt, as the end of a sentence;
        None: they have none."""
        said = (reward.complaint(meta) for reward in self.inner_rewards())
        return next(filter(None, said), None)

    def parts(
        self, media: Tensor, prompts: list[str], context: MediaContext | None = None
    ) -> dict[str, Tensor]:
        """Readings that evaluation shows beside the score, as eval/<label>/<part>.

        name -> (B,) fp32. Most rewards have none.
        """
        return {}

    def told(self, media: Tensor, context: MediaContext) -> list[list[dict[str, Any]]] | None:
        """Its answers about each of these samples, if they are the last that it scored."""
        return None

    def expect(self, prompts: Sequence[str]) -> None:
        """Receive the texts that will be scored, as far as they are known at start-up, so that a
        warning about all of them comes once."""
        for reward in self.inner_rewards():
            reward.expect(list(prompts))  # a copy for each, because a reward may change its list

    def begin(self, run: Path) -> None:
        """A training run in the folder `run` begins, or goes on; most keep nothing there."""
        for reward in self.inner_rewards():
            reward.begin(run)

    @classmethod
    def network_bytes(cls, settings: Any) -> float | None:
        """Bytes that the networks of a reward with these settings take on a device, computed
        without loading them; None: not known."""
        if isinstance(cls.networks, bool):
            return None if cls.networks else 0.0
        named = next(n for n in ("base", "backbone", "weights") if hasattr(settings, n))
        dtype = getattr(settings, "dtype", "float32")
        return published(cls.networks, getattr(settings, named), dtype)

    def uncached(self) -> AbstractContextManager[None]:
        """Within it, no score or answer comes from a store of earlier ones.

        A check whether a reward repeats itself needs that.
        """
        return entered(reward.uncached() for reward in self.inner_rewards())

    def to(self, device: torch.device | str) -> Reward:
        """Move the networks among our attributes to device; free when they are there already."""
        for reward in self.inner_rewards():
            reward.to(device)
        for value in vars(self).values():
            if isinstance(value, nn.Module):
                value.to(device)
        return self

    def __repr__(self) -> str:
        return f"<reward {self.name}: {self.scale}>"


def networks(thing: Any, seen: set[int] | None = None) -> Iterator[nn.Module]:
    """The networks that a reward holds, also in rewards and other objects of ours inside it."""
    seen = set() if seen is None else seen
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, nn.Module):
        yield thing
        return
    if isinstance(thing, Mapping):
        inner = list(thing.values())
    elif isinstance(thing, list | tuple):
        inner = list(thing)
    elif type(thing).__module__.startswith("flowrl.") or isinstance(thing, Reward):
        inner = list(getattr(thing, "__dict__", {}).values())
    else:
        return
    for part in inner:
        yield from networks(part, seen)


@contextmanager
def entered(contexts: Iterable[AbstractContextManager[None]]) -> Iterator[None]:
    """Within it, all of these contexts are entered."""
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


@contextmanager
def forgetful(holder: Any) -> Iterator[None]:
    """holder.remembers is False inside, and restored afterwards: `uncached` is made of this."""
    before, holder.remembers = holder.remembers, False
    try:
        yield
    finally:
        holder.remembers = before


class FunctionReward(Reward):
    """Any function (media, prompts, context) -> (B,) as a reward, of any media."""

    takes = "any"

    def __init__(self, function: Callable[..., Tensor], name: str):
        super().__init__()
        _check_callable(function, name)
        self.function, self.name = function, name
        self.needs = frozenset(getattr(function, "needs", ()))
        self.scale = getattr(function, "scale", "as the function gives it")

    def __call__(
        self, media: Tensor, prompts: list[str], context: MediaContext | None = None
    ) -> Tensor:
        return self.function(media, prompts, context)


def _check_callable(function: Any, name: str) -> None:
    """Raise ValueError unless it can be called with media, prompts and a context."""
    if not callable(function):
        raise ValueError(
            f'reward "{name}" is a {type(function).__name__}; give a name, a Reward or a function'
            " (media, prompts, context)"
        )
    try:
        inspect.signature(function).bind(None, None, None)
    except TypeError as error:
        called = getattr(function, "__name__", type(function).__name__)
        raise ValueError(
            f'reward "{name}" is called as {called}(media, prompts, context): {error}'
        ) from error
    except ValueError:  # a builtin may have no signature
        return


def reward(
    function: Callable[..., Tensor] | None = None,
    *,
    scale: str = "as the function gives it",
    needs: Iterable[str] = (),
    reads: Iterable[str] = (),
    reads_prompt: bool = False,
    differentiable: bool = False,
    range: tuple[float, float] | None = None,
    quality: bool = False,
    verifies: Iterable[str] = (),
) -> Any:
    """Make a function (media, prompts, context=None, *, setting=default, ...) -> (B,) a reward; it
    can still be called. A decorator.

    Its keyword-only arguments are the reward's settings. The arguments of the decorator are
    attributes of flowrl.rewards.Reward.
    """
    inputs: dict[str, Any] = {"needs": frozenset(needs), "reads": frozenset(reads)}
    inputs |= {"reads_prompt": reads_prompt, "takes": "any"}
    scores = {"scale": scale, "range": range, "quality": quality, "differentiable": differentiable}

    def register(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
        try:
            made = _class_of(f, inputs | scores | {"verifies": verifiable(verifies)})
        # raised when this reward is asked for: others of its file may be sound
        except Exception as error:
            made = type(f.__name__, (Reward,), {"wrong": str(error)})
        f.REWARD = made  # type: ignore[attr-defined]
        return f

    return register if function is None else register(function)


def verifiable(kinds: Iterable[str]) -> frozenset[str]:
    """Names that `verifies` may hold, as a set; another -> ValueError with the nearest."""
    names = [*SHOWN, *WRITTEN]
    if unknown := sorted(set(kinds) - set(names)):
        raise ValueError(
            f'verifies="{unknown[0]}" is not known to the checks{did_you_mean(unknown[0], names)}'
        )
    return frozenset(kinds)


def _class_of(f: Callable[..., Tensor], declared: Mapping[str, Any]) -> type[Reward]:
    """A reward class that calls f with its settings."""
    fields = _settings_of(f)

    def call(
        self, media: Tensor, prompts: list[str], context: MediaContext | None = None
    ) -> Tensor:
        return f(media, prompts, context, **{key: getattr(self.settings, key) for key in fields})

    schema = pydantic.create_model(f"{f.__name__}_settings", __base__=Settings, **fields)
    own = {
        "__call__": call,
        "function": staticmethod(f),
        "__doc__": f.__doc__,
        "Settings": schema,
        "name": f.__name__,
    }
    return type(f.__name__, (Reward,), {**own, **declared})


def _settings_of(f: Callable[..., Tensor]) -> dict[str, Any]:
    """pydantic fields, (type, default) by name, of the keyword-only arguments of f; ValueError
    unless three arguments precede them."""
    signature = inspect.signature(f, eval_str=True)
    parameters = signature.parameters.values()
    count = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
    if count != 3:
        raise ValueError(
            f"{f.__name__}{signature} takes {count} positional arguments; a reward takes (media,"
            " prompts, context=None)"
        )
    fields = {}
    for p in parameters:
        if p.kind is p.KEYWORD_ONLY:
            annotation = Any if p.annotation is p.empty else p.annotation
            fields[p.name] = (annotation, ... if p.default is p.empty else p.default)
    return fields


def reward_class(name: str) -> type[Reward]:
    """The class behind a reward's name or "file.py:function", unloaded. Unknown -> ValueError with
    the nearest names."""
    found = registry.plugin(
        "flowrl.rewards",
        name,
        "REWARD",
        what="reward",
        suits=lambda value: hasattr(value, "REWARD"),
    )
    cls = getattr(found, "REWARD", found)
    if isinstance(cls, type) and issubclass(cls, Reward):
        if cls.wrong:
            raise ValueError(f'reward "{name}": {cls.wrong}')
        return cls
    if registry.is_place(name):
        member = name.rpartition(":")[2]
        raise ValueError(f'reward "{name}": {member} is not a reward; put @flowrl.reward above it')
    said = "exposes no REWARD"
    if cls is not None:
        said = f"exposes REWARD = {cls!r}, which is not a subclass of flowrl.rewards.Reward"
    raise ValueError(f'reward "{name}": its file {said}; end it with REWARD = YourClass')


@waiting("load a reward")
def load(name: str, **settings: Any) -> Reward:
    """Load reward `name` with its settings. Unknown reward or setting -> ValueError naming the
    nearest valid ones."""
    cls, checked = _chosen(name, settings)
    try:
        return cls(checked)
    except ImportError as error:
        line = line_for(error.name)
        raise ValueError(
            f'reward "{name}" needs a package that cannot be imported: {error}'
            + (f"; {line}" if line else "")
        ) from error
    except SystemExit as error:
        raise ValueError(f'reward "{name}" called sys.exit({error}) while it was loaded') from error


def network_bytes(name: str, **settings: Any) -> float | None:
    """Reward.network_bytes of reward `name` with its settings; ValueError: see `load`."""
    cls, checked = _chosen(name, settings)
    return cls.network_bytes(checked)


def _chosen(name: str, settings: Mapping[str, Any]) -> tuple[type[Reward], Settings]:
    """The class of a reward and its settings, checked."""
    cls = reward_class(name)
    prefix = f"{name.rpartition(':')[2]}."
    return cls, parse(cls.Settings, settings, what=f'reward "{name}"', prefix=prefix)
