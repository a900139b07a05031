"""Trains the byte-level BPE tokenizer of the checkpoint on the training rows; owns the list of control tokens."""

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path

from data import Row, read_rows
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

PAD = "<|pad|>"
CONTROL_TOKENS = (
    PAD,
    "<|state|>",
    "<|noul|>",
    "<|choice|>",
    "<|score|>",
    "<|option|>",
    "<|description|>",
    "<|end_option|>",
    "<|answer|>",
)
# Words (split at a camelCase hump, so that label spellings share their tokens), single digits, marks, white space.
WORD_PATTERN = r" ?\p{Lu}?\p{Ll}+| ?\p{Lu}+(?!\p{Ll})| ?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
MAX_LENGTH = 16384  # tokens, the model's max_position_embeddings


def iter_texts(rows: list[Row]) -> Iterator[str]:
    """Every text of the rows once: states, instructions, labels and descriptions."""
    seen: set[str] = set()

    def walk(value: object) -> Iterator[str]:
        if isinstance(value, str) and value not in seen:
            seen.add(value)
            yield value
        elif isinstance(value, dict):
            for key, item in value.items():
                yield from walk(key)
                yield from walk(item)
        elif isinstance(value, list):
            for item in value:
                yield from walk(item)

    for row in rows:
        yield from walk([row.state, row.instructions, list(row.options), list(row.descriptions)])
        if isinstance(row.state, dict):  # the punctuation of compact JSON too
            yield json.dumps(row.state, ensure_ascii=False, separators=(",", ":"))


def train_tokenizer(texts: Iterator[str], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(CONTROL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, model_dir: Path) -> None:
    compact = re.sub(r"\n\s*", "", tokenizer.to_str(pretty=True)) + "\n"
    (model_dir / "tokenizer.json").write_text(compact, encoding="utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_LENGTH,
    }
    (model_dir / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of decisions-{train,dev,test}.jsonl.gz")
    parser.add_argument("--model", type=Path, default=Path("model"), help="folder to write to (default: model)")
    parser.add_argument("--vocab-size", type=int, default=8192, help="tokens, control tokens included (default: 8192)")
    args = parser.parse_args()
    tokenizer = train_tokenizer(iter_texts(read_rows(args.data, "train")), args.vocab_size)
    save_tokenizer(tokenizer, args.model)
    print(f"tokenizer: vocab_size={tokenizer.get_vocab_size()}")


if __name__ == "__main__":
    main()
