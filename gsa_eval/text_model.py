"""Load a model that generates text, and its tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from transformers import AutoTokenizer

from gsa_data.tokenize import TOKENIZER_JSON
from gsa_eval.evaluated_model import Execution, Source, load_evaluated_model
from gsa_hf import GSAForCausalLM


@dataclass(frozen=True)
class TextModel:
    model: GSAForCausalLM
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    vocab_size: int
    """Number of the tokenizer's tokens. The model may have more, which are unused."""


def load_text_model(source: Source, attention: str) -> TextModel:
    """
    Args:
        attention: as in `Execution`.

    Raises:
        ValueError: the model or its tokenizer cannot be read, or the model cannot run with this attention.
    """
    evaluated = load_evaluated_model(source, execution=Execution(attention=attention))
    ours = evaluated.tokenizer
    assert evaluated.model.generation_config is not None
    evaluated.model.generation_config.eos_token_id = list(ours.stop_ids)
    if source.hf is None:
        return TextModel(
            evaluated.model,
            lambda text: ours.encode_prompt(text).tolist(),
            lambda tokens: ours.decode(tokens, without_special=True),
            ours.vocab_size,
        )
    try:
        theirs = AutoTokenizer.from_pretrained(source.hf, trust_remote_code=False)
        theirs("")  # fails if a setting, such as model_max_length, is of a wrong type
    except Exception as error:  # tokenizers raises this class for damaged files
        reason = " ".join(str(error).split())
        if "trust_remote_code" in reason:  # transformers asks for it
            raise ValueError(
                f"--hf {source.hf}: its tokenizer is code of the folder, which is never run here; give a folder with a "
                f"tokenizer of transformers' own, as {TOKENIZER_JSON}"
            ) from error
        raise ValueError(
            f"--hf {source.hf}: its tokenizer's files cannot be read ({reason}); copy the folder from its source again"
        ) from error
    return TextModel(
        evaluated.model,
        lambda text: list(theirs(text)["input_ids"]),
        lambda tokens: str(theirs.decode(tokens, skip_special_tokens=True)),
        # Not the number of ids, because ids may have gaps.
        max(theirs.get_vocab().values()) + 1,
    )
