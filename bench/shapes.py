"""The shapes that benchmarks measure, and checkpoints of them with random weights."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

_COMMON: dict[str, Any] = {
    "vocab_size": 248_320,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
    },
}
SHAPES: dict[str, dict[str, Any]] = {
    "0.8B": {
        **_COMMON,
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "linear_num_value_heads": 16,
    },
    "4B": {
        **_COMMON,
        "hidden_size": 2560,
        "intermediate_size": 9216,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "linear_num_value_heads": 32,
    },
}


def make_checkpoint(folder: Path, shape: dict[str, Any]) -> Path:
    """Random float32 weights with the tests' tokenizer, whose vocabulary it has, and their label templates."""
    sys.path.insert(0, str(ROOT))
    from tests.support.checkpoints import make_decision_checkpoint, make_model, make_tokenizer

    make_decision_checkpoint(folder)
    tokenizer = make_tokenizer()
    make_model(folder, tokenizer, **{**shape, "vocab_size": len(tokenizer)})
    return folder
