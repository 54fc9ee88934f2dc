"""How many bytes of tensors are alive, on devices without a counter of their own.

It knows torch's operations. It does not know models. Read `specnb.measure.memory` beside it, which predicts the number.
"""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of living tensors, for devices that do not count them themselves.

    It is a context manager and counts the tensors that operations make while it lasts. It does not see what was there
    before, nor memory that an operation uses inside and gives back.

    Attributes
    ----------
    now, peak : int
        `peak` may be set to `now`, to begin again.

    Examples
    --------
    >>> with LiveBytes() as live:
    ...     kept = [torch.ones(1000) * 2]
    >>> live.now, live.peak  # the ones were let go
    (4000, 8000)
    """

    def __init__(self):
        super().__init__()
        self.now, self.peak, self._alive = 0, 0, set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self._alive:
                storage = tensor.untyped_storage()
                self._alive.add(storage._cdata)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        return made

    def _gone(self, key, nbytes):
        self._alive.discard(key)
        self.now -= nbytes
