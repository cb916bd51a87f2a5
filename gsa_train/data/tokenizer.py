"""Load the tokenizer of a config without importing torch, which a dry run does not need."""

from __future__ import annotations

from gsa_data.chat_template import ChatEncoder, ChatTemplate, find_chat_template
from gsa_data.companions import Companions, read_companions, set_up_tokenizer
from gsa_data.faults import Reading
from gsa_data.tokenize import Tokenizer, TokenizerError
from gsa_train.config import Config


def reading_of(config: Config) -> Reading:
    data = config.data
    return Reading(
        on_bad_shard=data.on_bad_shard,
        max_bad_line_fraction=data.max_bad_line_fraction,
        max_document_bytes=data.max_document_bytes,
        retries=data.read_retries,
        timeout_seconds=data.read_timeout_seconds,
    )


def load_tokenizer(config: Config) -> Tokenizer:
    """Load the tokenizer. Raises TokenizerError if the tokenizer is missing, has too many tokens for the model, or
    lacks a usable chat template (`data.format=chat`)."""
    try:
        tokenizer = Tokenizer(config.data.tokenizer, config.data.eos_token or None, reading_of(config))
    except TokenizerError as error:
        raise TokenizerError(f"data.tokenizer: {error}") from error
    if config.data.format == "chat":
        try:
            ChatEncoder(chat_template_of(config), tokenizer)
            set_up_tokenizer(tokenizer, companions_of(config))
        except TokenizerError as error:
            raise TokenizerError(f"data.chat_template: {error}") from error
    if tokenizer.vocab_size > config.model.vocab_size:
        raise TokenizerError(
            f"model.vocab_size = {config.model.vocab_size}: {config.data.tokenizer} has {tokenizer.vocab_size} "
            f"tokens; set model.vocab_size to at least that"
        )
    return tokenizer


def chat_template_of(config: Config) -> ChatTemplate:
    """Load the chat template. Raises TokenizerError if there is none, or several."""
    return find_chat_template(config.data.tokenizer, config.data.chat_template, reading_of(config))


def companions_of(config: Config) -> Companions:
    """Returns the files that checkpoints keep in addition to the tokenizer.

    A run on conversations (`data.format=chat`) needs these files, and so does a run that starts from its weights.

    Raises TokenizerError if a file is damaged, or a run on conversations has no template.
    """
    template = chat_template_of(config) if config.data.format == "chat" else None
    if template is None and not config.checkpoint.initial_weights:
        return Companions()
    return read_companions(config.data.tokenizer, template, reading_of(config))
