"""A plain nn.Module f(tokens, cond) -> logits as a policy: masked generators of images and text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flowrl.policy.base import Policy
from flowrl.policy.module import ModulePolicy
from flowrl.policy.replay.arguments import Cond
from flowrl.policy.replay.call import Request
from flowrl.policy.replay.coords import Schedule
from flowrl.runtime.copies import own
from flowrl.samplers import keys, sigmas
from flowrl.samplers.common.unmasking import MASK

# logit of the mask token where the vocabulary holds it: exp of it is 0, and differences of it are
# numbers, which those of -inf are not
NEVER = -1e4


class TokenGrids(Policy):
    """What policies of tokens have in common: grids that start with all places masked."""

    state_dtype = torch.int32
    unmasks = True
    masking = "cosine"  # how the share of masked places falls, see sigmas.unmasking

    def schedule(self, steps: int) -> Schedule:
        """Return the shares of masked places; the model reads no time."""
        found = sigmas.unmasking(torch.Size(self.latent_shape).numel(), steps, self.masking)
        return Schedule(sigmas=found, times=found[:-1])

    def noise(self, names: Tensor) -> Tensor:
        """Draw what a step needs: (n,) int64 -> (n, 2, *L) fp32, uniform on [0, 1)."""
        return keys.uniforms(names, (2, *self.latent_shape), self.device)

    def init(
        self,
        noise: Tensor,
        sigma: float,
        cond: Cond | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Return grids (n, *L) int32 without any token."""
        shape = (len(noise), *self.latent_shape)
        return torch.full(shape, MASK, dtype=self.state_dtype, device=noise.device)


class TokenPolicy(TokenGrids, ModulePolicy):
    """f(tokens (n, *L) int64, cond (n, ...)) -> logits (n, *L, V), or a record with `logits`:
    tokens are drawn by them where places are masked. Here sigma is the share of masked places, and
    `velocity` gives the logits.

    mask: the number by which f is told of a masked place, in its vocabulary or V itself. cond,
    decode: see ModulePolicy; decode gets tokens int64, and without it media are the tokens as fp32.
    empty: the text of the branch without a prompt, for guidance u + w (c - u) with the logits c and
    u of both; None: there is no guidance. scale: w of guidance "pipeline".
    """

    def __init__(
        self,
        module: nn.Module,
        shape: tuple[int, ...],
        mask: int | None,
        cond: Callable[[list[str]], Tensor] | None = None,
        lora: Any = None,
        decode: Callable[[Tensor], Tensor] | None = None,
        empty: str | None = None,
        scale: float = 1.0,
    ) -> None:
        if type(mask) is not int or mask < 0:
            raise ValueError(
                f"mask={mask!r} should be the number of the mask token, with which the module is"
                " called at places that have no token yet: 128 after a codebook of 128 tokens"
            )
        if empty is not None and cond is None:
            raise ValueError(
                f"empty={empty!r} is the text of the branch without a prompt, and there is no cond"
                " that reads texts; give cond too, or leave empty out"
            )
        super().__init__(module, shape, cond=cond, lora=lora, decode=decode)
        self.mask, self.empty, self.scale = mask, empty, scale

    def describe(self) -> str:
        """Write in two lines which function is called."""
        name, shape = type(self.modules["module"]).__name__, ", ".join(map(str, self.latent_shape))
        cond = "None" if self.cond is None else "cond(prompts)[rows]"
        media = "tokens" if self.decoder is None else "decode(tokens)"
        called = f"logits = {name}(tokens (n, {shape}), masked where {self.mask}, {cond})"
        return f"{called}\nmedia = {media}"

    def guided(self, guidance: float | str) -> float:
        """Return w of a guidance; 1: the conditional branch alone."""
        own = {"pipeline": self.scale, "none": 1.0}
        return own[guidance] if isinstance(guidance, str) else float(guidance)

    def branches(self, guidance: float | str) -> int:
        if self.guided(guidance) == 1:
            return 1
        if self.empty is None:
            raise ValueError(
                f"guidance={guidance}: this policy has no unconditional branch; use 'none', or give"
                " the text of one, as empty='', where the policy is made"
            )
        return 2

    def encode(
        self, prompts: list[str], conditions: Sequence[Mapping[str, Any]] | None = None
    ) -> Cond:
        value = None if self.cond is None else self._conditions(prompts)
        empty = None if self.empty is None else self._conditions([self.empty])
        return Cond.of(prompts, {("cond",): value, ("empty",): empty})

    def trial_states(self, n: int, cond: Cond) -> Tensor:
        """States (n, *L) for the self-check, of which a third of the places is masked."""
        blank = torch.full((1, *self.latent_shape), MASK, device=self.device)
        tokens = self.velocity(blank, 1.0, cond, torch.zeros(1, dtype=torch.int64)).shape[-1]
        drawn = torch.randint(tokens, (n, *self.latent_shape), generator=_generator())
        drawn[drawn == self.mask] = (self.mask + 1) % tokens
        masked = torch.rand(drawn.shape, generator=_generator()) < 1 / 3
        return drawn.where(~masked, MASK).to(self.device, self.state_dtype)

    def _velocity(self, request: Request) -> tuple[Tensor, int]:
        args = request.cond.groups[0].kept[0][0]
        x = request.x.long()
        x = torch.where(x == MASK, self.mask, x)
        cond = args[("cond",)]
        logits = self._logits(x, None if cond is None else cond.index_select(0, request.rows))
        branches = self.branches(request.guidance)
        if branches == 2:
            with torch.set_grad_enabled(torch.is_grad_enabled() and not request.detach_uncond):
                without = self._logits(x, args[("empty",)].expand(len(x), *cond.shape[1:]))
            logits = without + self.guided(request.guidance) * (logits - without)
        if self.mask < logits.shape[-1]:  # it is not a token that can be drawn
            here = torch.arange(logits.shape[-1], device=logits.device) == self.mask
            logits = logits.masked_fill(here, NEVER)
        return logits, branches * len(x)

    def _logits(self, x: Tensor, cond: Tensor | None) -> Tensor:
        """Call the module -> logits (n, *L, V) fp32, checked."""
        module = self.modules["module"]
        name = type(module).__name__
        try:
            made = module(*own((x, cond)))
        except IndexError as error:
            if not _runs(module, x.where(x != self.mask, 0), cond):
                raise  # whatever it is, it is not the mask token
            raise ValueError(
                f"{name} failed on a grid with the mask token {self.mask} ({error}); its embedding"
                " should have a row for it: give the right number as mask, where the policy is made"
            ) from error
        logits = getattr(made, "logits", made)  # transformers' models return records
        if not isinstance(logits, Tensor) or logits.shape[:-1] != x.shape:
            is_tensor = isinstance(logits, Tensor)
            got = tuple(logits.shape) if is_tensor else f"a {type(logits).__name__}"
            raise ValueError(
                f"{name} made {got} of tokens {tuple(x.shape)}; it should make logits of that shape"
                " and a last axis of the vocabulary"
            )
        return logits.float()

    def decode(
        self,
        x: Tensor,
        sigma: float = 0.0,
        cond: Cond | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Decode grids; a place without a token, as in previews, counts as token 0."""
        x = x.clamp(min=0)
        return x.float() if self.decoder is None else own(self.decoder(own(x.long())))

    def encode_media(self, media: Tensor) -> Tensor:
        raise ValueError(
            "a masked generator has no way from media back to tokens here, so media from files"
            " cannot be trained on; leave them out"
        )


def _runs(module: nn.Module, *given: Any) -> bool:
    """Whether a call raises no IndexError."""
    try:
        module(*own(given))
    except IndexError:
        return False
    return True


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)
