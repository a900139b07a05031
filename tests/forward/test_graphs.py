"""Captured passes: what they give, what happens when a capture fails, and that nothing reads an overwritten output."""

from __future__ import annotations

import gc
import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import Engine
from onepass.config import Config
from onepass.forward.buckets import CUDA_BUCKETS, Buckets, Shape, graph_shapes, in_order_of_capture
from onepass.forward.graphs import GraphMemory, Graphs, Work, largest_first
from onepass.forward.heads import LabelHead, PointerHead
from onepass.loading import Loaded, load
from onepass.wire.schema import parse_request
from tests.support.checkpoints import STARTER
from tests.support.fake_graphs import CaptureMode, FakeCapturer
from tests.support.precision import are_alike, in_dtype
from tests.support.prompt_rows import about, rows_of

LADDER = Buckets(
    rows=(1, 2, 4), widths=(32, 64, 128), suffix_widths=(16, 64), pasts=(64, 256), reads=16, scores=16
)  # small: a capture here is three passes
MAX_TOKENS, MAX_ROWS = 256, 4  # of one pass
SHAPES = graph_shapes(LADDER, MAX_TOKENS, MAX_ROWS, longest=4096)  # as long as a row of the starter may be


def start(capturer: FakeCapturer, buckets: Buckets = LADDER, **settings: Any) -> Loaded:
    """The starter, or another model, loaded by the start that captures graphs, on a stand-in for CUDA."""
    limits: dict[str, Any] = {"max_batch_tokens": MAX_TOKENS, "max_batch_rows": MAX_ROWS}
    config = Config(**{"backend": "fast", "images": False, **limits, **settings})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine.__init__, "__defaults__", (lambda _: capturer, buckets))
        return load(in_dtype(config))


def graphs_of(loaded: Loaded) -> Graphs[Shape, Any]:
    engine: Any = loaded.engine
    graphs: Graphs[Shape, Any] = engine._backend.graphs
    return graphs


def capture_all(loaded: Loaded) -> Graphs[Shape, Any]:
    while loaded.engine.idle():
        pass
    return graphs_of(loaded)


@pytest.fixture(scope="module")
def captured() -> Loaded:
    loaded = start(FakeCapturer())
    assert not graphs_of(loaded).failed
    return loaded


def test_the_start_captures_every_shape_before_it_is_ready(captured: Loaded) -> None:
    graphs = graphs_of(captured)
    assert (set(graphs.ready), graphs.waiting) == (set(SHAPES), [])
    assert captured.engine.describe().graphs.captured == len(SHAPES)


def test_a_fast_start_captures_the_common_shapes_and_leaves_the_rest_for_idle_moments() -> None:
    buckets = Buckets(rows=(1, 2), widths=(64, 600), suffix_widths=(16,), pasts=(64, 600), reads=16, scores=16)
    loaded = start(FakeCapturer(), buckets, fast_start=True, max_batch_tokens=1200)
    graphs = graphs_of(loaded)
    assert graphs.ready
    assert all(shape.is_common for shape in graphs.ready)
    assert graphs.waiting
    assert not any(shape.is_common for shape in graphs.waiting)
    num_waiting = len(graphs.waiting)
    assert loaded.engine.idle()
    assert len(graphs.waiting) == num_waiting - 1
    capture_all(loaded)
    assert (graphs.waiting, graphs.failed) == ([], {})


def test_without_memory_for_graphs_none_is_captured() -> None:
    capturer = FakeCapturer()
    loaded = start(capturer, graph_memory_mb=0)
    assert (capturer.num_captures, loaded.engine.describe().graphs) == (0, None)


def test_the_vision_tower_gets_the_memory_that_the_other_graphs_leave(
    vision_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onepass.forward.load.PICTURE_BUCKETS", Buckets(rows=(1,), widths=(16, 64)))
    for more, num_captured in ((2, 2), (1, 1), (0, 0)):
        capturer = FakeCapturer(bytes_each=1 << 20)
        shapes = graph_shapes(LADDER, MAX_TOKENS, MAX_ROWS, longest=1024)
        settings = {"model": str(vision_checkpoint), "images": True, "graph_memory_mb": len(shapes) + more}
        loaded = start(capturer, **settings)
        engine: Any = loaded.engine
        assert len(graphs_of(loaded).ready) == len(shapes)
        assert len(engine.tower.graphs.ready) == num_captured


@pytest.fixture(scope="module")
def plain() -> Loaded:
    return load(in_dtype(Config(backend="fast", share_state=False)))


def test_every_kind_of_pass_is_captured(captured: Loaded) -> None:
    graphs = capture_all(captured)
    assert {shape.kind for shape in graphs.ready} == {"whole", "begin", "continue"}
    assert Shape("whole", 2, 128) in graphs.ready
    assert Shape("whole", 4, 128) not in graphs.ready  # 512 tokens, above the budget of 256


def test_rows_of_any_kind_score_as_without_graphs(captured: Loaded, plain: Loaded) -> None:
    graphs = capture_all(captured)
    rows = rows_of(plain, seed=3) + [row for seed in range(3) for row in about(plain, 60, seed=seed, count=4)]
    random.Random(0).shuffle(rows)
    before = graphs.num_replays
    for start in range(0, len(rows), 7):
        part = rows[start : start + 7]
        assert are_alike(captured.engine.forward(part), plain.engine.forward(part))
    assert graphs.num_replays - before > 5


def test_states_of_different_lengths_share_one_replay(captured: Loaded, plain: Loaded) -> None:
    rows = [about(plain, words, seed=words, count=1)[0] for words in (40, 55, 70)]
    graphs = capture_all(captured)
    captured.engine.forward(rows)  # the states are in the cache now
    before = graphs.num_replays
    again = captured.engine.forward(rows)
    assert graphs.num_replays - before == 1
    assert are_alike(again, plain.engine.forward(rows))


def test_states_do_not_change_when_the_buffers_do(captured: Loaded) -> None:
    """What is cached was copied: neither replays nor other rows in the shared buffers change it."""
    rows = about(captured, 60, seed=11, count=1)
    first = captured.engine.forward(rows)
    for seed in range(12, 16):
        captured.engine.forward(about(captured, 50, seed=seed, count=3))
    assert captured.engine.forward(rows) == first


def test_a_shape_without_a_graph_runs_plainly_and_is_counted(captured: Loaded, plain: Loaded) -> None:
    graphs = capture_all(captured)
    long, many = about(plain, 400, count=1), {str(n): None for n in range(40)}
    body = {"state": "x", "questions": {"q": {"type": "choice", "instructions": "?", "criteria": many}}}
    for rows in (long, plain.prompter.render(parse_request(json.dumps(body).encode()))):
        before = graphs.num_plain
        assert are_alike(captured.engine.forward(rows), plain.engine.forward(rows))
        assert graphs.num_plain > before


@pytest.mark.parametrize(
    "error", [RuntimeError("operation not permitted when stream is capturing"), ValueError("any other")]
)
def test_a_failed_capture_leaves_its_shape_plain_and_the_others_captured(error: Exception, plain: Loaded) -> None:
    loaded = start(FakeCapturer(fail_on=lambda number: error if number % 3 == 0 else None))
    graphs = graphs_of(loaded)
    assert graphs.failed
    assert graphs.ready
    rows = rows_of(plain, seed=5, count=4) + about(plain, 60, count=4)
    assert are_alike(loaded.engine.forward(rows), plain.engine.forward(rows))


def test_without_memory_for_more_the_rest_is_not_tried(plain: Loaded) -> None:
    error = torch.OutOfMemoryError("CUDA out of memory")
    backend = FakeCapturer(fail_on=lambda number: error if number == 4 else None)
    graphs = graphs_of(start(backend))
    assert len(graphs.ready) == 4
    assert backend.num_captures == 5


def test_graphs_stay_within_their_memory() -> None:
    graphs = graphs_of(start(FakeCapturer(bytes_each=300 << 10), graph_memory_mb=1))
    assert len(graphs.ready) == 4  # the fourth passes the limit, and is the last
    assert graphs.num_bytes == 1200 << 10
    assert graphs.describe().failed == len(graphs.failed) > 0


def test_a_graph_that_computes_something_else_is_not_used() -> None:
    """A capture that misses part of the pass replays stale results: the self-check must see it."""
    buffer = torch.zeros(3)
    calls = iter(range(100))
    graphs: Graphs[str, Any] = Graphs(
        FakeCapturer(), lambda _: Work(buffer, lambda: (buffer + next(calls),)), 1e-3, GraphMemory(1), ["shape"]
    )
    assert not graphs.capture_next()
    assert not graphs.ready
    assert "differs" in graphs.failed["shape"]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_graph_that_gives_no_numbers_is_not_used(value: float) -> None:
    graphs: Graphs[str, Any] = Graphs(
        FakeCapturer(), lambda _: Work(None, lambda: (torch.full((3,), value),)), 1e-3, GraphMemory(1), ["shape"]
    )
    graphs.capture_next()
    assert not graphs.ready


def test_an_output_kept_past_the_next_replay_is_poison() -> None:
    """The stand-in does what it is for."""
    graphs: Graphs[str, Any] = Graphs(
        FakeCapturer(),
        lambda shape: Work(None, lambda: (torch.full((2,), float(len(shape))),)),
        1e-3,
        GraphMemory(1 << 20),
        ["a", "bb"],
    )
    while graphs.capture_next():
        pass
    first = graphs.ready["a"].replay()[0]
    assert first.tolist() == [1, 1]
    graphs.ready["bb"].replay()
    assert first.isnan().all()


def test_the_common_shapes_come_first_and_then_the_largest() -> None:
    waiting = in_order_of_capture(graph_shapes(CUDA_BUCKETS, 1 << 14, 32, 4096))
    assert [shape.is_common for shape in waiting] == sorted((shape.is_common for shape in waiting), reverse=True)
    for part in (True, False):
        sizes = [shape.num_tokens for shape in waiting if shape.is_common is part]
        assert sizes == sorted(sizes, reverse=True)
    assert largest_first([1, 3, 2], lambda n: n) == [3, 2, 1]


@pytest.fixture(params=["pointer", "labels"])
def head(request: pytest.FixtureRequest) -> PointerHead | LabelHead:
    torch.manual_seed(0)
    if request.param == "pointer":
        return PointerHead(torch.randn(5, 16), torch.randn(5, 16))
    return LabelHead(torch.randn(30, 16), torch.randn(30), 0.5, 3.0)


def test_scores_read_nothing_on_the_host_and_keep_no_tensor(head: PointerHead | LabelHead) -> None:
    states, places = torch.randn(2, 7, 16), torch.randint(0, 7, (2, 9))
    head.scores(states, places, places)
    before = storages()
    with CaptureMode():
        scores = head.scores(states, places, places)
    assert storages() - before == {scores.untyped_storage().data_ptr()}
    for b, s in ((0, 0), (1, 8)):
        alone = head.scores(states[b : b + 1], places[b : b + 1, s : s + 1], places[b : b + 1, s : s + 1])
        assert scores[b, s].item() == pytest.approx(alone.item(), abs=1e-5)


def storages() -> set[int]:
    """The memory of all tensors there are."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    return {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.layout == torch.strided}


@pytest.mark.parametrize("shape", [Shape("whole", 2, 64), Shape("begin", 2, 64), Shape("continue", 2, 16, 64)])
def test_a_pass_leaves_nothing_but_its_outputs(captured: Loaded, shape: Shape) -> None:
    """What a pass allocated and kept would stay in the graphs' pool, and be overwritten by other graphs."""
    engine: Any = captured.engine
    work = engine._backend._work(shape)
    work.run()
    before = storages()
    with CaptureMode():
        outputs = work.run()
    assert storages() - before == {output.untyped_storage().data_ptr() for output in outputs}


def test_the_shapes_are_those_that_batches_can_have() -> None:
    shapes = graph_shapes(LADDER, max_tokens=128, max_rows=2, longest=100)
    assert set(shapes) == {
        *(Shape(kind, rows, width) for kind in ("whole", "begin") for rows in (1, 2) for width in (32, 64)),
        *(Shape("continue", rows, width, 64) for rows in (1, 2) for width in (16, 64)),
    }


def test_a_slow_capture_delays_no_request_by_more_than_itself() -> None:
    """`--fast-start`: the rest is captured one by one while nothing waits, and a request goes first."""
    from onepass.decider import Decider

    backend = FakeCapturer(seconds_each=0.05)
    buckets = Buckets(rows=(1,), widths=(64, *range(600, 800, 20)), suffix_widths=(16,), pasts=(64,), reads=8, scores=8)
    decider = Decider(Config(model=str(STARTER)), load=lambda _: start(backend, buckets, fast_start=True))
    decider.start()
    decider.wait_ready(60)
    body = json.dumps({"state": "x", "questions": {"q": {"type": "noul", "instructions": "?"}}}).encode()
    seen = []
    for _ in range(4):
        decider.decide(body)
        seen.append(backend.num_captures)
    decider.drain(60)
    decider.close()  # a capture must not outlive the test
    assert all(later - earlier <= 2 for earlier, later in pairwise(seen))
    assert seen[-1] < len(graph_shapes(buckets, MAX_TOKENS, MAX_ROWS, longest=4096))
