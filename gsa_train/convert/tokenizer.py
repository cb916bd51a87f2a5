"""A run's tokenizer as transformers' AutoTokenizer loads it, with the same ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from sentencepiece import sentencepiece_model_pb2
from tokenizers import decoders, models, normalizers
from transformers import AutoTokenizer

from gsa_data.chat_template import TEMPLATE_FILE, ChatTemplate
from gsa_data.tokenize import TOKENIZER_JSON, Tokenizer

PROBES = (
    "",
    "The quick brown fox.",
    " one space in front, two  and   three between, two behind  ",
    "\n",
    "a\nb\n\n\nc\r\nd\te",
    "def f(x):\n\n\tif x:  # comment\n        return 1234567890\n",
    "naïve café, Ünïcödé, 日本語テキスト, русский, العربية, हिन्दी",
    "😀 👩‍👩‍👧‍👦 \U0001f1e9\U0001f1ea \u200b\u00a0\u3000\ufeff",
    "½ ﬁ Å ① ％ e\u0301",
    "\x00\x01\x7f\u0080",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa      \n      bbbb",
    'https://example.org/?q=1&r=%20#x {"key": [1, 2.5e-3, null]}',
)
"""Text on which two tokenizers with different rules differ: white space, newlines, characters that only bytes spell,
compatibility characters, long repetitions."""

# Kinds of sentencepiece's pieces.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5
UNIGRAM, BPE = 1, 2


def write_tokenizer(
    tokenizer: Tokenizer, folder: Path, max_length: int, template: ChatTemplate | None = None
) -> None:
    """Write the run's file, a tokenizer.json, tokenizer_config.json and the chat template.

    Args:
        max_length: tokens of a sequence that the model was trained on.
        template: of the conversations that it was trained on.

    Raises:
        ValueError: what AutoTokenizer makes of it gives other ids for some text.
    """
    (folder / tokenizer.file_name).write_bytes(tokenizer.file)
    if tokenizer.file_name != TOKENIZER_JSON:
        (folder / TOKENIZER_JSON).write_text(convert_sentencepiece(tokenizer.file, tokenizer.path))
    loaded = tokenizers.Tokenizer.from_file(str(folder / TOKENIZER_JSON))
    known = {
        name: token
        for name, token in (template.special_tokens if template else {}).items()
        if loaded.token_to_id(token) is not None
    }
    settings: dict[str, Any] = {
        **known,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": loaded.id_to_token(tokenizer.eos_id),
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n")
    if template is not None:
        (folder / TEMPLATE_FILE).write_text(template.source, encoding="utf-8")
    check_same_ids(tokenizer, folder)


def check_same_ids(tokenizer: Tokenizer, folder: Path) -> None:
    """
    Raises:
        ValueError: AutoTokenizer gives other ids than training, with the text.
    """
    theirs = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    for text in PROBES:
        expected = tokenizer.encode(text).tolist()
        found = theirs(text, add_special_tokens=False, verbose=False)["input_ids"]
        if found != expected:
            raise ValueError(
                f"tokenizer {tokenizer.path}: transformers gives {text!r} the ids {found[:12]}, training "
                f"{expected[:12]}. The model would read other text than it was trained on; train with a tokenizer.json "
                "instead"
            )
    if theirs.eos_token_id != tokenizer.eos_id:
        raise ValueError(
            f"tokenizer {tokenizer.path}: transformers gives the end of a document the id {theirs.eos_token_id}, "
            f"training {tokenizer.eos_id}"
        )


def convert_sentencepiece(file: bytes, path: str) -> str:
    """A sentencepiece model as the content of a tokenizer.json.

    Raises:
        ValueError: its kind of model has no counterpart.
    """
    messages: Any = sentencepiece_model_pb2  # whose classes are made when it is imported
    proto = messages.ModelProto()
    proto.ParseFromString(file)
    trainer, rules = proto.trainer_spec, proto.normalizer_spec
    pieces = [piece.piece for piece in proto.pieces]
    if trainer.model_type == BPE:
        model: Any = models.BPE(
            vocab={piece: token for token, piece in enumerate(pieces)},
            merges=_merges(proto),
            unk_token=pieces[trainer.unk_id],
            fuse_unk=True,
            byte_fallback=trainer.byte_fallback,
        )
    elif trainer.model_type == UNIGRAM:
        scores = [(piece.piece, piece.score) for piece in proto.pieces]
        model = models.Unigram(scores, trainer.unk_id, trainer.byte_fallback)
    else:
        raise ValueError(
            f"tokenizer {path}: a sentencepiece model of words or characters has no counterpart in tokenizer.json; "
            "train with one of BPE or unigram"
        )
    if trainer.treat_whitespace_as_suffix or not rules.escape_whitespaces:
        raise ValueError(
            f"tokenizer {path}: its white space (treat_whitespace_as_suffix, escape_whitespaces) has no counterpart in "
            "tokenizer.json; train with sentencepiece's default for both"
        )
    converted = tokenizers.Tokenizer(model)
    converted.normalizer = normalizers.Sequence(_normalizers(rules))
    back: list[Any] = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    converted.decoder = decoders.Sequence(back + [decoders.Strip(" ", 1, 0)] * rules.add_dummy_prefix)
    for piece in proto.pieces:
        if piece.type in (UNKNOWN, CONTROL):
            converted.add_special_tokens([tokenizers.AddedToken(piece.piece, special=True, normalized=False)])
        elif piece.type == USER_DEFINED:
            converted.add_tokens([tokenizers.AddedToken(piece.piece, special=False, normalized=False)])
    content: str = converted.to_str(pretty=False)
    return content


def _normalizers(rules: Any) -> list[Any]:
    """In sentencepiece's order."""
    found: list[Any] = []
    if rules.precompiled_charsmap:
        found.append(normalizers.Precompiled(rules.precompiled_charsmap))
    if rules.remove_extra_whitespaces:  # of spaces alone
        found.append(normalizers.Replace(tokenizers.Regex(r"\A +| +\z"), ""))
        found.append(normalizers.Replace(tokenizers.Regex(" {2,}"), " "))
    if rules.add_dummy_prefix:
        found.append(normalizers.Prepend("\u2581"))
    return [*found, normalizers.Replace(" ", "\u2581")]


def _merges(proto: Any) -> list[tuple[str, str]]:
    """All pairs of pieces that make a piece, in the order in which sentencepiece joins them: best score first."""
    scores = {piece.piece: piece.score for piece in proto.pieces if piece.type == NORMAL}
    found = [
        (-score, number, piece[:cut], piece[cut:])
        for number, (piece, score) in enumerate(scores.items())
        for cut in range(1, len(piece))
        if piece[:cut] in scores and piece[cut:] in scores
    ]
    return [(left, right) for _, _, left, right in sorted(found)]
