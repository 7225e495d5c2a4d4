"""The trained weights and their views: the current weights, an older copy, the frozen reference.

Optimizer, EMA and checkpoints read `by_part` and `tensors` and nothing else.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from flowrl.policy.replay.arguments import map_tensors
from flowrl.policy.weights.masters import Master, matrices, version
from flowrl.policy.weights.merged import save_merged
from flowrl.policy.weights.quantised import is_quantised, silence
from flowrl.policy.weights.targets import options_of, targets_of
from flowrl.runtime.processes import shares

TEXT = "text_encoder"  # prefix of text encoders' names, in diffusers' convention
Place = tuple[str, str]  # (component, name of one of its layers)


class TrainedParts:
    """The weights that a policy trains, and their views.

    They are LoRA adapters of `modules` or, without lora, all weights of `modules`, and the heads
    beside these (weights/heads.py). All of them are fp32. A view is one set of values for all of
    them: "default" has the trained values, "reference" the values before training, others are
    copies that a method keeps. LoRA has one adapter for each view, and the layers switch between
    them; all other weights change places with the copies of a view.
    """

    def __init__(self, modules: dict[str, Any], lora: dict[str, Any] | None) -> None:
        self.modules = modules  # component name -> network as it was loaded, never wrapped
        if not isinstance(lora, Mapping | None):
            raise ValueError(
                f"lora={lora!r} should be a mapping, such as {{'rank': 8, 'alpha': 16}},"
                " or the pathlib.Path of a saved LoRA"
            )
        self.lora = None if lora is None else dict(lora)
        self.options = options_of(lora or {})
        self.heads: dict[str, nn.Module] = {}  # name -> small network that is trained in full
        # view -> weight -> value: for heads, and in full mode for all weights
        self.copies: dict[str, dict[str, Tensor]] = {}
        self.targets: dict[str, list[str]] = {}  # component -> names of the layers with LoRA
        self.matrices: dict[str, list[nn.Linear]] = {}  # view -> A and B of its LoRA
        self.beneath: list[nn.Linear] = []  # A and B of adapters that came with the network
        # view -> our adapters that are on in it, on top of those with which a layer came
        self.views: dict[str, tuple[str, ...]] = {"reference": ()}
        self.standing = {} if lora is None else standing(modules.values())
        # pair of views -> (their versions, whether they are equal), see same
        self.compared: dict[tuple[str, str], tuple[Any, bool]] = {}
        self.active = "default"  # view with whose values the networks compute
        self.wide = False  # full mode: whether the weights were made fp32
        self.frozen = not modules  # whether the weights of `modules` are not trained for now
        if lora is None:
            self.thaw(True)
        else:
            self._add_adapter("default")

    # ---------------------------------------------------------------------------
    # which weights

    def named(self, view: str = "default") -> dict[str, nn.Parameter]:
        """Return the parameters of a view by stable name, "<component>.<path>", without heads; they
        are looked up in each call, so sharded replacements are found."""
        if self.frozen:
            return {}
        if self.lora is None and not self.wide:
            self._widen()
        mark = f".{self.views[view][-1]}." if self.lora is not None else ""
        return {
            f"{part}.{key.replace(mark, '.') if mark else key}": p
            for part, module in self.modules.items()
            for key, p in module.named_parameters()
            if mark in key
        }

    @property
    def part_names(self) -> list[str]:
        """Return the names in train.parts that `modules` belong to, each once."""
        return list(dict.fromkeys(map(part_of, self.modules)))

    def by_part(self) -> dict[str, dict[str, nn.Parameter]]:
        """Return {"denoiser": {name: parameter}, "text_encoder": ..., and the heads}."""
        out: dict[str, dict[str, nn.Parameter]] = {}
        for name, weight in {**self.named(), **self._of_heads()}.items():
            component = name.partition(".")[0]
            part = component if component in self.heads else part_of(component)
            out.setdefault(part, {})[name] = weight
        return out

    def _of_heads(self) -> dict[str, nn.Parameter]:
        return {
            f"{name}.{key}": p
            for name, head in self.heads.items()
            for key, p in head.named_parameters()
        }

    def _whole(self) -> dict[str, nn.Parameter]:
        """Return the weights that have copies for other views: all but LoRA."""
        return {**(self.named() if self.lora is None else {}), **self._of_heads()}

    def freeze(self, on: bool = True) -> None:
        """Train none of the weights of `modules` (on), or train them again; heads always train."""
        self.frozen = False
        self.thaw(not on)
        self.frozen = on or not self.modules

    def thaw(self, on: bool) -> None:
        """Ask for gradients of the trained weights of `modules` (on), or for none; quantised
        weights never get one."""
        weights = [p for m in self.modules.values() for p in m.parameters()]
        for weight in weights if self.lora is None else self.named().values():
            weight.requires_grad_(on and not is_quantised(weight))

    def set_heads(self, made: Mapping[str, nn.Module] | None) -> None:
        """Train these heads in place of earlier ones; their present values are the view
        "reference". None: no heads."""
        for values in self.copies.values():
            for key in self._of_heads():
                values.pop(key, None)
        self.heads = dict(made or {})
        self._copy_missing("reference", self._of_heads())

    def head(self, name: str) -> nn.Module:
        """Return the head of this name; ValueError if there is none."""
        if name not in self.heads:
            raise ValueError(
                f"this policy has no head {name}; add it to train.parts, or train with a method"
                " that needs none"
            )
        return self.heads[name]

    def needs_lora(self) -> None:
        """ValueError if no LoRA is trained."""
        if self.lora is None or self.frozen:
            raise ValueError(
                "this policy has no LoRA adapter; load it with lora={'rank': ..., 'alpha': ...}"
            )

    # ---------------------------------------------------------------------------
    # LoRA, or fp32 weights

    def _add_adapter(self, view: str) -> None:
        if view == "default":
            self.targets = targets_of(self.modules, self.options["targets"])
            for module in self.modules.values():
                module.requires_grad_(False)
                save_merged(module)
                # a hook, because loop, replay and check call the network in different ways
                module.register_forward_pre_hook(self._refresh)
        self._inject_view(view, {part: self._config(part) for part in self.modules})
        if view == "default":
            name = self.views[view][0]
            ours = [layer for layer in self.standing if name in getattr(layer, "lora_A", ())]
            self.beneath = [
                m
                for layer in ours
                for came in self.standing[layer]
                for m in matrices([layer], came)
            ]

    def _inject_view(self, view: str, configs: Mapping[str, Any]) -> None:
        """Put adapters of a new view into components, by peft's config of each."""
        name = view
        while any(name in getattr(m, "peft_config", {}) for m in self.modules.values()):
            name += "_"  # the pipeline came with an adapter of that name
        # peft would make a new adapter with the layer's weights, which may wait in host memory
        device = None if view == "default" else next(iter(self.named().values())).device
        self.views[view] = (name,)
        for part, config in configs.items():
            module = self.modules[part]
            _inject(module, config, name)
            for layer in _layers(module):
                layer.set_adapter(self.views["default"][0])  # no gradient for other adapters
            for key, p in module.named_parameters():
                if f".{name}." in key:
                    # fp32 for any frozen dtype: small updates would round away
                    p.data = p.data.to(device, torch.float32)
        self.layers = [layer for m in self.modules.values() for layer in _layers(m)]
        self.matrices[view] = matrices(self.layers, name)
        self._activate(self.active)

    @torch.no_grad()
    def add_frozen(self, view: str, layers: Mapping[Place, tuple[Tensor, Tensor]]) -> None:
        """Add a view with an adapter that is never trained, in place of an earlier one of that
        name. layers: (component, layer) -> A (r, in) and B (out, r), with its scale; r may differ
        by layer, and layers that we do not train may be among them."""
        from peft import LoraConfig

        self.needs_lora()
        for (part, layer), (a, b) in layers.items():
            if part not in self.modules:
                raise ValueError(f"it changes layers of the {part}, which is not trained here")
            found = self.modules[part].get_submodule(layer)
            size = (found.out_features, found.in_features)
            if (len(b), a.shape[1]) != size:
                raise ValueError(f"{layer} is {len(b)} x {a.shape[1]} there and {size} here")
        for name in self.views.pop(view, ()):
            for layer in self.layers:
                layer.delete_adapter(name)
            for module in self.modules.values():
                module.peft_config.pop(name, None)
        configs = {}
        for part in dict.fromkeys(part for part, _ in layers):
            own = {layer: len(a) for (of, layer), (a, _) in layers.items() if of == part}
            rank = max(own.values())
            configs[part] = LoraConfig(r=rank, lora_alpha=rank, target_modules=[*own])
        self._inject_view(view, configs)
        weights = self.named(view)  # peft's B is 0, also in a layer whose name ends like another's
        for (part, layer), (a, b) in layers.items():
            down, up = (weights[f"{part}.{layer}.lora_{half}.weight"] for half in "AB")
            down[: len(a)], up[:, : len(a)] = a.to(down), b.to(up)

    def _refresh(self, *call: Any) -> None:
        """Before a forward, update the active view's bf16 copies from their masters."""
        view = "default" if self.frozen else self.active  # frozen adapters are never switched
        for matrix in (*self.matrices.get(view, ()), *self.beneath):
            if isinstance(matrix, Master):
                matrix.refresh()

    def _config(self, part: str) -> Any:
        """Make peft's LoraConfig of a component."""
        from peft import LoraConfig

        return LoraConfig(
            r=self.options["rank"],
            lora_alpha=self.options["alpha"],
            target_modules=self.targets[part],
            **{"init_lora_weights": self.options["init"], **self.options["peft"]},
        )

    @property
    def scale(self) -> float:
        """The factor of B A."""
        rank, rooted = self.options["rank"], self.options["peft"].get("use_rslora")
        return self.options["alpha"] / (math.sqrt(rank) if rooted else rank)

    def _widen(self) -> None:
        """Make the weights fp32 for full mode, since small updates of bf16 would round away.

        This happens when they are first asked for, so that a policy that only samples needs no
        more memory than after loading. A hook widens inputs of lower precision.
        """
        for part, module in self.modules.items():
            if any(is_quantised(p) for p in module.parameters()):
                raise ValueError(
                    f"the weights of the {part} are quantised, and cannot all be trained; use"
                    " train.mode=lora (lora={...} of load_policy)"
                )
            if _layers(module):
                raise ValueError(
                    f"the {part} has adapters ({', '.join(module.peft_config)}), and all weights"
                    " cannot be trained beside them; use train.mode=lora, which trains a LoRA on"
                    " top, or make them weights: pipe.fuse_lora(), pipe.unload_lora_weights()"
                )
        self.wide = True
        for module in self.modules.values():
            if any(p.dtype != torch.float32 for p in module.parameters()):
                module.float()
                module.register_forward_pre_hook(_widened, with_kwargs=True)

    # ---------------------------------------------------------------------------
    # views

    def has(self, view: str) -> bool:
        """Whether the weights of `modules` have an added view of this name, or need none."""
        return self.frozen or view in self._added()

    def _added(self) -> list[str]:
        """Names of the views that were added for the weights of `modules`."""
        if self.lora is not None:
            return [name for name in self.views if name not in ("default", "reference")]
        return [name for name, values in self.copies.items() if values.keys() - self._of_heads()]

    def add_view(self, name: str) -> None:
        """Add a second set of the trainable weights ("old"; in full mode also "reference"), copied
        from the current ones, for use with `view`."""
        if not self.frozen:
            usual = ("default", "reference") if self.lora is not None else ("default",)
            if name in (*usual, *self._added()):
                raise ValueError(f"view {name!r} exists; there are {['default', *self._added()]}")
            if self.lora is not None:
                self._add_adapter(name)
        self._copy_missing(name, self._whole())
        if self.lora is not None and not self.frozen:
            self.copy("default", name, 0.0)

    def _copy_missing(self, view: str, weights: Mapping[str, nn.Parameter]) -> None:
        """Copy the current values of these weights into a view, for those without a value there."""
        values = self.copies.setdefault(view, {})
        values |= {key: p.detach().clone() for key, p in weights.items() if key not in values}

    def tensors(self, view: str = "default") -> dict[str, Tensor]:
        """Return the values of a view by parameter name, sharing storage with it; only this
        process's shares, if the trained weights are split over processes."""
        added = view == "default" or self.has(view)
        values = self._values(view) if added else {}
        if not added or not values.keys() >= self._of_heads().keys():
            raise ValueError(
                f"no view {view!r}; there are {['default', *self._added()]}; make one with"
                f" policy.trainable.add_view({view!r})"
            )
        adapters = {} if self.lora is None else self.named(view)
        return {key: p.detach() for key, p in adapters.items()} | values

    def _values(self, view: str) -> dict[str, Tensor]:
        """Return a view's values of the weights that have copies; the active view's values are in
        the parameters, and the parameters' own are in its place."""
        weights = self._whole()
        if view == self.active:
            return {key: p.detach() for key, p in weights.items()}
        values = self.copies.get(self.active if view == "default" else view, {})
        return {key: values[key] for key in weights if key in values}

    def state(self, view: str = "default") -> dict[str, Tensor]:
        """Copy the values of a view to the CPU, by parameter name; if the trained weights are
        split, all processes ask together."""
        return {k: shares.whole(v).cpu().clone() for k, v in self.tensors(view).items()}

    def same(self, a: str, b: str) -> bool:
        """Whether two views of LoRA weights are equal bit for bit, so that one forward serves both
        (in full mode they are not compared: False). They are compared once for as long as neither
        is written."""
        if self.lora is None:
            return False
        now, known = (self._versions(a), self._versions(b)), self.compared.get((a, b))
        if known is None or known[0] != now:
            other = self.tensors(b)
            same = all(torch.equal(value, other[key]) for key, value in self.tensors(a).items())
            known = self.compared[a, b] = (now, same)
        return known[1]

    def _versions(self, view: str) -> list[Any]:
        adapters = [version(matrix.weight) for matrix in self.matrices.get(view, ())]
        return adapters + [version(value) for value in self._values(view).values()]

    @torch.no_grad()
    def copy(self, src: str = "default", dst: str = "old", decay: float = 0.0) -> None:
        """Set dst = decay * dst + (1 - decay) * src."""
        self._copy_missing(dst, self._of_heads())  # heads may be younger than the view
        source, target = self.tensors(src), self.tensors(dst)
        for key in target:
            value, new = shares.held(target[key]), shares.held(source[key])
            if decay == 0.0:
                value.copy_(new)
            else:
                value.lerp_(new.to(value), 1 - decay)

    @torch.no_grad()
    def load(self, view: str, state: Mapping[str, Tensor]) -> None:
        """Load a result of `state`; its names and shapes must be those of tensors(view)."""
        target = self.tensors(view)
        missing, extra = sorted(set(target) - set(state)), sorted(set(state) - set(target))
        if self.frozen and extra:
            raise ValueError(
                f"this policy's own weights are not trained, and the state has {_first(extra)};"
                " load it with the train.parts that it was made with"
            )
        networks = target.keys() - self._of_heads().keys()
        if missing and networks and not networks & state.keys():
            raise ValueError(
                "these weights belong to another model: none has a name that this one knows; they"
                f" are {_first(extra)}, and the model trains {_first(missing)}"
            )
        if missing or extra:
            raise ValueError(
                f"state of view {view!r} does not fit: {len(missing)} names missing {missing[:3]},"
                f" {len(extra)} unknown {extra[:3]}"
            )
        for key, value in target.items():
            if value.shape != state[key].shape:
                raise ValueError(
                    f"state of view {view!r}: {key} has shape {tuple(state[key].shape)}, and"
                    f" {tuple(value.shape)} is expected (another rank?)"
                )
            shares.held(value).copy_(shares.share_of(state[key], value))

    @contextlib.contextmanager
    def view(self, name: str) -> Iterator[None]:
        """Compute with another view's weights inside the block: "default", an added one, or
        "reference" (adapters off, heads with their first values). It sets one attribute in each
        layer; requires_grad is untouched."""
        before = self.active
        self._switch(name)
        try:
            yield
        finally:
            self._switch(before)

    def _switch(self, name: str) -> None:
        if name == self.active:
            return
        adapted = self.lora is not None and not self.frozen
        if adapted and name not in self.views:
            self.tensors(name)  # raises an error that names the views
        values = self.copies.get(name, {}).keys()
        lacking = (self.lora is None and not self.has(name)) or self._of_heads().keys() - values
        if name != "default" and lacking:
            raise ValueError(
                f"view {name!r} needs a copy of all weights in full mode; call"
                f" policy.trainable.add_view({name!r}) before training"
            )
        if adapted:
            self._activate(name)
        # the trained values are put back before others take their place
        for view in (self.active, name):
            if view != "default":
                self._exchange(view)
        self.active = name

    def _activate(self, view: str) -> None:
        """Switch every layer to the adapters with which it came, and a view's on top."""
        for layer in self.layers:
            on = [*self.standing.get(layer, ()), *self.views[view]]
            layer._active_adapter, layer._disable_adapters = on, not on

    def _exchange(self, view: str) -> None:
        """Swap values between the parameters and a view's copies; whole tensors swap pointers."""
        values = self.copies.get(view, {})
        for key, p in self._whole().items():
            # a block gathers a split weight from its storage, which must stay
            if shares.is_split(p):
                here, there = shares.held(p), shares.held(values[key])
                kept = here.clone()
                here.copy_(there)
                there.copy_(kept)
            else:
                p.data, values[key] = values[key], p.data


def part_of(component: str) -> str:
    """Return the name of a component in train.parts."""
    return TEXT if component.startswith(TEXT) else "denoiser"


def _first(names: list[str]) -> str:
    return f"{len(names)} weights, {names[0]} first" if names else "none"


def _widened(
    module: nn.Module, args: tuple, kwargs: dict[str, Any]
) -> tuple[tuple, dict[str, Any]]:
    """Widen the half-precision inputs of a call to fp32."""

    def wide(value: Tensor) -> Tensor:
        return value.float() if value.dtype in (torch.bfloat16, torch.float16) else value

    return map_tensors(wide, args), map_tensors(wide, kwargs)


def _inject(module: Any, config: Any, name: str) -> None:
    """Put an adapter into a network, through its own method if it has one."""
    from peft import inject_adapter_in_model

    with warnings.catch_warnings():
        # two adapters are intended
        warnings.filterwarnings("ignore", message="Already found a `peft_config`")
        silence()
        if hasattr(module, "add_adapter"):
            module.add_adapter(config, adapter_name=name)
        else:
            inject_adapter_in_model(config, module, adapter_name=name)
            module.peft_config = {**getattr(module, "peft_config", {}), name: config}


def adapter_of(module: nn.Module) -> str | None:
    """Return the name of the adapter that a policy trains in a network."""
    owners = (getattr(hook, "__self__", None) for hook in module._forward_pre_hooks.values())
    names = [owner.views["default"][0] for owner in owners if isinstance(owner, TrainedParts)]
    return next((name for name in names if name in getattr(module, "peft_config", {})), None)


def standing(modules: Iterable[nn.Module]) -> dict[Any, list[str]]:
    """Find the adapters that layers came with and that are switched on, by layer; ValueError if
    they are added to its weights, because a new one would have no effect there."""
    found = {layer: layer.active_adapters for m in modules for layer in _layers(m)}
    if any(layer.merged for layer in found):
        raise ValueError(
            "the pipeline has a LoRA fused into its weights whose layers are still there; call"
            " pipe.unload_lora_weights(), which keeps the fused weights, or pipe.unfuse_lora()"
        )
    return {
        layer: [name for name in on if name in layer._get_available_adapters()]
        for layer, on in found.items()
        if not layer.disable_adapters
    }


def _layers(module: nn.Module) -> list[Any]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [m for m in module.modules() if isinstance(m, BaseTunerLayer)]
