"""Does a video show the actions it was made from? A frozen inverse dynamics model reads them back
(RLIR, arXiv:2509.23958).

r = mean over steps of 1[action read = action given]. The paper's model is one for Minecraft; here
it is any module that maps two neighbouring frames, or with input=video the whole clip, to action
logits. Departures: continuous actions, which the paper does not have, agree by exp(-|difference|^2
/ scale) or within a threshold; a sample whose frames gave logits that are not finite is NaN.

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

from flowrl.rewards.core import weights as core_weights
from flowrl.rewards.core.pictures import rounded
from flowrl.rewards.core.reward import Reward, user_file
from flowrl.rewards.core.reward import Settings as Base
from flowrl.runtime.registry import did_you_mean
from flowrl.types import MediaContext


class Settings(Base):
    model: Any = pydantic.Field(
        None,
        description=(
            'The inverse dynamics model: "path/to/file.py:Class", a torch module; in Python also'
            " the module itself."
        ),
    )
    model_settings: dict[str, Any] = pydantic.Field(
        default_factory=dict, description="Keyword arguments of the class."
    )
    weights: str | None = pydantic.Field(None, description="Its weights, a .safetensors file.")
    input: Literal["pairs", "video"] = pydantic.Field(
        "pairs",
        description=(
            "pairs: model(before, after) of each step; video: model(clip), an answer for each step."
        ),
    )
    agreement: Literal["argmax", "exp", "threshold"] = pydantic.Field(
        "argmax",
        description=(
            "argmax: the likeliest of K actions is the given one; exp, threshold: closeness of"
            " continuous actions."
        ),
    )
    scale: float = pydantic.Field(
        1.0, gt=0, description="exp: squared distance at which agreement is 1/e."
    )
    threshold: float = pydantic.Field(
        0.1, ge=0, description="threshold: largest distance that agrees."
    )
    actions: Literal["column", "meta"] = pydantic.Field(
        "column", description='Where the given actions are: context.actions or meta["actions"].'
    )
    rounding: bool = pydantic.Field(
        True,
        description="Score what a saved video would show; false lets the gradient of exp through.",
    )
    chunk: int = pydantic.Field(64, ge=1, description="Most steps in one forward.")


class InverseDynamics(Reward):
    """Share of a video's F - 1 steps whose action the model reads back, or its mean agreement, in
    [0, 1]."""

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
            how = (
                f"exp(-distance^2 / {s.scale:g})"
                if s.agreement == "exp"
                else f"share within {s.threshold:g}"
            )
            self.scale = (
                f"agreement of the actions read from the frames with those given, {how}, 0 to 1"
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
        if self.settings.agreement == "argmax":
            if int(given.max()) >= read.shape[-1] or int(given.min()) < 0:
                raise ValueError(
                    f"actions from {int(given.min())} to {int(given.max())}, and the model knows 0"
                    f" to {read.shape[-1] - 1}"
                )
            agrees = (read.argmax(-1) == given).float()
        else:
            square = (read - given).square().sum(-1)
            agrees = (
                (-square / self.settings.scale).exp()
                if self.settings.agreement == "exp"
                else square.sqrt() <= self.settings.threshold
            )
        return agrees.float().masked_fill(~read.isfinite().all(-1), torch.nan).mean(1)

    def _given(self, media: Tensor, context: MediaContext | None) -> Tensor:
        """The actions of each step: (B, F - 1) int64, or (B, F - 1, A) fp32 where they are
        continuous; ValueError if they do not fit."""
        if self.settings.actions == "meta":
            columns = (
                None
                if context is None or context.meta is None
                else [torch.tensor(meta["actions"]) for meta in context.meta]
            )
            wrong = [len(column) for column in columns or () if len(column) != media.shape[1] - 1]
            actions = torch.stack(columns) if columns and not wrong else None
            got = f"{wrong[0]} actions" if wrong else "no actions"
        else:
            actions = None if context is None else context.actions
            got = "no actions" if actions is None else f"actions of shape {tuple(actions.shape)}"
        if actions is None or actions.shape[:2] != (len(media), media.shape[1] - 1):
            raise ValueError(
                f"{media.shape[1]} frames are {media.shape[1] - 1} steps, and {len(media)} videos"
                f" came with {got}; give one a step"
            )
        return self._checked(actions).to(media.device)

    def _checked(self, actions: Tensor) -> Tensor:
        discrete = self.settings.agreement == "argmax"
        if discrete and (actions.ndim != 2 or actions.is_floating_point()):
            raise ValueError(
                "agreement=argmax takes one whole number a step, and the actions are"
                f" {actions.dtype} of shape {tuple(actions.shape)}; take agreement=exp or threshold"
                " for continuous ones"
            )
        if not discrete and actions.ndim != 3:
            raise ValueError(
                f"agreement={self.settings.agreement} takes a list of numbers a step, (B, steps,"
                f" A), and the actions have shape {tuple(actions.shape)}"
            )
        return actions.long() if discrete else actions.float()

    def _read(self, media: Tensor, given: torch.Size) -> Tensor:
        """(B, F, 3, H, W) -> what the model answers for each step, (B, F - 1, K) fp32."""
        if self.settings.input == "video":
            size = max(1, self.settings.chunk // given[1])
            read = torch.cat([self.model(part) for part in media.split(size)])
        else:
            before, after = media[:, :-1].flatten(0, 1), media[:, 1:].flatten(0, 1)
            size = self.settings.chunk
            read = torch.cat(
                [
                    self.model(a, b)
                    for a, b in zip(before.split(size), after.split(size), strict=True)
                ]
            )
            read = (
                read.view(given[:2] + read.shape[1:]) if len(read) == given[0] * given[1] else read
            )
        wanted = (*given[:2], given[2] if len(given) == 3 else "K")
        if (
            read.ndim != 3
            or read.shape[:2] != given[:2]
            or (len(given) == 3 and read.shape[2] != given[2])
        ):
            raise ValueError(
                f"the inverse dynamics model answered with shape {tuple(read.shape)}; expected"
                f" {wanted}"
            )
        return read.float()


def load_model(model: Any, settings: Mapping[str, Any], weights: str | None) -> nn.Module:
    """The model as settings name it, frozen and in eval mode; what cannot be loaded safely ->
    ValueError."""
    if model is None:
        raise ValueError(
            "reward inverse_dynamics needs a model that reads actions from frames: set"
            " reward.inverse_dynamics.model=path/to/file.py:Class and"
            " reward.inverse_dynamics.weights=path/to/weights.safetensors"
        )
    if isinstance(model, nn.Module):
        if weights is not None or settings:
            given = (
                f"weights={weights}" if weights is not None else f"model_settings={dict(settings)}"
            )
            raise ValueError(
                f"reward.inverse_dynamics.{given} would not be used: the model is a module, loaded"
                " already; leave it out"
            )
        return model.eval().requires_grad_(False)
    place, _, member = str(model).rpartition(":")
    if not isinstance(model, str) or Path(place).suffix != ".py":
        raise ValueError(
            f"reward.inverse_dynamics.model={model}: give a torch module as"
            ' "path/to/file.py:Class", and its weights as safetensors (TorchScript archives and'
            " pickles run code when they are opened)"
        )
    module = _class_of(Path(place).expanduser().resolve(), member)(**settings)
    if not isinstance(module, nn.Module):
        raise ValueError(
            f"reward.inverse_dynamics.model={model} makes a {type(module).__name__}, which is no"
            " torch module"
        )
    if weights is None:
        if module.state_dict():
            raise ValueError(
                f"{member} has weights of its own; set"
                " reward.inverse_dynamics.weights=path/to/weights.safetensors"
            )
        return module.eval()
    path = core_weights.path_of(weights, reward="inverse_dynamics")
    if path.suffix != ".safetensors":
        raise ValueError(
            f"reward.inverse_dynamics.weights={weights}: save them as .safetensors; other files may"
            " run code when they are opened"
        )
    return core_weights.fill(module, core_weights.tensors(path), path=path)


def _class_of(path: Path, member: str) -> Any:
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
