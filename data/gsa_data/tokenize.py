"""Text to token ids with a sentencepiece model, which is the truth (other wrappers of it differ)."""

from __future__ import annotations

import hashlib

import fsspec
import numpy as np
import sentencepiece
from numpy.typing import NDArray


class Tokenizer:
    """A sentencepiece model with an end-of-document token. Can be pickled into data workers.

    `eos_id` ends each document, `vocab_size` counts the model's entries, and `fingerprint` is the sha256 of
    the model file. Raises ValueError when the file is missing, is no model, or has no EOS.
    """

    def __init__(self, path: str) -> None:
        try:
            with fsspec.open(path, "rb") as file:
                self._model: bytes = file.read()
        except FileNotFoundError as error:
            raise ValueError(
                f"tokenizer file {path!r} does not exist; give a sentencepiece .model file"
            ) from error
        self.path = path
        self.fingerprint = hashlib.sha256(self._model).hexdigest()
        self._load()
        if self.eos_id < 0:
            raise ValueError(f"tokenizer {path!r} has no EOS token; train it with an eos_id of 0 or more")

    def encode(self, text: str | bytes) -> NDArray[np.int32]:
        """Token ids of one document, shape [tokens], with no EOS added. Bytes must be UTF-8."""
        return np.asarray(self._processor.encode(text), dtype=np.int32)

    def decode(self, tokens: NDArray[np.int32]) -> str:
        return str(self._processor.decode(tokens.tolist()))

    def _load(self) -> None:
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=self._model)
        except RuntimeError as error:  # what sentencepiece raises for a file it cannot parse
            raise ValueError(f"tokenizer file {self.path!r} is not a sentencepiece model") from error
        self.eos_id = int(self._processor.eos_id())
        self.vocab_size = int(self._processor.vocab_size())

    def __getstate__(self) -> dict[str, object]:
        return {"path": self.path, "fingerprint": self.fingerprint, "_model": self._model}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._load()
