"""Trains the byte-level BPE tokenizer of the checkpoint; owns the control tokens and the shape of a segment's end."""

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path

from data import Row, json_text, read_rows
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers.models.qwen3_5.tokenization_qwen3_5 import PRETOKENIZE_REGEX

PAD = "<|pad|>"
CONTROL_TOKENS = (
    PAD,
    "<|state|>",
    "<|end_state|>",
    "<|question|>",
    "<|noul|>",
    "<|choice|>",
    "<|score|>",
    "<|option|>",
    "<|description|>",
    "<|end_option|>",
    "<|answer|>",
    "<|vision_start|>",  # pictures in the state; a vision tower may be trained against this model
    "<|image_pad|>",
    "<|vision_end|>",
)
# Words (split at a camelCase hump, so that label spellings share their tokens), single digits, marks, white space.
WORD_PATTERN = r" ?\p{Lu}?\p{Ll}+| ?\p{Lu}+(?!\p{Ll})| ?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
BOUNDARY = re.compile(r'[.!?;\n]|,"|"\}|"\]')  # a token with one of these in it ends a sentence or a JSON field
MAX_LENGTH = 16384  # tokens, the model's max_position_embeddings
WORD_REPEATS = 6  # times each word of the encoder's vocabulary is shown beside the texts


def iter_texts(rows: list[Row]) -> Iterator[str]:
    """Every text of the rows once: states, instructions, labels and descriptions."""
    seen: set[str] = set()
    for row in rows:
        for text in (row.state, row.instructions, *row.options, *row.descriptions):
            if text is not None and (string := json_text(text)) not in seen:
                seen.add(string)
                yield string


def iter_words(encoder_dir: Path) -> Iterator[str]:
    """The whole words of the encoder's vocabulary, so that common words the rows lack are single tokens too."""
    vocab = json.loads((encoder_dir / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    for word in vocab:
        if re.fullmatch(r"[a-zà-ÿ]{3,}", word):
            for _ in range(WORD_REPEATS):
                yield f" {word}"


def cut_by(pattern: str) -> pre_tokenizers.PreTokenizer:
    """Text into the words that match, and these into bytes."""
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def train_tokenizer(texts: Iterator[str], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = cut_by(WORD_PATTERN)
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
    """With the rules for cutting text into words that the library puts in their place for a Qwen3.5 with vision,
    whatever the file says. They cut 2 texts of 1,000 otherwise, and the file should say what is done."""
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = cut_by(PRETOKENIZE_REGEX)
    compact = re.sub(r"\n\s*", "", tokenizer.to_str(pretty=True)) + "\n"
    (model_dir / "tokenizer.json").write_text(compact, encoding="utf-8")
    settings = {
        "tokenizer_class": "TokenizersBackend",
        **dict.fromkeys(("pad_token", "eos_token", "unk_token"), PAD),  # else the library adds one
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_LENGTH,
    }
    (model_dir / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of decisions-{train,dev,test}.jsonl.gz")
    parser.add_argument("--encoder", type=Path, required=True, help="folder of all-MiniLM-L6-v2, for its list of words")
    parser.add_argument("--model", type=Path, default=Path("model"), help="folder to write to (default: model)")
    parser.add_argument(
        "--vocab-size", type=int, default=24576, help="tokens, control tokens included (default: 24576)"
    )
    args = parser.parse_args()
    texts = [*iter_texts(read_rows(args.data, "train")), *iter_words(args.encoder)]
    tokenizer = train_tokenizer(iter(texts), args.vocab_size)
    save_tokenizer(tokenizer, args.model)
    print(f"tokenizer: vocab_size={tokenizer.get_vocab_size()}")


if __name__ == "__main__":
    main()
