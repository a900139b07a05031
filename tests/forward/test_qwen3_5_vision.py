"""The vision tower and M-RoPE against transformers' own, and whole decisions about pictures against its whole model."""

from __future__ import annotations

import base64
import io
import json
import random
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor
from transformers import AutoTokenizer, Qwen3_5ForConditionalGeneration, pipeline
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5VisionConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5Model, Qwen3_5VisionModel
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

from images import Picture, Settings
from onepass.config import Config
from onepass.decider import Decider
from onepass.forward import qwen3_5_vision
from onepass.forward.batches import CostModel, Limits
from onepass.forward.graphs import GraphMemory
from onepass.forward.loader import BadWeights, UnsupportedModel
from onepass.forward.tower import Tower, rope_positions
from onepass.loading import Loaded, load, read_pictures
from onepass.rows import PictureTokens, PlacedPicture, Row
from onepass.wire.schema import parse_request
from tests.support.checkpoints import PREPROCESSOR, TINY_VISION, make_vision_checkpoint, scale_up
from tests.support.fake_graphs import FakeCapturer
from tests.support.no_sync import no_sync

TOLERANCE = 2e-5  # of the largest value
DIFFERS = 0.01
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad():
        yield
    torch.set_num_threads(threads)


def distance(ours: Tensor, theirs: Tensor) -> float:
    assert ours.shape == theirs.shape
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


class Pair:
    """A tower of the library, and the same weights in ours."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> None:
        torch.manual_seed(seed)
        config = Qwen3_5VisionConfig(**(TINY_VISION | changes))
        self.model = Qwen3_5VisionModel(config).eval().to(dtype)
        scale_up(self.model)
        for parameter in self.model.parameters():
            if parameter.dim() < 2:  # norms and biases start at exactly 0 or 1, which hides one that is left out
                parameter.add_(torch.randn_like(parameter) * 0.2)
        self.model.pos_embed.weight.mul_(20)  # as large as what they are added to, or nobody would miss them
        for block in self.model.blocks:  # or attention is nearly uniform, and where a patch stands hardly matters
            block.attn.qkv.weight.mul_(5)
        self.spec = qwen3_5_vision.Spec.from_config(config.to_dict())
        self.tensors = {f"model.visual.{name}": tensor for name, tensor in self.model.state_dict().items()}
        self.weights = qwen3_5_vision.load_weights(self.spec, self.tensors, CPU, dtype)

    def theirs(self, patches: list[Tensor], grids: list[tuple[int, int]]) -> list[Tensor]:
        """patches (P, 3 * size * size) of one frame each."""
        size, frames = self.spec.patch_size, self.spec.temporal_patch_size
        whole = torch.cat(patches).view(-1, 3, 1, size, size).expand(-1, -1, frames, -1, -1)
        made = self.model(whole.flatten(1), torch.tensor([[1, *grid] for grid in grids])).pooler_output
        return list(made.split([rows * columns // self.spec.merged for rows, columns in grids]))

    def ours(self, patches: Tensor, grid: tuple[int, int]) -> Tensor:
        """Of (B, P, ...) patches of one size."""
        one = qwen3_5_vision.make_grid(self.spec, self.weights, *grid)
        return qwen3_5_vision.forward(
            self.spec, self.weights, patches, one.positions[None], one.cos[None], one.sin[None]
        )

    def patches(self, grid: tuple[int, int], seed: int = 0) -> Tensor:
        shape = grid[0] * grid[1], 3 * self.spec.patch_size**2
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(self.weights.dtype)


def random_tower(rng: random.Random) -> dict[str, Any]:
    heads = rng.choice([1, 2, 4])
    return {
        "depth": rng.choice([1, 2, 3]),
        "hidden_size": heads * rng.choice([8, 12, 24]),
        "intermediate_size": rng.choice([20, 48]),
        "num_heads": heads,
        "out_hidden_size": rng.choice([16, 40]),
        "patch_size": rng.choice([4, 16]),
        "spatial_merge_size": rng.choice([1, 2, 3]),
        "temporal_patch_size": rng.choice([1, 2]),
        "num_position_embeddings": rng.choice([4, 49, 64, 256]),
    }


@pytest.mark.parametrize("seed", range(16))
def test_a_random_tower_gives_what_transformers_gives(seed: int) -> None:
    rng = random.Random(seed)
    pair = Pair(seed, **random_tower(rng))
    merge = pair.spec.spatial_merge_size
    for _ in range(3):
        grid = rng.randint(1, 8) * merge, rng.randint(1, 8) * merge
        patches = pair.patches(grid, seed)
        assert distance(pair.ours(patches[None], grid)[0], pair.theirs([patches], [grid])[0]) < TOLERANCE


def test_pictures_of_one_size_run_together_as_they_do_alone() -> None:
    pair = Pair()
    parts = [pair.patches((6, 4), seed) for seed in range(3)]
    together = pair.ours(torch.stack(parts), (6, 4))
    for mine, theirs in zip(together, pair.theirs(parts, [(6, 4)] * 3), strict=True):
        assert distance(mine, theirs) < TOLERANCE


def test_in_double_precision_nothing_is_left_of_the_difference() -> None:
    pair = Pair(dtype=torch.float64)
    patches = pair.patches((8, 6))
    # transformers' own interpolation and rotary angles are float32 whatever the weights
    assert distance(pair.ours(patches[None], (8, 6))[0], pair.theirs([patches], [(8, 6)])[0]) < 1e-6


def test_what_is_wrong_differs() -> None:
    """Or these tests would not see it: another order of patches, no positions, another grid of as many patches."""
    pair = Pair()
    patches = pair.patches((8, 4))
    right = pair.theirs([patches], [(8, 4)])[0]
    grid = qwen3_5_vision.make_grid(pair.spec, pair.weights, 8, 4)
    for wrong in (
        pair.ours(patches.flip(0)[None], (8, 4))[0],
        pair.ours(patches[None], (4, 8))[0],
        qwen3_5_vision.forward(
            pair.spec, pair.weights, patches[None], grid.positions[None] * 0, grid.cos[None], grid.sin[None]
        )[0],
        qwen3_5_vision.forward(
            pair.spec, pair.weights, patches[None], grid.positions[None], grid.cos[None], grid.sin[None] * 0
        )[0],
    ):
        assert distance(wrong, right) > DIFFERS


def test_nothing_is_read_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair()
    grid = qwen3_5_vision.make_grid(pair.spec, pair.weights, 4, 4)
    arguments = (grid.positions[None], grid.cos[None], grid.sin[None])
    patches, lengths = pair.patches((4, 4))[None], torch.tensor([12])
    with no_sync(monkeypatch):
        qwen3_5_vision.forward(pair.spec, pair.weights, patches, *arguments)
        qwen3_5_vision.forward(pair.spec, pair.weights, patches, *arguments, lengths)


@pytest.mark.parametrize(
    "changes",
    [
        {"deepstack_visual_indexes": [1, 2]},
        {"hidden_act": "relu"},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}},
        {"depth": 0},
        {"hidden_size": "32"},
        {"num_heads": 5},
        {"num_position_embeddings": 60},
        {"in_channels": 4},
        {"patch_size": [16, 16]},
    ],
)
def test_a_tower_of_another_kind_is_not_served(changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModel):
        qwen3_5_vision.Spec.from_config(Qwen3_5VisionConfig(**TINY_VISION).to_dict() | changes)
    with pytest.raises(UnsupportedModel, match="does not say depth"):
        qwen3_5_vision.Spec.from_config({})


def test_a_tower_with_a_tensor_missing_or_of_another_shape_is_refused() -> None:
    pair = Pair()
    for name in pair.tensors:
        without = {other: tensor for other, tensor in pair.tensors.items() if other != name}
        wrong = {**pair.tensors, name: pair.tensors[name][..., :-1]}
        for tensors in (without, wrong):
            with pytest.raises(BadWeights, match=name.split(".")[2]):
                qwen3_5_vision.load_weights(pair.spec, tensors, CPU, torch.float32)


SETTINGS = Settings(16, 2, 65536, 448 * 448, (0.5,) * 3, (0.5,) * 3)


def picture(rows: int, columns: int, seed: int = 0) -> Picture:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (3, rows * 16, columns * 16), generator=generator).to(torch.uint8)
    return Picture(pixels, f"{rows}x{columns}:{seed}".encode(), (rows, columns), (rows // 2, columns // 2))


def tower(pair: Pair, cache_bytes: int = 0, **limits: Any) -> Tower:
    limits = {"max_tokens": 512, "max_rows": 4, **limits}
    cost, tokens = CostModel(launch=32, per_token=1), PictureTokens(1, 2, 3)
    return Tower(pair.spec, pair.weights, SETTINGS, tokens, cost=cost, limits=Limits(**limits), cache_bytes=cache_bytes)


def expected_embeds(pair: Pair, shown: Picture) -> Tensor:
    return pair.theirs([SETTINGS.patches(shown.pixels)], [shown.grid])[0]


@pytest.mark.parametrize("limits", [{}, {"widths": (16, 40, 96), "heights": (1, 2, 4)}], ids=["by size", "buckets"])
def test_pictures_of_any_sizes_at_once_are_encoded_as_one_by_one(limits: dict[str, Any]) -> None:
    """With buckets they are padded, as for CUDA graphs; the last has more patches than any bucket."""
    pair = Pair()
    sizes = [(4, 4), (2, 6), (8, 4), (4, 4), (6, 6), (2, 2), (10, 10)]
    shown = [picture(*size, seed=seed) for seed, size in enumerate(sizes)]
    tower(pair, **limits).encode(shown)
    for one in shown:
        assert one.embeds is not None
        assert distance(one.embeds, expected_embeds(pair, one)) < TOLERANCE


def test_with_buckets_only_their_shapes_run(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = set()
    forward = qwen3_5_vision.forward

    def watched(spec: Any, weights: Any, patches: Tensor, *rest: Any) -> Tensor:
        shapes.add(tuple(patches.shape[:2]))
        return forward(spec, weights, patches, *rest)

    monkeypatch.setattr(qwen3_5_vision, "forward", watched)
    rng = random.Random(1)
    eyes = tower(Pair(), max_tokens=200, widths=(16, 40, 96), heights=(1, 2, 4))
    for _ in range(20):
        sizes = [(2 * rng.randint(1, 4), 2 * rng.randint(1, 4)) for _ in range(rng.randint(1, 6))]
        eyes.encode([picture(*size, seed=rng.randint(0, 1 << 30)) for size in sizes])
    assert {width for _, width in shapes} <= {16, 40, 96}
    assert {height for height, _ in shapes} <= {1, 2, 4}
    assert all(height * width <= 200 or height == 1 for height, width in shapes)
    assert len(shapes) > 3


def test_every_bucket_is_captured_and_replayed() -> None:
    """The stand-in fails on what a capture forbids, and poisons the outputs of a graph when another is replayed."""
    pair = Pair()
    eyes = tower(pair, max_tokens=200, widths=(16, 40, 96), heights=(1, 2, 4))
    backend = FakeCapturer()
    eyes.use_graphs(backend, tolerance=1e-4, memory=GraphMemory(1 << 30))
    assert eyes.graphs is not None
    while eyes.graphs.capture_next():
        pass
    assert set(eyes.graphs.ready) == {(1, 16), (1, 40), (1, 96), (2, 16), (2, 40), (2, 96), (4, 16), (4, 40)}
    assert not eyes.graphs.failed
    for sizes in ([(4, 4)] * 4, [(2, 2), (8, 4), (6, 6)], [(8, 12), (4, 4)], [(10, 12)]):
        shown = [picture(*size, seed=seed) for seed, size in enumerate(sizes)]
        eyes.encode(shown)
        for one in shown:
            assert one.embeds is not None
            assert distance(one.embeds, expected_embeds(pair, one)) < TOLERANCE
    assert eyes.graphs.num_replays > 3
    assert eyes.graphs.num_plain == 1  # of more patches than any bucket has


def test_a_picture_is_encoded_once_a_request_and_once_while_it_is_kept() -> None:
    pair = Pair()
    eyes = tower(pair, cache_bytes=1 << 20)
    first = picture(4, 4)
    eyes.encode([first, first])
    eyes.encode([first])
    eyes.encode([picture(4, 4), picture(4, 4, seed=1)])
    assert (eyes.num_encoded, eyes.num_reused) == (2, 2)
    forgetful = tower(pair)
    forgetful.encode([first, picture(4, 4)])  # `first` has its embeddings; there is no cache for the other
    assert (forgetful.num_encoded, forgetful.num_reused) == (1, 1)
    assert forgetful.describe().image_cache_bytes == 0


def test_the_cache_holds_its_bytes_and_no_more() -> None:
    eyes = tower(Pair(), cache_bytes=10_000)
    for seed in range(40):
        eyes.encode([picture(4, 8, seed)])
    assert 9_000 <= eyes.describe().image_cache_bytes <= 10_000


# All of the library's model that its get_rope_index looks at
ROPE_INDEX: Any = SimpleNamespace(
    config=SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=2)),
    get_vision_position_ids=lambda *args, **kwargs: Qwen3_5Model.get_vision_position_ids(None, *args, **kwargs),
)


@settings(deadline=None)
@given(st.lists(st.one_of(st.integers(1, 5), st.tuples(st.integers(1, 6), st.integers(1, 6))), max_size=8))
def test_positions_are_those_of_the_librarys_get_rope_index(parts: list[int | tuple[int, int]]) -> None:
    """Numbers are stretches of text, pairs are pictures of so many merged patches."""
    shown, kinds, grids = [], [0], []
    for part in parts:
        if isinstance(part, int):
            kinds += [0] * part
            continue
        rows, columns = part
        shown.append(PlacedPicture(len(kinds), picture(2 * rows, 2 * columns)))
        kinds += [1] * (rows * columns) + [0]  # two pictures never touch: between them stand their end and start
        grids.append([1, 2 * rows, 2 * columns])
    ids = torch.zeros(1, len(kinds), dtype=torch.long)
    expected, deltas = Qwen3_5Model.get_rope_index(
        ROPE_INDEX, ids, mm_token_type_ids=torch.tensor([kinds]), image_grid_thw=torch.tensor(grids).view(-1, 3)
    )
    ours = rope_positions(len(kinds) + 4, shown)
    assert np.array_equal(ours[:, : len(kinds)], expected[:, 0].numpy())
    follow = np.arange(len(kinds), len(kinds) + 4) + deltas.item()  # what the library gives tokens that come later
    assert np.array_equal(ours[:, len(kinds) :], np.stack([follow] * 3))
    for cut in range(1, len(kinds)):  # a beginning's positions do not depend on what follows
        if not any(one.start < cut < one.start + one.picture.num_tokens for one in shown):
            before = [one for one in shown if one.start < cut]
            assert np.array_equal(rope_positions(cut, before), ours[:, :cut])
            assert Row(array("i", [0] * len(kinds)), (), cut, tuple(shown)).position(cut) == ours[0, cut]


def png(seed: int, width: int = 300, height: int = 200) -> bytes:
    small = np.random.default_rng(seed).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(small).resize((width, height)).save(buffer, "PNG")
    return buffer.getvalue()


PICTURES = {"a": png(1), "b": png(2, 60, 150), "c": png(3, 640, 480)}
IMAGES = {name: base64.b64encode(data).decode() for name, data in PICTURES.items()}
NOUL = {"type": "noul", "instructions": "Is it so?"}
CHOICE = {"type": "choice", "instructions": "Which?", "criteria": {"one": "first", "two": None, "three": "third"}}
LIKE = {"type": "noul", "instructions": "Is it like <image:c>, really?"}
REQUESTS: dict[str, tuple[Any, dict[str, Any], str]] = {  # state, questions, the pictures
    "one in the middle": ("see <image:a> here", {"q": NOUL}, "a"),
    "nothing but one": ("<image:b>", {"q": NOUL, "r": CHOICE}, "b"),
    "several, one twice": ({"x": ["<image:b>", "<image:a> and <image:b>"]}, {"q": CHOICE, "r": NOUL}, "ab"),
    "at the end of a text": ("text", {"q": NOUL}, "a"),
    "at the end of an object": ({"k": [1, None]}, {"q": NOUL}, "ab"),
    "in a question": ("no picture up here", {"q": NOUL, "like": LIKE}, "c"),
    "in the state and in a question": ("<image:a>", {"q": NOUL, "like": LIKE, "r": CHOICE}, "ac"),
}


def body(name: str, **fields: Any) -> dict[str, Any]:
    state, questions, shown = REQUESTS[name]
    return {"state": state, "questions": questions, "images": {key: IMAGES[key] for key in shown}, **fields}


@pytest.fixture(scope="module")
def loaded(vision_checkpoint: Path) -> Loaded:
    return load(Config(model=str(vision_checkpoint)))


@pytest.fixture(scope="module")
def library(vision_checkpoint: Path) -> Any:
    return Qwen3_5ForConditionalGeneration.from_pretrained(vision_checkpoint, dtype=torch.float32).eval()


def rows_of(loaded: Loaded, request: dict[str, Any]) -> list[Row]:
    marked, pictures = read_pictures(loaded, parse_request(json.dumps(request).encode()), time.monotonic() + 60)
    return loaded.prompter.render(marked, pictures)


PROCESSOR = Qwen2VLImageProcessor(
    **{key: value for key, value in PREPROCESSOR.items() if key not in ("image_processor_type", "size")},
    size={"shortest_edge": 65536, "longest_edge": 448 * 448},
)


def library_scores(model: Any, row: Row, order: str) -> list[list[float]]:
    """The whole model's logits of the labels where the row is read; `order` names its pictures."""
    kinds = torch.zeros(1, row.num_tokens, dtype=torch.long)
    for shown in row.pictures:
        kinds[0, shown.start : shown.start + shown.picture.num_tokens] = 1
    ids = torch.tensor([list(row.input_ids)])
    assert torch.equal(ids[kinds == 1], torch.full((row.num_image_tokens,), model.config.image_token_id))
    made = PROCESSOR(images=[Image.open(io.BytesIO(PICTURES[name])) for name in order], return_tensors="pt")
    logits = model(input_ids=ids, mm_token_type_ids=kinds, use_cache=False, **made).logits[0]
    return [[logits[read.positions[0], label].item() for label in read.label_ids] for read in row.reads]


ORDERS = {
    "one in the middle": "a",
    "nothing but one": "b",
    "several, one twice": "bab",
    "at the end of a text": "a",
    "at the end of an object": "ab",
    "in a question": "c",
    "in the state and in a question": "ac",
}


def orders(name: str, encoding: str) -> list[str]:
    """Which pictures each row shows, in order."""
    if encoding == "joint":
        return [ORDERS[name]]
    if name == "in a question":
        return ["", "c"]
    if name == "in the state and in a question":
        return ["a", "ac", "a"]
    return [ORDERS[name]] * len(REQUESTS[name][1])


def text_scores(model: Any, row: Row) -> list[list[float]]:
    logits = model(input_ids=torch.tensor([list(row.input_ids)]), use_cache=False).logits[0]
    return [[logits[read.positions[0], label].item() for label in read.label_ids] for read in row.reads]


@pytest.mark.parametrize("encoding", ["joint", "per_question"])
@pytest.mark.parametrize("name", REQUESTS)
def test_logits_about_pictures_are_those_of_the_librarys_whole_model(
    loaded: Loaded, library: Any, name: str, encoding: str
) -> None:
    rows = rows_of(loaded, body(name, encoding=encoding))
    scores = loaded.engine.forward(rows)
    for row, order, mine in zip(rows, orders(name, encoding), scores, strict=True):
        theirs = library_scores(library, row, order) if order else text_scores(library, row)
        for question, expected in zip(mine, theirs, strict=True):
            assert distance(torch.tensor(question), torch.tensor(expected)) < TOLERANCE
    assert loaded.engine.forward(rows) == scores  # from the caches


def all_scores(loaded: Loaded, request: dict[str, Any]) -> Tensor:
    scores = loaded.engine.forward(rows_of(loaded, request))
    return torch.tensor([value for row in scores for question in row for value in question])


def test_sharing_a_state_with_pictures_changes_nothing(vision_checkpoint: Path, loaded: Loaded) -> None:
    unshared = load(Config(model=str(vision_checkpoint), share_state=False, image_cache_mb=0))
    for name in REQUESTS:
        assert distance(all_scores(loaded, body(name)), all_scores(unshared, body(name))) < TOLERANCE


def test_another_picture_in_the_same_words_is_another_state(loaded: Loaded) -> None:
    """Same tokens, same size: only the pixels differ, so what is kept of one must not serve the other."""
    first, second = (
        {**body("one in the middle"), "images": {"a": base64.b64encode(png(seed)).decode()}} for seed in (1, 77)
    )
    (one,), (other,) = rows_of(loaded, first), rows_of(loaded, second)
    assert one.input_ids == other.input_ids
    assert one.num_shared > 64  # from where on states are shared
    assert one.shared_ids() == other.shared_ids()
    assert one.key != other.key
    once, again = all_scores(loaded, first), all_scores(loaded, second)
    assert distance(again, once) > DIFFERS
    assert torch.equal(all_scores(loaded, first), once)


def test_rows_with_and_without_pictures_run_together(loaded: Loaded) -> None:
    mixed = [row for name in REQUESTS for row in rows_of(loaded, body(name))]
    text = rows_of(loaded, {"state": "words", "questions": {"q": NOUL}})
    together = loaded.engine.forward([*mixed, *text])
    alone = [loaded.engine.forward([row])[0] for row in (*mixed, *text)]
    for mine, expected in zip(together, alone, strict=True):
        for question, one in zip(mine, expected, strict=True):
            assert distance(torch.tensor(question), torch.tensor(one)) < TOLERANCE


def test_the_order_of_pictures_matters_and_so_does_their_place(loaded: Loaded) -> None:
    pictures = {key: IMAGES[key] for key in "ab"}
    asked = [
        {"state": state, "questions": {"q": NOUL}, "images": pictures}
        for state in ("<image:a> then <image:b>", "<image:b> then <image:a>", "then <image:a><image:b>")
    ]
    one, two, three = (all_scores(loaded, request) for request in asked)
    assert min(distance(one, two), distance(one, three), distance(two, three)) > DIFFERS


def test_answers_about_pictures_are_those_of_the_librarys_decision_pipeline(tmp_path: Path) -> None:
    """End to end: its own prompt, processor, positions and forward, on a chat model that sees."""
    folder = make_vision_checkpoint(tmp_path / "chat", is_chat=True)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    processor = Qwen3VLProcessor(PROCESSOR, tokenizer, Qwen3VLVideoProcessor(), chat_template=tokenizer.chat_template)
    model = Qwen3_5ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    theirs = pipeline("decision", model=model, processor=processor, tokenizer=tokenizer)
    asked = Decider(Config(model=str(folder), backend="fast"))
    asked.start()
    asked.wait_ready()
    assets = {f"@{name}": {"type": "image", "format": "png", "data_base64": IMAGES[name]} for name in PICTURES}
    for state, question in (
        ("see @a here", CHOICE),
        ({"x": ["@b", {"y": "like @a"}]}, NOUL),
        ("@c@b", {"type": "score", "instructions": "How like @b?", "criteria": ["not", "a bit", "as @c is"]}),
        ("no picture here <|image_pad|>", {**NOUL, "instructions": "Only @a?"}),
    ):
        text = json.dumps([state, question])
        shown = {name: asset for name, asset in assets.items() if name in text}
        request = {"state": state, "questions": {"q": question}, "assets": shown}
        ours = json.loads(asked.decide(json.dumps(request).encode()))["answers"]["q"]
        expected = theirs(request)["q"]
        if "probabilities" in expected:
            assert list(ours["probabilities"].values()) == pytest.approx(
                list(expected["probabilities"].values()), abs=1e-4
            )
        else:
            assert ours["noul"] == pytest.approx(expected["noul"], abs=1e-4)
    asked.drain(10)
