"""Read Hugging Face's tokenizer.json with the library `tokenizers` (the extra `hf`)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from gsa_data.whole_files import parse_json

EOS_NAMES = (
    "</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "<|eos|>", "[EOS]",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
)  # fmt: skip
"""Special tokens that end a document in common models"""

OTHER_SPECIAL = "add a special token that its model does not hold to the file's added_tokens"

BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


class TokenizerError(ValueError):
    """The tokenizer cannot be used. The message names file, reason and remedy."""


class TokenizerJson:
    """Has the methods of tokenize.SentencePieceModel for a tokenizer.json."""

    def __init__(self, file: bytes, path: str) -> None:
        try:
            import tokenizers
        except ImportError as error:
            raise TokenizerError(
                f"tokenizer file {path!r} needs the package tokenizers; run in the checkout: pip install '.[hf]'"
            ) from error
        self._path = path
        try:
            self._content: dict[str, Any] = parse_json(file)
        except ValueError as error:
            raise TokenizerError(
                f"tokenizer file {path!r} is not JSON ({error}); give a sentencepiece .model file or a tokenizer.json"
            ) from error
        with _library_errors(path):
            self._tokenizer = tokenizers.Tokenizer.from_str(file.decode())
        # The file may ask for truncation, padding and dropout of merges, so turn them off. Text that spells a special
        # token stays text.
        if getattr(self._tokenizer.model, "dropout", None):
            self._tokenizer.model.dropout = None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        added = self._content.get("added_tokens") or []
        self._special = [token["content"] for token in added if token.get("special")]
        self._vocab: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        self.symbols = {
            name: self._vocab[name] for token in added if (name := token["content"]) in self._vocab
        }
        self.vocab_size = max(self._vocab.values()) + 1  # ids may have gaps

    def encode(self, text: str | bytes) -> list[int]:
        text = text.decode() if isinstance(text, bytes) else text
        tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return tokens

    def decode(self, tokens: list[int], without_special: bool) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=without_special))

    def id_of(self, token: str) -> int | None:
        found = self._vocab.get(token)
        if found is not None and self._is_spelled(token):
            remedy = (
                OTHER_SPECIAL
                if token in self._special
                else "mark the token as special in the file's added_tokens"
            )
            raise TokenizerError(
                f"tokenizer {self._path!r}: text that spells {token!r} would end its document; {remedy}, or give "
                "another eos_token"
            )
        return found

    def _is_spelled(self, token: str) -> bool:
        """Returns whether text that spells the token is encoded as this token."""
        with _library_errors(self._path):  # a model without an unknown token may raise
            return any(
                self._vocab[token] in self.encode(text) for text in (token, f"{token}\n{token} {token}")
            )

    def encode_chat(self, text: str, parts: Sequence[tuple[int, int]]) -> tuple[list[int], list[bool]]:
        self._tokenizer.encode_special_tokens = False
        try:
            found = self._tokenizer.encode(text, add_special_tokens=False)
        finally:
            self._tokenizer.encode_special_tokens = True
        inside = [
            any(end > first and start < after for first, after in parts) for start, end in found.offsets
        ]
        return found.ids, inside

    def has_token(self, name: str) -> bool:
        return name in self._vocab and self.encode_chat(f"a{name}a", [])[0].count(self._vocab[name]) == 1

    def name_of(self, token: int) -> str:
        return str(self._tokenizer.id_to_token(token))

    def special_tokens(self) -> dict[str, str]:
        return {}  # tokenizer_config.json has the special tokens

    def default_eos(self) -> int | str:
        named = [name for name in EOS_NAMES if name in self._special]
        if len(named) == 1:
            if self._is_spelled(named[0]):
                return f"ends documents with {named[0]!r}, and so would text that spells it; {OTHER_SPECIAL}"
            return self._vocab[named[0]]  # the library may replace the id of the file
        if named:
            return f"has several tokens that may end a document ({', '.join(named)})"
        return f"has no token known to end a document (special tokens: {', '.join(self._special) or 'none'})"

    def token_bytes(self) -> list[int]:
        parts = json.dumps([self._content.get("pre_tokenizer"), self._content.get("decoder")])
        is_byte_level = '"ByteLevel"' in parts  # each character of a token is one byte
        added = {token["content"] for token in self._content.get("added_tokens") or []}
        sizes = [0] * self.vocab_size
        for token, number in self._vocab.items():
            if token in self._special:
                continue
            if token not in added:
                token = self._decoded(token)
            if BYTE_TOKEN.fullmatch(token) and not is_byte_level:
                sizes[number] = 1
            elif is_byte_level and token not in added:
                sizes[number] = len(token)
            else:
                sizes[number] = len(token.replace("\u2581", " ").encode())
        return sizes

    def _decoded(self, token: str) -> str:
        """Returns a token's text without the marks `##` (inside a word) and `</w>` (end of a word)."""
        model = self._content["model"]
        inside, end = (model.get(name) or "" for name in ("continuing_subword_prefix", "end_of_word_suffix"))
        if inside and token.startswith(inside):
            token = token.removeprefix(inside)
        elif model.get("type") == "WordPiece":
            token = f" {token}"
        return f"{token.removesuffix(end)} " if end and token.endswith(end) else token


@contextmanager
def _library_errors(path: str) -> Iterator[None]:
    """Convert errors to TokenizerError, because the library raises plain Exception if it cannot parse a file."""
    try:
        yield
    except Exception as error:
        if type(error) is not Exception:
            raise
        raise TokenizerError(
            f"tokenizer file {path!r} is not a tokenizer.json that `tokenizers` reads ({error})"
        ) from error
