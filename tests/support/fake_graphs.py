"""A stand-in for CUDA graphs that runs on the CPU and shows what would go wrong there.

A replay runs the captured pass again on the same buffers and writes its results into the outputs of the capture, as a
graph does. All graphs share one pool, so a replay of one may overwrite the outputs of the others: here it poisons
them. What a real capture forbids (values read on the host, kernels that choose their parameters) fails here too.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from onepass.forward.graphs import Outputs, Run

READS_ON_THE_HOST = frozenset(
    ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal", "is_nonzero", "bincount")
)


class CaptureMode(TorchDispatchMode):
    """Fails on every operation that reads a value on the host or whose shape depends on one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in READS_ON_THE_HOST:
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        return func(*args, **(kwargs or {}))


@dataclass
class FakeRecording:
    run: Run
    outputs: Outputs
    pool: list[FakeRecording]
    num_replays: int = 0

    def replay(self) -> None:
        for other in self.pool:
            for output in other.outputs:
                poison(output)
        for output, result in zip(self.outputs, self.run(), strict=True):
            output.copy_(result)
        self.num_replays += 1


def poison(output: Tensor) -> None:
    output.fill_(torch.nan if output.is_floating_point() else 1)


@dataclass
class FakeCapturer:
    """`fail_on` may raise for the n-th capture; each takes `bytes_each` of memory and `seconds_each`."""

    bytes_each: int = 1000
    seconds_each: float = 0.0
    fail_on: Callable[[int], Exception | None] = lambda _: None
    recordings: list[FakeRecording] = field(default_factory=list)
    num_captures: int = 0
    num_bytes: int = 0

    def capture(self, run: Run) -> FakeRecording:
        number, self.num_captures = self.num_captures, self.num_captures + 1
        time.sleep(self.seconds_each)
        error = self.fail_on(number)
        if error is not None:
            raise error
        with CaptureMode():
            outputs = tuple(output.clone() for output in run())
        recording = FakeRecording(run, outputs, self.recordings)
        self.recordings.append(recording)
        self.num_bytes += self.bytes_each
        return recording

    def used_bytes(self) -> int:
        return self.num_bytes
