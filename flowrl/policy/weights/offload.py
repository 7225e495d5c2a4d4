"""Frozen weights that wait in host memory while others need the device.

Three kinds of weights take turns. Text encoders (model.encoders=leave) are on the device only while
a prompt is new. Denoisers (model.offload=denoiser) leave it when media are decoded and scored, or
when a text encoder comes, and are back at their next forward. Networks of rewards
(model.offload=all) are there from the first score to that forward. Frozen weights never change, so
to leave the device is to free the copy there: nothing is written back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from flowrl.policy.replaced import replaced
from flowrl.policy.weights.quantised import plain_tensors, scales
from flowrl.policy.weights.waiting import Waiting, put, tensors_of


class OffloadedWeights:
    """Weights whose place is host memory, with a copy on the device while it is used."""

    def __init__(self, tensors: Iterable[Tensor], device: torch.device) -> None:
        self.tensors, self.device = list(tensors), device
        self.kept = [hosted(t.data, device) for t in self.tensors]
        self.here, self.visits = True, 0

    def come(self) -> None:
        """Put the weights on the device, if they are not there."""
        if not self.here:
            for tensor, kept in zip(self.tensors, self.kept, strict=True):
                tensor.data = kept.to(self.device, non_blocking=True)
            self.here, self.visits = True, self.visits + 1

    def leave(self) -> None:
        """Free the copy on the device. It must not have been read by a graph whose gradient is
        still to come."""
        for tensor, kept in zip(self.tensors, self.kept, strict=True):
            tensor.data = kept
        self.here = False


class Turns:
    """Decides which of the weights that may leave are on the device: text encoders, denoisers or
    rewards. waiting: denoisers that come a block at a time, until they are split over processes."""

    def __init__(self, device: torch.device, waiting: Waiting | None = None) -> None:
        self.device = device
        self.waiting = waiting
        self.encoders: OffloadedWeights | None = None
        self.denoisers: OffloadedWeights | None = None
        self.takes_scorers = False  # whether networks of rewards take turns, too
        self.scorers: list[OffloadedWeights] = []  # weights of each set of rewards
        # networks that may be away from the device; a Waiting one's blocks are
        self.movers: list[nn.Module] = [] if waiting is None else list(waiting.networks)
        self.open = 0  # number of runs of the pipeline in progress, one within another
        self.instead = False  # whether encoders may take the place of the denoisers

    @property
    def used(self) -> bool:
        """Whether any weights leave the device."""
        return bool(self.encoders or self.denoisers or self.waiting)

    def send_encoders(self, networks: Iterable[nn.Module]) -> None:
        """Send these frozen networks to host memory; they come when any part of them is called."""
        networks = list(networks)
        tensors = unique(t for net in networks for t in tensors_of(net))
        self.encoders = OffloadedWeights(tensors, self.device)
        self.encoders.leave()
        self.movers += networks
        for network in networks:
            # every module, because pipelines call parts of their encoders, too
            for module in network.modules():
                module.register_forward_pre_hook(self._encode)

    def offload(self, networks: Mapping[str, nn.Module], *, scorers: bool = False) -> None:
        """Let the frozen weights of a policy's networks wait in host memory from `rest` to their
        next forward. scorers: networks of rewards take turns with them (RewardSet.beside).
        ValueError if the weights cannot leave."""
        if not networks:
            raise ValueError(
                "model.offload: the model is a generator, which has no weights to move;"
                " leave it out"
            )
        if not self.used:  # the networks may have been moved since they were loaded
            self.device = next(next(iter(networks.values())).parameters()).device
        # an earlier run of the same live policy may have sent them already
        if self.denoisers is None:
            self.send_denoisers(networks)
        self.takes_scorers = scorers

    def send_denoisers(self, networks: Mapping[str, nn.Module]) -> None:
        """Let the frozen weights of these networks, quantised ones too, leave from now on;
        ValueError if they are trained."""
        tensors = unique(t for name, net in networks.items() for t in frozen(name, net))
        self.denoisers = OffloadedWeights(tensors, self.device)
        self.movers += networks.values()
        for network in networks.values():
            # no deeper modules, because the blocks below may be compiled
            for module in (network, *network.children()):
                module.register_forward_pre_hook(self._denoise)

    def send_scorers(self, networks: Iterable[nn.Module]) -> Callable[[], None]:
        """Send these frozen networks of rewards to host memory -> a function that brings them
        before samples are scored. Weights of an unknown type stay on the device."""
        tensors = unique(t for net in networks for t in tensors_of(net))
        put((t for t in tensors if type(t.data) is not Tensor), self.device)
        guest = OffloadedWeights((t for t in tensors if type(t.data) is Tensor), self.device)
        guest.leave()
        self.scorers.append(guest)

        def come() -> None:
            self.rest()  # the denoisers are not needed for a while
            guest.come()

        return come

    def end_waiting(self) -> None:
        """Stop bringing blocks of denoisers when they run, because the denoisers will be split."""
        if self.waiting is not None:
            self.waiting.end()
            self.waiting = None

    def _encode(self, module: nn.Module, *call: Any) -> None:
        if self.encoders is None or self.encoders.here or stubbed(module):
            return
        self.scored()
        if self.instead:
            self.rest()
        self.encoders.come()

    def _denoise(self, module: nn.Module, *call: Any) -> None:
        if self.denoisers is None or self.denoisers.here or stubbed(module):
            return
        self.summon()

    def summon(self) -> None:
        """Bring the denoisers, and send away the weights in their place."""
        if self.denoisers is not None and not self.denoisers.here:
            self.scored()
            if self.encoders is not None and self.encoders.here:
                self.encoders.leave()
            self.denoisers.come()

    def rest(self) -> None:
        """Send the denoisers away, because they are not needed for a while; no gradient through
        them may be still to come."""
        if self.denoisers is not None and self.denoisers.here:
            self.denoisers.leave()

    def scored(self) -> None:
        """Send the networks of rewards away, because others need the device."""
        for guest in self.scorers:
            if guest.here:
                guest.leave()

    @contextlib.contextmanager
    def running(self, pipe: Any, *, instead: bool = False) -> Iterator[None]:
        """Inside, the pipeline computes on our device, and its networks say that they are there,
        wherever their weights are; encoders that came leave at the end of the outermost run.
        instead: encoders may take the place of the denoisers, because no gradient is to come."""
        before = self.instead
        self.open, self.instead = self.open + 1, before or instead
        try:
            movers = [pipe, *self.movers] if self.used else []
            with contextlib.ExitStack() as stack:
                for thing in movers:
                    stack.enter_context(computing_on(thing, self.device))
                yield
        finally:
            self.open, self.instead = self.open - 1, before
            if not self.open and self.encoders is not None and self.encoders.here:
                self.encoders.leave()


def stubbed(module: nn.Module) -> bool:
    """Whether a stub answers in place of a module; if the stub calls the module after all, it
    calls its parts."""
    return "forward" in module.__dict__


def frozen(name: str, network: nn.Module) -> Iterator[Tensor]:
    """Yield the tensors in which the weights of a network are stored, without adapters; ValueError
    for weights that are trained, or stored in an unknown type."""
    what = f"model.offload: weights of the {name} ({type(network).__name__})"
    for key, p in network.named_parameters():
        if "lora_" in key:
            continue
        if p.requires_grad:
            raise ValueError(
                f"{what} are trained, and only frozen ones are moved; use train.mode=lora, or leave"
                " model.offload out"
            )
        for part in (*(part for _, part in plain_tensors(key, p)), *scales(p)):
            if type(part.data) is not Tensor:
                raise ValueError(
                    f"{what} are {type(part.data).__name__}, and only whole ones and those of"
                    " model.quantize are moved; leave model.offload out"
                )
            yield part


def unique(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Keep each tensor once: weights may be tied."""
    return list({id(t): t for t in tensors}.values())


def hosted(value: Tensor, device: torch.device) -> Tensor:
    """Copy to host memory, which is pinned if that makes transfers to the device faster."""
    there = value.cpu()
    return there.pin_memory() if device.type == "cuda" else there


@contextlib.contextmanager
def computing_on(thing: Any, device: torch.device) -> Iterator[None]:
    """Inside, a pipeline or a network says that it is on this device. diffusers would ask the first
    of a pipeline's parts, and the first weight of a network, before it moves their inputs."""
    kind = type(thing)
    usual = {name: getattr(kind, name, None) for name in ("device", "_execution_device")}
    answers = {name: property(_device_of(own, thing, device)) for name, own in usual.items() if own}
    with replaced(kind, **answers):
        yield


def _device_of(usual: Any, thing: Any, device: torch.device) -> Any:
    """Return our device for this object, and the usual answer for others of its class."""
    return lambda own: device if own is thing else usual.__get__(own, type(own))
