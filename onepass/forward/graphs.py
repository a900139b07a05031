"""Passes of fixed shapes that are captured once and replayed. It knows nothing of what they compute.

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

from onepass.status import GraphsStatus

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
    """Captures passes: CUDA does, or a stand-in that shows what would go wrong there."""

    def capture(self, run: Run) -> Recording:
        """Warm up, then record. Raises whatever the pass or the capture raises."""
        ...

    def used_bytes(self) -> int:
        """The device's memory that is not free, with that of the graphs."""
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


def make_capturer(device: torch.device) -> Capturer | None:
    """What captures on this device, or None where nothing does."""
    return CudaCapturer(device) if device.type == "cuda" else None


@dataclass(slots=True)
class GraphMemory:
    """The memory that all graphs of a process may take together."""

    max_bytes: int
    num_bytes: int = 0  # taken so far

    @property
    def is_used_up(self) -> bool:
        return self.num_bytes >= self.max_bytes

    def refuse_more(self) -> None:
        """Let no more graphs be captured, since the device has no memory for them."""
        self.max_bytes = min(self.max_bytes, self.num_bytes)


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
    """The shapes that are captured, the shapes that will be, and why the others are not."""

    capturer: Capturer
    make: Callable[[Shape], Work[Buffers]]  # its buffers hold something that the pass can compute on
    tolerance: float  # how far a graph's outputs may be from those of a plain run, as a share of the largest
    memory: GraphMemory
    waiting: list[Shape] = field(default_factory=list)  # in the order in which they will be captured
    ready: dict[Shape, Graph[Buffers]] = field(default_factory=dict)
    failed: dict[Shape, str] = field(default_factory=dict)  # shape -> why it runs plainly
    num_bytes: int = 0  # that these graphs have taken of the memory
    num_replays: int = 0
    num_plain: int = 0  # passes that had no graph
    seconds: float = 0.0  # spent capturing

    def capture_next(self) -> bool:
        """Capture one shape, unless none waits. Returns whether more wait. A capture that fails raises nothing."""
        if not self.waiting:
            return False
        shape = self.waiting.pop(0)
        started, before = time.monotonic(), self.capturer.used_bytes()
        try:
            if self.memory.is_used_up:
                raise MemoryError("the graphs have used the memory they may use")
            self.ready[shape] = self._capture(self.make(shape))
        except Exception as err:  # whatever it is, passes of this shape run plainly from now on
            self.failed[shape] = f"{type(err).__name__}: {str(err).splitlines()[0][:200] if str(err) else ''}"
            logger.warning("no graph for %s: %s", shape, self.failed[shape])
            if isinstance(err, (torch.OutOfMemoryError, MemoryError)):
                self.failed |= dict.fromkeys(self.waiting, "no memory is left for graphs")
                self.waiting.clear()
                self.memory.refuse_more()
        taken = max(0, self.capturer.used_bytes() - before)
        self.num_bytes += taken
        self.memory.num_bytes += taken
        self.seconds += time.monotonic() - started
        return bool(self.waiting)

    def _capture(self, work: Work[Buffers]) -> Graph[Buffers]:
        plain = tuple(output.clone() for output in work.run())
        recording = self.capturer.capture(work.run)
        recording.replay()
        for mine, theirs in zip(recording.outputs, plain, strict=True):
            if not is_close(mine, theirs, self.tolerance):
                raise ValueError("the graph's result differs from that of the same pass run plainly")
        return Graph(work.buffers, recording)

    def find(self, shape: Shape | None) -> Graph[Buffers] | None:
        """The graph for a pass of this shape, or None; both are counted. A pass that no graph can run has no shape."""
        graph = None if shape is None else self.ready.get(shape)
        if graph is None:
            self.num_plain += 1
        else:
            self.num_replays += 1
        return graph

    def reset_counts(self) -> None:
        """Count passes from zero; the graphs stay."""
        self.num_replays = self.num_plain = 0

    def describe(self) -> GraphsStatus:
        return GraphsStatus(
            captured=len(self.ready),
            waiting=len(self.waiting),
            failed=len(self.failed),
            bytes=self.num_bytes,
            capture_s=round(self.seconds, 3),
            replays=self.num_replays,
            plain=self.num_plain,
        )


def is_close(mine: Tensor, theirs: Tensor, tolerance: float) -> bool:
    """Whether the two differ by at most `tolerance` times the largest of `theirs`. A NaN is close to nothing."""
    if mine.dtype == torch.bool:
        return torch.equal(mine, theirs)
    difference = (mine.double() - theirs.double()).abs().max()
    return bool(difference <= tolerance * theirs.double().abs().max())


def largest_first(shapes: Sequence[Shape], size: Callable[[Shape], int]) -> list[Shape]:
    """The order of capture: smaller graphs reuse the memory that a larger one has given back to the pool."""
    return sorted(shapes, key=size, reverse=True)
