"""The Hugging Face library's own model class as a backend, for every architecture that our forward does not cover.

It owns the model object and the score head. It knows nothing of which rows run together.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from onepass.errors import StartupError
from onepass.forward.backend import Scores
from onepass.forward.buckets import Buckets
from onepass.forward.graphs import Graphs
from onepass.forward.heads import LabelHead, choose_head
from onepass.forward.inputs import DEFAULT_MAX_TOKENS, make_inputs, split_scores
from onepass.forward.plan import Pass
from onepass.forward.prefix import Prefix
from onepass.rows import Readout, Row

# These rescale the rotary frequencies by the batch's longest row: a row's answer would depend on the others.
LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})
GPU_PACKAGES = ("fla", "causal_conv1d")
HEAD_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.02}  # of the largest logit


class TransformersBackend:
    """Worker thread only."""

    name = "transformers"
    shares_prefixes = False  # whoever continues one of the library's caches changes it
    buckets = Buckets()
    graphs: Graphs[Any, Any] | None = None

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype, readout: Readout) -> None:
        """Raises `StartupError`."""
        self._device = device
        with hidden_packages(device):
            self._model = load_library_model(folder, device, dtype)
        config = self._model.config.get_text_config()
        self.max_tokens: int = getattr(config, "max_position_embeddings", None) or DEFAULT_MAX_TOKENS
        rope = getattr(config, "rope_parameters", None) or {}
        self._pads = rope.get("rope_type", "default") not in LENGTH_DEPENDENT_ROPE
        matrix = self._model.get_output_embeddings()
        labels = LabelHead(
            matrix.weight,
            getattr(matrix, "bias", None),
            getattr(config, "logit_scale", None) or 1 / (getattr(config, "logits_scaling", None) or 1),
            getattr(config, "final_logit_softcapping", None),
        )
        self._check_labels(labels)
        self._head = choose_head(readout, labels, folder, config.hidden_size, device)

    def run(self, planned: Pass, rows: Sequence[Row], past: Sequence[Prefix]) -> tuple[list[Scores], list[Prefix]]:
        """See `Backend.run`. Its passes are over whole rows."""
        return split_scores(rows, self._score(rows)), []

    def _score(self, rows: Sequence[Row]) -> Tensor:
        """(B, S) float32, the scores of each row."""
        if not self._pads and len(rows) > 1:
            parts = [self._score([row])[0] for row in rows]
            return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)
        inputs = make_inputs(rows, [0] * len(rows)).map(lambda tensor: tensor.to(self._device))
        arguments = {"input_ids": inputs.ids}
        if any(row.num_tokens != inputs.ids.shape[1] for row in rows):
            lengths = torch.tensor([row.num_tokens for row in rows], device=self._device)
            order = torch.arange(inputs.ids.shape[1], device=self._device)
            arguments["attention_mask"] = (order < lengths[:, None]).long()
        hidden = self._model.get_decoder()(**arguments, use_cache=False).last_hidden_state
        states = hidden.gather(1, inputs.reads[..., None].expand(-1, -1, hidden.shape[-1]))
        return self._head.scores(states, inputs.score_reads, inputs.score_others)

    def _check_labels(self, labels: LabelHead) -> None:
        """Compare the head's scores with the model's own logits: without them its answers would not be its own."""
        probe = torch.arange(1, 9, device=self._device)[None]
        logits = self._model(input_ids=probe, use_cache=False).logits[0, -1].float()
        states = self._model.get_decoder()(input_ids=probe, use_cache=False).last_hidden_state[:, -1:]
        ids = torch.arange(0, logits.shape[0], max(1, logits.shape[0] // 64), device=self._device)[None]
        difference = (labels.scores(states, torch.zeros_like(ids), ids) - logits[ids]).abs().max()
        if not difference <= HEAD_TOLERANCE[labels.weight.dtype] * logits.abs().max():
            raise StartupError("what this architecture does to its logits is not known; it cannot be served")


@contextmanager
def hidden_packages(device: torch.device) -> Iterator[None]:
    """On a CPU, hide the packages of CUDA kernels while the library imports a model's code.

    The library binds them for good. With flash-linear-attention installed and no GPU, its forward would fail with "0
    active drivers"."""
    hidden = [name for name in GPU_PACKAGES if device.type == "cpu" and name not in sys.modules]
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment] # importing it is an ImportError then
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


def load_library_model(folder: Path, device: torch.device, dtype: torch.dtype) -> Any:
    """The model, from safetensors files alone. No code of the checkpoint is run.

    Raises `StartupError` where it cannot be loaded or weights are missing."""
    from transformers import AutoModelForCausalLM

    loader: Any = AutoModelForCausalLM.from_pretrained  # its annotations know nothing of `output_loading_info`
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False, "use_safetensors": True}
    try:
        model, info = loader(folder, dtype=dtype, output_loading_info=True, **options)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as err:
        reason = next((line.strip() for line in str(err).splitlines() if line.strip()), type(err).__name__)
        raise StartupError(f"{folder} cannot be loaded: {reason[:300]}") from err
    for problem in ("missing_keys", "mismatched_keys", "error_msgs"):
        if info.get(problem):
            names = sorted(map(str, info[problem]))[:3]
            raise StartupError(f"{folder} cannot be loaded: {problem.replace('_', ' ')}: {names}")
    for parameter in model.parameters():  # not views of the file: what was verified must not change with it
        parameter.data = parameter.data.clone()
    return model.to(device).eval()
