"""Does a video show the actions it was made from? (RLIR, arXiv:2509.23958)

A frozen inverse dynamics model reads them back: r = mean over steps of 1[action read = action
given]. The paper's model is one for Minecraft; here it is any module that maps two neighbouring
frames, or with input=video the whole clip, to action logits. Departures: continuous actions, which
the paper does not have, agree by exp(-|difference|^2 / scale); a sample whose
frames gave logits that are not finite is NaN.

Weights come as safetensors beside a class in the user's own file: a TorchScript archive or a pickle
would run code when opened.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pydantic
import torch
from torch import Tensor, nn

from flowrl.rewards.core.pictures import rounded
from flowrl.rewards.core.reward import Reward
from flowrl.rewards.core.settings import Settings as Base
from flowrl.rewards.core.weights import fill, path_of, tensors
from flowrl.runtime.paths import located
from flowrl.runtime.registry import did_you_mean, user_file
from flowrl.types import MediaContext


class Settings(Base):
    model: Any = pydantic.Field(
        None,
        description=(
            'The inverse dynamics model: "path/to/file.py:Class", a torch module; Python may also'
            " give the module itself."
        ),
    )
    model_settings: dict[str, Any] = pydantic.Field(
        default_factory=dict, description="Keyword arguments of the class."
    )
    weights: str | None = pydantic.Field(
        None, description="Weights of the model, a .safetensors file."
    )
    input: Literal["pairs", "video"] = pydantic.Field(
        "pairs",
        description=(
            "How the model is called: model(before, after) for each step (pairs), or model(clip),"
            " which answers for each step (video)."
        ),
    )
    agreement: Literal["argmax", "exp"] = pydantic.Field(
        "argmax",
        description=(
            "How actions agree. argmax: the likeliest of K actions is the given one; exp: closeness"
            " of continuous actions."
        ),
    )
    scale: float = pydantic.Field(
        1.0, gt=0, description="Squared distance at which agreement is 1/e, for agreement=exp."
    )
    actions: Literal["column", "meta"] = pydantic.Field(
        "column",
        description=(
            'Place of the given actions: context.actions (column) or meta["actions"] (meta).'
        ),
    )
    rounding: bool = pydantic.Field(
        True,
        description=(
            "Score the bytes that a saved video would show; false lets the gradient of exp through."
        ),
    )
    chunk: int = pydantic.Field(64, ge=1, description="Most steps in one forward.")


class InverseDynamics(Reward):
    """Share of a video's F - 1 steps whose action is read back, or mean agreement, in [0, 1]."""

    Settings = Settings
    name = "inverse_dynamics"
    scale = "share of steps whose action is read back from the frames, 0 to 1"
    range = (0.0, 1.0)
    needs = frozenset({"actions"})
    remedies = {"actions": 'set actions=meta to read each prompt\'s own "actions"'}
    video = "only"

    def __init__(self, settings: Any = None):
        super().__init__(settings)
        s = self.settings
        self.model = load_model(s.model, s.model_settings, s.weights)
        if s.actions == "meta":
            self.needs, self.reads = frozenset({"meta"}), frozenset({"actions"})
        if s.agreement != "argmax":
            self.scale = (
                "agreement of the actions read from the frames with those given,"
                f" exp(-distance^2 / {s.scale:g}), 0 to 1"
            )
        self.differentiable = s.agreement == "exp" and not s.rounding

    def complaint(self, meta: Mapping[str, Any]) -> str | None:
        if self.settings.actions == "meta":
            try:
                self._checked(torch.tensor(meta["actions"])[None])
            except (ValueError, TypeError, RuntimeError) as error:
                return f"has actions that cannot be used: {error}"
        return None

    def __call__(
        self, media: Tensor, prompts: list[str], context: MediaContext | None = None
    ) -> Tensor:
        given = self._given(media, context)
        read = self._read(rounded(media) if self.settings.rounding else media, given.shape)
        agrees = self._agreement(read, given).float()
        return agrees.masked_fill(~read.isfinite().all(-1), torch.nan).mean(1)

    def _agreement(self, read: Tensor, given: Tensor) -> Tensor:
        """Whether, or how well, each step's action is read back: (B, F - 1), bool or in [0, 1]."""
        if self.settings.agreement == "argmax":
            low, high, known = int(given.min()), int(given.max()), read.shape[-1]
            if low < 0 or high >= known:
                raise ValueError(
                    f"actions from {low} to {high}, and the model knows 0 to {known - 1}"
                )
            return read.argmax(-1) == given
        return (-(read - given).square().sum(-1) / self.settings.scale).exp()

    def _given(self, media: Tensor, context: MediaContext | None) -> Tensor:
        """The actions of each step, (B, F - 1) int64, or (B, F - 1, A) fp32 if they are continuous.

        Raises ValueError if they do not fit.
        """
        frames, steps = media.shape[1], media.shape[1] - 1
        if self.settings.actions == "meta":
            actions, got = _from_meta(context, steps)
        else:
            actions = None if context is None else context.actions
            got = "no actions" if actions is None else f"actions of shape {tuple(actions.shape)}"
        if actions is None or actions.shape[:2] != (len(media), steps):
            raise ValueError(
                f"{frames} frames are {steps} steps, and {len(media)} videos came with {got}; give"
                " one a step"
            )
        return self._checked(actions).to(media.device)

    def _checked(self, actions: Tensor) -> Tensor:
        """The actions as int64 or fp32; ValueError where they do not go with the agreement."""
        discrete = self.settings.agreement == "argmax"
        if discrete and (actions.ndim != 2 or actions.is_floating_point()):
            raise ValueError(
                "agreement=argmax takes one whole number a step, and the actions are"
                f" {actions.dtype} of shape {tuple(actions.shape)}; take agreement=exp for"
                " continuous ones"
            )
        if not discrete and actions.ndim != 3:
            raise ValueError(
                "agreement=exp takes a list of numbers a step, (B, steps,"
                f" A), and the actions have shape {tuple(actions.shape)}"
            )
        return actions.long() if discrete else actions.float()

    def _read(self, media: Tensor, given: torch.Size) -> Tensor:
        """Answers of the model for each step, (B, F, 3, H, W) -> (B, F - 1, K) fp32.

        given: the shape of the actions, (B, F - 1) or (B, F - 1, K).
        """
        read = self._answers(media)
        if self.settings.input == "pairs" and len(read) == given[0] * given[1]:
            read = read.view(given[:2] + read.shape[1:])
        fits = read.ndim == 3 and read.shape[: len(given)] == given
        if not fits:
            wanted = (*given[:2], given[2] if len(given) == 3 else "K")
            raise ValueError(
                f"the inverse dynamics model answered with shape {tuple(read.shape)}; expected"
                f" {wanted}"
            )
        return read.float()

    def _answers(self, media: Tensor) -> Tensor:
        """The model's own outputs, `chunk` steps at a time."""
        chunk = self.settings.chunk
        if self.settings.input == "video":
            videos = max(1, chunk // (media.shape[1] - 1))
            return torch.cat([self.model(part) for part in media.split(videos)])
        before, after = media[:, :-1].flatten(0, 1), media[:, 1:].flatten(0, 1)
        pairs = zip(before.split(chunk), after.split(chunk), strict=True)
        return torch.cat([self.model(a, b) for a, b in pairs])


def _from_meta(context: MediaContext | None, steps: int) -> tuple[Tensor | None, str]:
    """Each prompt's own actions; where they do not fit, None and a description of what is there."""
    if context is None or context.meta is None:
        return None, "no actions"
    columns = [torch.tensor(meta["actions"]) for meta in context.meta]
    wrong = [len(column) for column in columns if len(column) != steps]
    if wrong:
        return None, f"{wrong[0]} actions"
    return (torch.stack(columns) if columns else None), "no actions"


def load_model(model: Any, settings: Mapping[str, Any], weights: str | None) -> nn.Module:
    """Load the model that settings name, frozen, in eval mode; ValueError: it is not safe to
    load."""
    if model is None:
        raise ValueError(
            "reward inverse_dynamics needs a model that reads actions from frames: set"
            " reward.inverse_dynamics.model=path/to/file.py:Class and"
            " reward.inverse_dynamics.weights=path/to/weights.safetensors"
        )
    if isinstance(model, nn.Module):
        _refuse_unused(settings, weights)
        return model.eval().requires_grad_(False)
    module, name = _made(model, settings)
    if weights is not None:
        return _filled(module, weights)
    if module.state_dict():
        raise ValueError(
            f"{name} has weights of its own; set"
            " reward.inverse_dynamics.weights=path/to/weights.safetensors"
        )
    return module.eval()


def _refuse_unused(settings: Mapping[str, Any], weights: str | None) -> None:
    """Refuse settings that a module, which is loaded already, would not read."""
    if weights is not None or settings:
        given = f"weights={weights}" if weights is not None else f"model_settings={dict(settings)}"
        raise ValueError(
            f"reward.inverse_dynamics.{given} would not be used: the model is a module, loaded"
            " already; leave it out"
        )


def _made(model: Any, settings: Mapping[str, Any]) -> tuple[nn.Module, str]:
    """An instance of the class that "path/to/file.py:Class" names, and the class's name."""
    place, _, member = str(model).rpartition(":")
    if not isinstance(model, str) or Path(place).suffix != ".py":
        raise ValueError(
            f"reward.inverse_dynamics.model={model}: give a torch module as"
            ' "path/to/file.py:Class", and its weights as safetensors (TorchScript archives and'
            " pickles run code when they are opened)"
        )
    module = _class_of(located(place).resolve(), member)(**settings)
    if not isinstance(module, nn.Module):
        raise ValueError(
            f"reward.inverse_dynamics.model={model} makes a {type(module).__name__}, which is not a"
            " torch module"
        )
    return module, member


def _filled(module: nn.Module, weights: str) -> nn.Module:
    path = path_of(weights, reward="inverse_dynamics")
    if path.suffix != ".safetensors":
        raise ValueError(
            f"reward.inverse_dynamics.weights={weights}: save them as .safetensors; other files may"
            " run code when they are opened"
        )
    return fill(module, tensors(path), path=path)


def _class_of(path: Path, member: str) -> type[nn.Module]:
    """Class `member` of a user's file."""
    found = user_file(path, what="reward.inverse_dynamics.model")
    classes = [
        key
        for key, value in found.items()
        if isinstance(value, type) and issubclass(value, nn.Module)
    ]
    if member not in classes:
        raise ValueError(
            f"reward.inverse_dynamics.model: {path.name} has no torch module"
            f' "{member}"{did_you_mean(member, classes)}'
        )
    return found[member]


REWARD = InverseDynamics
