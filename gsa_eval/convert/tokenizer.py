"""Convert a run's tokenizer to a form that transformers' AutoTokenizer loads, with the same ids."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from sentencepiece import sentencepiece_model_pb2
from tokenizers import decoders, models, normalizers
from transformers import AutoTokenizer

from gsa_data.chat_template import CONFIG_FILE, TEMPLATE_FILE, TRIAL, ChatEncoder, TemplateRefused
from gsa_data.companions import Companions, read_companions, set_up_tokenizer
from gsa_data.tokenize import SENTENCEPIECE_MODEL, TOKENIZER_JSON, Tokenizer, TokenizerError
from gsa_eval.convert.read_hf import named_eos
from gsa_hf import GSAConfig

PROBES = (
    "",
    "The quick brown fox.",
    " one space in front, two  and   three between, two after  ",
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
"""Texts that reveal differences between tokenizers: white space, newlines, characters spelled only by bytes,
compatibility characters, long repetitions."""

# These are the kinds of sentencepiece's pieces.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
UNIGRAM, BPE = 1, 2

NO_COMPANIONS = Companions()


@dataclass(frozen=True)
class TokenizerChoice:
    """The user's choice of tokenizer, if it differs from the folder's tokenizer."""

    file: Path | None = None
    eos_token: str | None = None
    """Token that ends a document; None: the folder's token."""


def folder_tokenizer(folder: Path, found: Any, choice: TokenizerChoice | None = None) -> Tokenizer:
    """Load the tokenizer of a transformers folder, with its EOS and all stop tokens.

    Raises:
        ValueError: the tokenizer is missing, of an unsupported kind, or its accompanying files are damaged.
    """
    choice = choice or TokenizerChoice()
    is_ours = found.model_type == GSAConfig.model_type
    path = choice.file
    if path is None:
        # The run's own file comes first in an exported folder. Elsewhere tokenizer.json does, with tokens added later.
        names = (SENTENCEPIECE_MODEL, TOKENIZER_JSON)
        order = names if is_ours else names[::-1]
        path = next((folder / name for name in order if (folder / name).is_file()), None)
    if path is None:
        raise ValueError(
            f"{folder} has no {TOKENIZER_JSON} and no {SENTENCEPIECE_MODEL}; "
            "give it to an import by --tokenizer FILE, or "
            "copy the model's own there"
        )
    tokenizer = _with_eos(path, choice.eos_token or named_eos(folder))
    if is_ours and choice.eos_token is None and isinstance(found.eos_token_id, list):
        # The first token of the exported list ends a document. The EOS of tokenizer_config.json may end turns instead.
        tokenizer = _with_eos(path, tokenizer.name_of(found.eos_token_id[0]))
    set_up_tokenizer(tokenizer, read_companions(str(folder / TOKENIZER_JSON)))
    return tokenizer


def _with_eos(path: Path, named: str | None) -> Tokenizer:
    """Load the tokenizer with the EOS `named`. The fingerprint contains only an EOS that is not the file's default."""
    try:
        tokenizer = Tokenizer(str(path))
    except TokenizerError:
        if named is None:
            raise
        return Tokenizer(str(path), named)
    if named is None:
        return tokenizer
    other = Tokenizer(str(path), named)
    return tokenizer if other.eos_id == tokenizer.eos_id else other


def write_tokenizer(
    tokenizer: Tokenizer,
    folder: Path,
    max_length: int,
    companions: Companions = NO_COMPANIONS,
    was_trained: bool = True,
) -> None:
    """Write the run's tokenizer file, a tokenizer.json, tokenizer_config.json and the chat template.

    Args:
        max_length: tokens of a training sequence.
        companions: the chat template and the special tokens.
        was_trained: whether the model was trained here. If so, the written tokenizer adds no token to a text,
            as in training.

    Raises:
        ValueError: AutoTokenizer encodes a probe text to other ids than training.
    """
    template = companions.template
    (folder / tokenizer.file_name).write_bytes(tokenizer.file)
    if tokenizer.file_name != TOKENIZER_JSON:
        (folder / TOKENIZER_JSON).write_text(convert_sentencepiece(tokenizer.file, tokenizer.path))
    loaded = tokenizers.Tokenizer.from_file(str(folder / TOKENIZER_JSON))
    named = _special_tokens(tokenizer, companions)
    settings: dict[str, Any] = {
        **{name: value for name, value in named.items() if loaded.token_to_id(value) is not None},
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
    }
    if was_trained and loaded.num_special_tokens_to_add(is_pair=False):
        # The file adds tokens to each text, such as Llama's <|begin_of_text|> in front. Training did not.
        content = json.loads((folder / TOKENIZER_JSON).read_text(encoding="utf-8"))
        plain = json.dumps({**content, "post_processor": None}, ensure_ascii=False)
        (folder / TOKENIZER_JSON).write_text(plain, encoding="utf-8")
    (folder / CONFIG_FILE).write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n")
    if template is not None:
        (folder / TEMPLATE_FILE).write_text(template.source, encoding="utf-8")
    check_same_ids(tokenizer, folder, companions, was_trained)


def check_same_ids(
    tokenizer: Tokenizer, folder: Path, companions: Companions = NO_COMPANIONS, was_trained: bool = True
) -> None:
    """Compare the ids of AutoTokenizer with the ids of training, for probe texts and a conversation of two turns.

    Raises:
        ValueError: the ids of a text differ. The error names the text.
    """
    theirs = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    calls: list[dict[str, Any]] = [{"add_special_tokens": False}, *([{}] if was_trained else [])]
    for text in PROBES:
        expected = tokenizer.encode(text).tolist()
        for call in calls:
            _compare(tokenizer, text, theirs(text, verbose=False, **call)["input_ids"], expected)
    if theirs.eos_token != (name := _special_tokens(tokenizer, companions)["eos_token"]):
        raise ValueError(
            f"tokenizer {tokenizer.path}: transformers has eos_token {theirs.eos_token}, training {name}"
        )
    if companions.template is None:
        return
    try:
        text = ChatEncoder(companions.template, tokenizer, trains=False).render_text(TRIAL)
    except TemplateRefused:  # transformers refuses it, too
        return
    found: Any = theirs.apply_chat_template(TRIAL, return_dict=False)
    _compare(tokenizer, text, found, tokenizer.encode_chat(text, [])[0].tolist())


def _special_tokens(tokenizer: Tokenizer, companions: Companions) -> dict[str, str]:
    """Returns special tokens for tokenizer_config.json. If the chat template mentions `eos_token`, its `eos_token` is
    used, otherwise the token that ends a document."""
    named = {**companions.special_tokens, "eos_token": tokenizer.name_of(tokenizer.eos_id)}
    if (template := companions.template) is not None:
        variables = ChatEncoder(template, tokenizer, trains=False).variables
        named |= {name: value for name, value in variables.items() if template.mentions(name)}
    return named


def _compare(tokenizer: Tokenizer, text: str, found: list[int], expected: list[int]) -> None:
    if found != expected:
        raise ValueError(
            f"tokenizer {tokenizer.path}: transformers gives {text!r} the ids {found[:12]}, training "
            f"{expected[:12]}. The model would read other text than it was trained on; train with a tokenizer.json "
            "instead"
        )


def convert_sentencepiece(file: bytes, path: str) -> str:
    """Convert a sentencepiece model to the content of a tokenizer.json.

    Raises:
        ValueError: tokenizer.json cannot represent this kind of model.
    """
    messages: Any = sentencepiece_model_pb2  # its classes are created at import
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
    """Returns the normalizers in sentencepiece's order."""
    found: list[Any] = []
    if rules.precompiled_charsmap:
        found.append(normalizers.Precompiled(rules.precompiled_charsmap))
    if rules.remove_extra_whitespaces:  # removes spaces only
        found.append(normalizers.Replace(tokenizers.Regex(r"\A +| +\z"), ""))
        found.append(normalizers.Replace(tokenizers.Regex(" {2,}"), " "))
    if rules.add_dummy_prefix:
        found.append(normalizers.Prepend("\u2581"))
    return [*found, normalizers.Replace(" ", "\u2581")]


def _merges(proto: Any) -> list[tuple[str, str]]:
    """Returns the BPE merges: all pairs of pieces that form a piece, best score first, as sentencepiece joins them."""
    scores = {piece.piece: piece.score for piece in proto.pieces if piece.type == NORMAL}
    found = [
        (-score, number, piece[:cut], piece[cut:])
        for number, (piece, score) in enumerate(scores.items())
        for cut in range(1, len(piece))
        if piece[:cut] in scores and piece[cut:] in scores
    ]
    return [(left, right) for _, _, left, right in sorted(found)]
