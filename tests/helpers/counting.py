"""Which operators ran: a dispatch mode that counts them and the types of what they read."""

from collections import Counter

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Operators(TorchDispatchMode):
    """count["equal"] = how often; types["mm"] = the dtypes of its tensors."""

    def __init__(self):
        super().__init__()
        self.count, self.types = Counter(), {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.count[name] += 1
        seen = {str(t.dtype).removeprefix("torch.") for t in tree_leaves(args) if type(t) is Tensor}
        self.types.setdefault(name, set()).update(seen)
        return func(*args, **(kwargs or {}))
