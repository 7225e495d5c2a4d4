"""What many tests ask of a policy: velocities at fixed latents, and adapters that do something."""

import tiny
import torch


def noise(policy, rows=2, seed=1):
    """Latents (rows, *L), the same for each seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, *policy.latent_shape, generator=generator)


def velocity(policy, sigma=0.6, *, prompts=tiny.PROMPTS, seed=1, **how):
    """v (P, *L) of P prompts."""
    rows = torch.arange(len(prompts))
    x = noise(policy, len(prompts), seed)
    return policy.velocity(x, sigma, policy.encode(list(prompts)), rows, **how)


def stirred(policy):
    """The same policy, whose adapter does something (gaussian init starts at zero effect)."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in policy.trainable.named().values():
            p.copy_(0.3 * torch.randn(p.shape, generator=generator))
    return policy


def gradients(policy):
    """Gradients that trained weights have, by name."""
    return {name: p.grad for name, p in policy.trainable.named().items() if p.grad is not None}
