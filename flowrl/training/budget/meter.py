"""Books the cost of operators on tensors of the meta device: FLOPs, bytes, seconds of a device, and
the storages that live at the same time.

Meta tensors have shapes and no values, so that the forward and backward of a network of any size
run in a second or two. A storage is counted from the operator that makes it until its last tensor
is freed, as torch's profiler counts allocations; allocations inside an operator are not seen. On
tensors of a real device the same books are the real costs of a run.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from flowrl.runtime.ledger import formula_of
from flowrl.training.budget.roofline import Device

FREE = ("empty", "new_empty", "empty_like", "empty_strided", "_unsafe_view", "is_same_size")
NORMS = ("native_layer_norm", "native_group_norm", "_softmax", "_fused_rms_norm", "batch_norm")
FUNCTIONS = ("gelu", "silu", "exp", "sigmoid", "tanh", "log", "erf", "sin", "cos", "pow")
RANDOM = ("normal_", "randn", "rand", "uniform_")
POINTWISE = ("", "norm", "function", "random")  # kinds of operators that a compiler fuses
LOW = (torch.bfloat16, torch.float16)
ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@dataclass(frozen=True, slots=True)
class Operator:
    """The effect of an operator on memory and time."""

    makes: bool  # whether its results are storages of their own
    costs: bool  # whether it does more than view memory in another way
    kind: str  # kind whose rate of the device it has; "": pointwise
    formula: Any  # torch's formula of its FLOPs; None: it has none


class Meter(TorchDispatchMode):
    """A mode in which every operator is booked. device: gives seconds; None: books no seconds."""

    def __init__(self, device: Device | None = None) -> None:
        super().__init__()
        self.device = device
        self.known: dict[Any, Operator] = {}
        self.sizes: dict[int, int] = {}  # id of a living storage -> bytes
        self.live = self.peak = 0
        self.flops = self.bytes = 0.0
        self.operators = 0
        self.by_kind: dict[str, float] = {}  # kind of operator -> seconds of the device

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Skip torch's guard against compiling inside: it would cost as much as the books."""
        return False

    def reset_peak(self) -> int:
        """Start a new peak -> the highest bytes since the last one."""
        highest, self.peak = self.peak, self.live
        return highest

    def hold(self, tensor: Tensor) -> None:
        """Count the storage of a tensor, once."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.sizes:
            return
        self.sizes[key] = size = storage.nbytes()
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._let_go, key)

    def _let_go(self, key: int) -> None:
        self.live -= self.sizes.pop(key, 0)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        made = tensors_of(out)
        known = self.known.get(func) or self._know(func)
        if known.makes:
            for tensor in made:
                self.hold(tensor)
        if known.costs:
            self._book(known, args, kwargs, out, made)
        return out

    def _know(self, func: Any) -> Operator:
        """Find out what an operator is, and remember it."""
        name = str(func).removeprefix("aten.").split(".")[0]
        infos = [r.alias_info for r in func._schema.returns if r.alias_info is not None]
        view = any(not info.is_write for info in infos)
        kind = ""
        if name in ("mm", "addmm", "bmm", "baddbmm"):
            kind = "gemm"
        elif "attention" in name:
            kind = "attention_backward" if "backward" in name else "attention"
        elif name.startswith("convolution"):
            kind = "convolution"
        elif name.startswith(NORMS) or name.removesuffix("_backward_data") in NORMS:
            kind = "norm"
        elif name.removesuffix("_backward").rstrip("_") in FUNCTIONS:
            kind = "function"
        elif name in RANDOM:
            kind = "random"
        found = Operator(not infos, not (view or name in FREE), kind, formula_of(func))
        self.known[func] = found
        return found

    def _book(
        self, known: Operator, args: tuple, kwargs: dict, out: Any, made: list[Tensor]
    ) -> None:
        tensors = tensors_of(args, kwargs.values())
        nbytes = sum(map(bytes_of, (*tensors, *made)))
        flops = float(known.formula(*args, **kwargs, out_val=out)) if known.formula else 0.0
        kind = known.kind
        if flops and self.device and self.device.cuda and tensors[0].dtype not in LOW:
            kind = kind.removesuffix("_backward") + "_fp32"
        self.flops += flops
        self.bytes += nbytes
        self.operators += 1
        if self.device is not None:
            seconds = self.device.seconds(kind, flops, nbytes)
            self.by_kind[kind] = self.by_kind.get(kind, 0.0) + seconds


def bytes_of(tensor: Tensor) -> int:
    """Count the bytes that reading a tensor moves: an expanded one is read once."""
    whole = tensor.numel() * tensor.element_size()
    return whole if tensor.is_contiguous() else min(whole, tensor.untyped_storage().nbytes())


def tensors_of(*values: Any) -> list[Tensor]:
    """Find the tensors among arguments, and in lists and tuples of them; torch's own walk of trees
    would take half of the time of a rehearsal."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif value is not None and not isinstance(value, int | float | str | torch.dtype):
            found += tensors_of(*value) if isinstance(value, Iterable) else []
    return found


class Attention(TorchFunctionMode):
    """A mode in which attention is one fused operator on meta tensors, too, and networks run as
    under torch.autocast to `low`, of a GPU or a CPU. keep: a trained weight is cast once and kept,
    as autocast does in a forward; a backward runs outside of autocast."""

    def __init__(
        self, low: torch.dtype | None = None, *, cuda: bool = True, keep: bool = True
    ) -> None:
        super().__init__()
        self.low, self.keep = low, keep
        self.raised = RAISED if cuda else set()
        # id of a trained weight -> its copy in the low precision
        self.weights: dict[int, Tensor] = {}

    def __exit__(self, *error: Any) -> None:
        self.weights.clear()
        super().__exit__(*error)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return fused_attention(*self._cast(args), **self._cast(kwargs))
        if self.low is not None and func in LOWERED:
            return func(*self._cast(args), **self._cast(kwargs))
        if self.low is not None and func in self.raised:
            raised = [a.float() if isinstance(a, Tensor) and a.dtype in LOW else a for a in args]
            return func(*raised, **kwargs)
        return func(*args, **kwargs)

    def _cast(self, given: Any) -> Any:
        """Cast arguments to the low precision, if there is one."""
        if self.low is None:
            return given
        if isinstance(given, dict):
            return {key: self._cast_one(value) for key, value in given.items()}
        return tuple(map(self._cast_one, given))

    def _cast_one(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        trained = value.is_leaf and value.requires_grad and value.dtype != self.low
        if not (trained and self.keep):
            return value.to(self.low)
        if id(value) not in self.weights:
            # the cast needs a graph, even if the first branch that uses it has no gradient
            with torch.enable_grad():
                self.weights[id(value)] = value.to(self.low)
        return self.weights[id(value)]


LOWERED: set[Callable[..., Any]] = {
    F.linear,
    F.conv1d,
    F.conv2d,
    F.conv3d,
    torch.matmul,
    torch.mm,
    torch.bmm,
    torch.addmm,
    torch.baddbmm,
    torch.Tensor.matmul,
    torch.Tensor.__matmul__,
}
RAISED: set[Callable[..., Any]] = {
    F.layer_norm,
    F.group_norm,
    F.softmax,
    F.softplus,
    torch.layer_norm,
    torch.softmax,
    torch.rsqrt,
    torch.pow,
    torch.exp,
    torch.sum,
    torch.Tensor.pow,
    torch.Tensor.rsqrt,
    torch.Tensor.sum,
    torch.Tensor.__pow__,
}


def fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute F.scaled_dot_product_attention as one operator, (..., L, d): the CPU's flash
    attention, whose shapes, strides and formula of FLOPs are those of the GPU's."""
    if enable_gqa:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = (t.repeat_interleave(repeats, -3) for t in (key, value))
    lead = query.shape[:-3]
    q, k, v = (t if t.ndim == 4 else t.reshape(-1, *t.shape[-3:]) for t in (query, key, value))
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        attn_mask = attn_mask.to(q.dtype)
    out = ATTENTION(q, k, v, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]
    return out if query.ndim == 4 else out.reshape(*lead, *out.shape[1:])
