"""The target's tokenizer, rebuilt from the GGUF metadata, and its chat form."""

from __future__ import annotations

from pathlib import Path

from gguf import GGUFReader
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from target import MODEL_PATH

BEGIN, EOS = 1, 2  # <|im_start|> and <|im_end|>
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
_CONTROL = 3  # the GGUF token type of special tokens


def load_tokenizer(path: Path = MODEL_PATH) -> Tokenizer:
    """Byte-level BPE whose pre-tokenizer splits digits one by one ("smollm")."""
    fields = GGUFReader(path).fields
    pieces = fields["tokenizer.ggml.tokens"].contents()
    types = fields["tokenizer.ggml.token_type"].contents()
    merges = [tuple(m.split(" ")) for m in fields["tokenizer.ggml.merges"].contents()]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, bytes_])
    tokenizer.decoder = decoders.ByteLevel()
    special = [p for p, kind in zip(pieces, types) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(p, special=True, normalized=False) for p in special])
    return tokenizer


class Chat:
    """Turns prompts into token ids."""

    def __init__(self) -> None:
        self.tokenizer = load_tokenizer()
        # Up to the point where a user's words begin, and from where they end.
        self.before_user = self.words(f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n")
        self.after_user = self.words("<|im_end|>\n<|im_start|>assistant\n")

    def words(self, text: str) -> list[int]:
        """The ids of `text` alone."""
        return self.tokenizer.encode(text).ids

    def prompt(self, user: str) -> list[int]:
        """The ids of a conversation that waits for the assistant's first words."""
        return self.before_user + self.words(user) + self.after_user

    def text(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids)

    def answer(self, ids: list[int]) -> str:
        """What the assistant says last in a conversation."""
        opening = self.after_user[self.after_user.index(BEGIN) :]
        begin = len(ids) - 1 - ids[::-1].index(BEGIN)
        return self.text(ids[begin + len(opening) :])
