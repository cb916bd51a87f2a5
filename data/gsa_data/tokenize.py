"""Convert text to token ids with a sentencepiece model or a Hugging Face tokenizer.json, each by its own library."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import pairwise

import numpy as np
import sentencepiece
from numpy.typing import NDArray

from gsa_data.faults import DEFAULT_READING, Reading
from gsa_data.fetch import NoSuchKind, read_bytes
from gsa_data.tokenizer_json import TokenizerError as TokenizerError
from gsa_data.tokenizer_json import TokenizerJson
from gsa_data.whole_files import MOST_BYTES

TOKENIZER_JSON = "tokenizer.json"
SENTENCEPIECE_MODEL = "tokenizer.model"
"""Names of a tokenizer's file in a folder, as in Hugging Face's repositories"""
EOS_MARK = " eos="
"""The separator between the file's fingerprint and the id of an EOS that is not the file's default"""
Part = tuple[int, int]
"""Start and end of a part of a text, in characters"""

WORD_START = "\u2581"
"""The character with which sentencepiece writes a space inside a piece"""


class Tokenizer:
    """Encodes and decodes text. Data workers can receive the tokenizer by pickle.

    Args:
        path: a sentencepiece model or a `tokenizer.json`, local or at an fsspec address
        eos_token: text of the token that ends each document. By default, it is the EOS of a sentencepiece file, or the
            only special token of a tokenizer.json with a usual name (tokenizer_json.EOS_NAMES).
        reading: limits and retries for reading the file

    Attributes:
        file: the file's content
        eos_id: the token that ends each document
        vocab_size: the largest id + 1
        fingerprint: the file's sha256, plus the id of `eos_token` if `eos_token` is not the file's default
        stop_ids: the tokens that end a generated text: `eos_id`, and the tokens that companions.set_up_tokenizer adds
        is_chat: whether the model is a chat model. If so, text such as `<|im_end|>` in a prompt becomes the special
            token

    Raises TokenizerError if the file is missing, has an unknown format, or has no such EOS.
    """

    def __init__(self, path: str, eos_token: str | None = None, reading: Reading = DEFAULT_READING) -> None:
        self.path = path
        self.eos_token = eos_token
        try:
            self.file = read_bytes(path, reading, Counter(), MOST_BYTES)
        except OSError as error:
            if isinstance(error, FileNotFoundError | IsADirectoryError):
                wrong = f"tokenizer file {path!r} does not exist; give a sentencepiece .model file or a tokenizer.json"
            else:
                reason = error if isinstance(error, NoSuchKind) else repr(error)
                wrong = f"tokenizer file {path!r} cannot be read ({reason}); check address and access"
            raise TokenizerError(wrong) from error
        self.fingerprint = hashlib.sha256(self.file).hexdigest()
        self._load()
        default = self._model.default_eos()
        if eos_token is not None:
            eos_id = self._model.id_of(eos_token)
            if eos_id is None:
                raise TokenizerError(f"tokenizer {path!r} has no token {eos_token!r}; give another eos_token")
            if eos_id != default:
                self.fingerprint += f"{EOS_MARK}{eos_id}"
            self.eos_id = eos_id
        elif isinstance(default, str):
            raise TokenizerError(
                f"tokenizer {path!r} {default}; name the token that ends a document as eos_token"
            )
        else:
            self.eos_id = default
        self.stop_ids: tuple[int, ...] = (self.eos_id,)
        self.is_chat = False

    def encode(self, text: str | bytes) -> NDArray[np.int32]:
        """Returns the token ids of one document, [tokens], without an EOS. Bytes must be UTF-8."""
        return np.asarray(self._model.encode(text), dtype=np.int32)

    def encode_prompt(self, text: str) -> NDArray[np.int32]:
        """Returns the token ids of a prompt, encoded as in training."""
        return self.encode_chat(text, [])[0] if self.is_chat else self.encode(text)

    def decode(self, tokens: NDArray[np.int32] | Sequence[int], without_special: bool = False) -> str:
        """Returns the text of tokens. Sentencepiece's control symbols never give text."""
        return self._model.decode(np.asarray(tokens, dtype=np.int64).tolist(), without_special)

    @property
    def file_name(self) -> str:
        """Returns the name for a copy of the file: `tokenizer.json` or `tokenizer.model`."""
        return TOKENIZER_JSON if isinstance(self._model, TokenizerJson) else SENTENCEPIECE_MODEL

    def encode_chat(self, text: str, parts: Sequence[Part]) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Returns the token ids of a rendered conversation, and whether each token overlaps one of `parts`: [tokens].

        Unlike `encode`, this function turns the text of a special token into the token itself. As in transformers'
        apply_chat_template, the text is split only at special tokens (in sentencepiece, at control symbols). The
        boundaries of `parts` do not split the text, so a token may cross a boundary.
        """
        tokens, inside = self._model.encode_chat(text, parts)
        return np.asarray(tokens, dtype=np.int32), np.asarray(inside, dtype=np.bool_)

    def has_token(self, name: str) -> bool:
        """Returns whether `encode_chat` always encodes this text as one token."""
        return self._model.has_token(name)

    def name_of(self, token: int) -> str:
        return self._model.name_of(token)

    def symbol_in(self, text: str) -> int | None:
        """Returns the first special or added token of a rendered text."""
        tokens = self.encode_chat(text, [])[0].tolist()
        return next((token for token in tokens if token in self._model.symbols.values()), None)

    @property
    def special_tokens(self) -> dict[str, str]:
        """Returns the file's special tokens by their names in chat templates (`bos_token`, ...), with `eos_token`."""
        return {"eos_token": self._model.name_of(self.eos_id), **self._model.special_tokens()}

    @property
    def front_bytes(self) -> int:
        """Returns the number of bytes that the tokenizer adds before each text, such as sentencepiece's dummy space.
        `token_bytes` counts these bytes in the first token."""
        return max(int(self.token_bytes[self.encode("a")].sum()) - 1, 0)

    @property
    def keeps_newlines(self) -> bool:
        """Returns whether newlines survive encoding and decoding. Sentencepiece's default flags lose newlines."""
        return self.decode(self.encode("\n\n")) == "\n\n"

    @cached_property
    def token_bytes(self) -> NDArray[np.int32]:
        """Returns the number of UTF-8 bytes of each token's text, [vocab_size]. EOS, unknown and the like have 0."""
        return np.array(self._model.token_bytes(), dtype=np.int32)

    def differs_from(self, fingerprint: str) -> str:
        """Returns an error text for a saved fingerprint of another tokenizer: the difference and the remedy."""
        file, _, end = fingerprint.partition(EOS_MARK)
        if file != self.fingerprint.partition(EOS_MARK)[0]:
            return f"data.tokenizer = {self.path} is another file, with other pieces; use that run's tokenizer file"
        default = self._model.default_eos()
        other = int(end) if end.isdecimal() else default
        name = self.name_of(other) if isinstance(other, int) else "the file's own"
        return (
            f"data.eos_token = {self.eos_token or 'the default'} of the same tokenizer file ends documents with "
            f"{self.name_of(self.eos_id)!r} (token {self.eos_id}), and there {name!r} (token {other}) ended them; set "
            f"data.eos_token={name}"
        )

    def _load(self) -> None:
        self._model: TokenizerJson | SentencePieceModel
        if self.file.lstrip()[:1] == b"{":
            self._model = TokenizerJson(self.file, self.path)
        else:
            self._model = SentencePieceModel(self.file, self.path)
        self.vocab_size = self._model.vocab_size

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_model", "token_bytes")}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._load()


def check_text(text: str, place: str) -> str:
    """Returns the text, if it is UTF-8. Command-line arguments may hold other bytes, which tokenizers refuse.

    Args:
        place: origin of the text, for the error

    Raises:
        ValueError: the text has bytes that are not UTF-8
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{place}: character {error.start + 1} is not UTF-8; give text in UTF-8") from None
    return text


def text_after(decode: Callable[[list[int]], str], prompt: list[int], new: list[int]) -> str:
    """Returns the text that new tokens add to a prompt. Decoding only new tokens may drop a leading space."""
    if not new:
        return ""
    before, whole = decode(prompt), decode([*prompt, *new])
    return whole[len(before) :] if whole.startswith(before) else decode(new)


class SentencePieceModel:
    def __init__(self, file: bytes, path: str) -> None:
        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(file)
        except RuntimeError as error:  # sentencepiece cannot parse the file
            hint = "; give a sentencepiece .model file or a tokenizer.json"
            if _is_tiktoken(file):
                hint = ": it is a tiktoken file, as Llama 3's tokenizer.model is; give that model's tokenizer.json"
            raise TokenizerError(f"tokenizer file {path!r} is not a sentencepiece model{hint}") from error
        self._path = path
        self.vocab_size = int(self._processor.vocab_size())

    def encode(self, text: str | bytes) -> NDArray[np.int32]:
        # Ask for numpy, because making a list of int would take 6% of the time.
        tokens: NDArray[np.int32] = self._processor.encode(text, out_type="numpy")
        return tokens

    def decode(self, tokens: list[int], without_special: bool) -> str:
        return str(self._processor.decode(tokens))

    def id_of(self, token: str) -> int | None:
        found = int(self._processor.piece_to_id(token))  # the id of the unknown token for an unknown text
        if self._processor.id_to_piece(found) != token:
            return None
        if not self._processor.is_control(found):  # text can produce all other tokens
            raise TokenizerError(
                f"tokenizer {self._path!r}: {token!r} is not a control symbol, so text would end its document; give a "
                "control symbol of the model as eos_token"
            )
        return found

    def default_eos(self) -> int | str:
        """Returns the end-of-document token that the file defines, or the reason why it defines none."""
        eos_id = int(self._processor.eos_id())
        return "has no EOS token" if eos_id < 0 else eos_id

    def name_of(self, token: int) -> str:
        return str(self._processor.id_to_piece(token))

    def has_token(self, name: str) -> bool:
        found = int(self._processor.piece_to_id(name))
        is_piece = self._processor.id_to_piece(found) == name
        return is_piece and self.encode_chat(f"a{name}a", [])[0].count(found) == 1

    def special_tokens(self) -> dict[str, str]:
        model = self._processor
        ids = {"bos_token": model.bos_id(), "unk_token": model.unk_id(), "pad_token": model.pad_id()}
        return {name: self.name_of(token) for name, token in ids.items() if token >= 0}

    @cached_property
    def symbols(self) -> dict[str, int]:
        """Returns piece -> id of the control symbols, which `encode_chat` finds before it encodes the rest."""
        model = self._processor
        return {self.name_of(token): token for token in range(self.vocab_size) if model.is_control(token)}

    def encode_chat(self, text: str, parts: Sequence[Part]) -> tuple[list[int], list[bool]]:
        control = self.symbols
        longest_first = sorted(control, key=len, reverse=True)
        found = re.finditer("|".join(map(re.escape, longest_first)) or "(?!)", text)  # (?!) matches nothing
        bounds = {0, len(text), *(bound for each in found for bound in each.span())}
        tokens: list[int] = []
        spans: list[Part] = []
        for start, end in pairwise(sorted(bounds)):
            piece = text[start:end]
            if piece in control:
                tokens.append(control[piece])
                spans.append((start, end))
                continue
            encoded = self._processor.encode(piece, out_type="offset_mapping")
            tokens += encoded["ids"]
            # Only the last byte of a character has the character's offsets. The other bytes have empty offsets.
            spans += [(start + first, start + max(after, first + 1)) for first, after in encoded["offsets"]]
        return tokens, [any(end > first and start < after for first, after in parts) for start, end in spans]

    def token_bytes(self) -> list[int]:
        model = self._processor
        pieces = (model.id_to_piece(token).replace(WORD_START, " ") for token in range(self.vocab_size))
        sizes = [1 if model.is_byte(token) else len(piece.encode()) for token, piece in enumerate(pieces)]
        for token in range(self.vocab_size):
            if model.is_control(token) or model.is_unknown(token) or model.is_unused(token):
                sizes[token] = 0
        return sizes


def _is_tiktoken(file: bytes) -> bool:
    """Returns whether the first line has base64 text and a rank."""
    word, _, rank = file.partition(b"\n")[0].partition(b" ")
    return rank.isdigit() and word.rstrip(b"=").replace(b"+", b"").replace(b"/", b"").isalnum()
