"""Makes tiny checkpoints with random weights: Qwen3.5's architecture, its kind of tokenizer, any decision format."""

from __future__ import annotations

import json
import string
from itertools import product
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5TextConfig,
)

from tests.support import ROOT

STARTER = ROOT / "model"
WEIGHT_SCALE = 4.0  # near-uniform attention, which small random weights give, hides bugs

CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|image_pad|>")
PLAIN_ADDED_TOKENS = ("<think>", "</think>")  # added, but not special, as in Qwen's vocabularies
SPLIT_PATTERN = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
PER_QUESTION_TEMPLATE = (
    "{%- macro text(x) %}{{ '' if x is none else x if x is string else x|tojson }}{% endmacro -%}"
    "{{- '<|im_start|>' ~ text(state) ~ '\\n' ~ text(question.instructions) ~ '\\n' -}}"
    "{%- for option in question.options -%}"
    "{%- set d = question.descriptions[loop.index0] -%}"
    "{{- question.labels[loop.index0] ~ ') ' ~ option ~ (': ' ~ text(d) if d is not none else '') ~ '\\n' -}}"
    "{%- endfor -%}{{- 'Answer: <|im_end|><|mark|>' -}}"
)
JOINT_TEMPLATE = (
    "{%- macro text(x) %}{{ '' if x is none else x if x is string else x|tojson }}{% endmacro -%}"
    "{{- '<|im_start|>' ~ text(state) ~ '\\n' -}}"
    "{%- for question in questions -%}"
    "{{- text(question.instructions) ~ '\\n' -}}"
    "{%- for option in question.options -%}{{- question.labels[loop.index0] ~ ') ' ~ option ~ '\\n' -}}{%- endfor -%}"
    "{{- '<|im_end|><|mark|>' -}}{%- endfor -%}"
)


def make_tokenizer(num_pairs: int = 676, more_control: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    """Byte-level BPE whose tokens include Yes, No, A to Z and the first `num_pairs` of AA to ZZ."""
    pairs = ["".join(pair) for pair in product(string.ascii_uppercase, repeat=2)][:num_pairs]
    corpus = ["Yes", "No", *pairs] * 3 + ["the state of the question is what the answer says it is"] * 20
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        corpus, trainers.BpeTrainer(vocab_size=1200, min_frequency=2, initial_alphabet=alphabet, show_progress=False)
    )
    control = (*CONTROL_TOKENS, *more_control)
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in control])
    tokenizer.add_tokens([AddedToken(name, special=False, normalized=False) for name in PLAIN_ADDED_TOKENS])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")  # type: ignore[no-untyped-call]


def tiny_shape(vocab_size: int) -> dict[str, Any]:
    return {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
    }


def make_model(folder: Path, tokenizer: Any, **changes: Any) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen3_5TextConfig(**(tiny_shape(len(tokenizer)) | changes)))  # type: ignore[no-untyped-call]
    scale_up(model)
    model.save_pretrained(folder)


def scale_up(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(WEIGHT_SCALE)


def make_chat_checkpoint(folder: Path) -> Path:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    make_model(folder, tokenizer)
    return folder


def make_decision_checkpoint(folder: Path, **decision: Any) -> Path:
    """`decision` goes into decision.json; the templates are for readout `labels`."""
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder)
    make_model(folder, tokenizer)
    settings = {
        "temperature": {"noul": 1.5, "choice": 0.7, "score": 2.0},
        "noul_options": ["false", "true"],
        **decision,
    }
    (folder / "decision.json").write_text(json.dumps(settings), encoding="utf-8")
    (folder / "decision_template.jinja").write_text(PER_QUESTION_TEMPLATE, encoding="utf-8")
    (folder / "decision_template_joint.jinja").write_text(JOINT_TEMPLATE, encoding="utf-8")
    return folder


VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>")
TINY_VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 32,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 64,
}
PREPROCESSOR: dict[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "size": {"shortest_edge": 65536, "longest_edge": 16777216},
    "patch_size": 16,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
# What Qwen3.5's own chat template writes for the parts of a message
VISION_CHAT_TEMPLATE = CHAT_TEMPLATE.replace(
    "{{ m['content'] }}",
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}",
)


def make_vision_model(vocab: dict[str, int], text: dict[str, Any], **vision: Any) -> Any:
    config = Qwen3_5Config(
        text_config=text,
        vision_config=TINY_VISION | {"out_hidden_size": text["hidden_size"]} | vision,
        image_token_id=vocab["<|image_pad|>"],
        video_token_id=vocab["<|endoftext|>"],
        vision_start_token_id=vocab["<|vision_start|>"],
        vision_end_token_id=vocab["<|vision_end|>"],
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = Qwen3_5ForConditionalGeneration(config).eval()  # type: ignore[no-untyped-call]
    scale_up(model)
    return model


def make_vision_checkpoint(folder: Path, *, is_chat: bool = False) -> Path:
    """Qwen3.5 with its vision tower: a chat model, or a decision checkpoint with readout `labels`."""
    if is_chat:
        folder.mkdir(exist_ok=True)
    else:
        make_decision_checkpoint(folder)
    tokenizer = make_tokenizer(more_control=VISION_TOKENS)
    if is_chat:
        tokenizer.chat_template = VISION_CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    make_vision_model(tokenizer.get_vocab(), tiny_shape(len(tokenizer))).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR), encoding="utf-8")
    return folder
