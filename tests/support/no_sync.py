"""A check that no value of a tensor is read on the host while a pass runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.fake_graphs import READS_ON_THE_HOST


class NoSync(TorchDispatchMode):
    """Fails on every operation that reads a value on the host or whose shape depends on one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket.__name__ not in READS_ON_THE_HOST, func
        return func(*args, **(kwargs or {}))


@contextmanager
def no_sync(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a tensor's value was read on the host")

    with monkeypatch.context() as patch, NoSync():
        for name in ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "__len__"):
            patch.setattr(Tensor, name, refuse)
        yield
