"""Passes of fixed shapes, captured once and replayed; knows nothing of what they compute.

A shape without a graph is not an error: its pass runs as it would have without graphs, and is counted. Worker thread
only; a graph's outputs hold until the next replay of any graph, so whoever replays copies them first.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

Outputs = tuple[Tensor, ...]
Run = Callable[[], Outputs]
NUM_WARM_RUNS = 3  # kernels choose their parameters in the first ones, which capture forbids


class Recording(Protocol):
    """A captured pass."""

    outputs: Outputs

    def replay(self) -> None:
        """Run it again on what its input buffers hold now."""
        ...


class Capturer(Protocol):
    """Who captures: CUDA, or a stand-in that shows what would go wrong there."""

    def capture(self, run: Run) -> Recording:
        """Warm up, then record. Raises whatever the pass or the capture raises."""
        ...

    def used_bytes(self) -> int:
        """Memory that is not free on the device, graphs' included."""
        ...


class CudaRecording:
    def __init__(self, graph: torch.cuda.CUDAGraph, outputs: Outputs) -> None:
        self._graph, self.outputs = graph, outputs

    def replay(self) -> None:
        self._graph.replay()


class CudaCapturer:
    """All graphs share one pool, which is safe because they are replayed one after the other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def capture(self, run: Run) -> Recording:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for _ in range(NUM_WARM_RUNS):
                run()
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            outputs = run()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return CudaRecording(graph, outputs)

    def used_bytes(self) -> int:
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free


Shape = TypeVar("Shape", bound=Hashable)
Buffers = TypeVar("Buffers")


@dataclass(frozen=True, slots=True)
class Work(Generic[Buffers]):
    """One shape's pass: `run` computes from `buffers`, which are written before each replay."""

    buffers: Buffers
    run: Run


@dataclass(frozen=True, slots=True)
class Graph(Generic[Buffers]):
    buffers: Buffers
    recording: Recording

    def replay(self) -> Outputs:
        self.recording.replay()
        return self.recording.outputs


@dataclass(slots=True)
class Graphs(Generic[Shape, Buffers]):
    """The shapes that are captured, those that are to be, and what became of the others."""

    backend: Capturer
    make: Callable[[Shape], Work[Buffers]]  # with buffers that hold something the pass can compute on
    tolerance: float  # of a graph's outputs from the same pass run plainly, over the largest of them
    max_bytes: int
    waiting: list[Shape] = field(default_factory=list)  # in the order in which they will be captured
    ready: dict[Shape, Graph[Buffers]] = field(default_factory=dict)
    failed: dict[Shape, str] = field(default_factory=dict)  # shape -> why it runs plainly
    num_bytes: int = 0
    num_replays: int = 0
    num_plain: int = 0  # passes that had no graph
    seconds: float = 0.0  # spent capturing

    def capture_next(self) -> bool:
        """Capture one shape, unless none waits. Returns whether more wait. Never raises for what a capture does."""
        if not self.waiting:
            return False
        shape = self.waiting.pop(0)
        started, before = time.monotonic(), self.backend.used_bytes()
        try:
            if self.num_bytes >= self.max_bytes:
                raise MemoryError("the graphs have used the memory they may use")
            self.ready[shape] = self._capture(self.make(shape))
        except Exception as err:  # whatever it is, this shape runs plainly from now on
            self.failed[shape] = f"{type(err).__name__}: {str(err).splitlines()[0][:200] if str(err) else ''}"
            logger.warning("no graph for %s: %s", shape, self.failed[shape])
            if isinstance(err, (torch.OutOfMemoryError, MemoryError)):
                self.failed |= dict.fromkeys(self.waiting, "no memory is left for graphs")
                self.waiting.clear()
        self.num_bytes += max(0, self.backend.used_bytes() - before)
        self.seconds += time.monotonic() - started
        return bool(self.waiting)

    def _capture(self, work: Work[Buffers]) -> Graph[Buffers]:
        plain = tuple(output.clone() for output in work.run())
        recording = self.backend.capture(work.run)
        recording.replay()
        for mine, theirs in zip(recording.outputs, plain, strict=True):
            if not is_close(mine, theirs, self.tolerance):
                raise ValueError("the graph's result differs from that of the same pass run plainly")
        return Graph(work.buffers, recording)

    def find(self, shape: Shape) -> Graph[Buffers] | None:
        """Its graph, or None, and it is counted which."""
        graph = self.ready.get(shape)
        if graph is None:
            self.num_plain += 1
        else:
            self.num_replays += 1
        return graph

    def describe(self) -> dict[str, object]:
        return {
            "captured": len(self.ready),
            "waiting": len(self.waiting),
            "failed": len(self.failed),
            "bytes": self.num_bytes,
            "capture_s": round(self.seconds, 3),
            "replays": self.num_replays,
            "plain": self.num_plain,
        }


def is_close(mine: Tensor, theirs: Tensor, tolerance: float) -> bool:
    """Whether they differ by at most tolerance times the largest of theirs; not where anything is not a number."""
    if mine.dtype == torch.bool:
        return torch.equal(mine, theirs)
    difference = (mine.double() - theirs.double()).abs().max()
    return bool(difference <= tolerance * theirs.double().abs().max())


def largest_first(shapes: Sequence[Shape], size: Callable[[Shape], int]) -> list[Shape]:
    """The order of capture: what a large graph has given back to the pool, smaller ones reuse."""
    return sorted(shapes, key=size, reverse=True)
