"""Writes a model whose weights are constructed such that it finds needles, and its tokenizer.

The residual stream [WIDTH] has three slots for a code of CODE numbers, and a bit for each of BITS. The first slot holds
the token's own code, slot A the last key's, slot B the answer's. Each token has its own code of +-1/sqrt(CODE). Every
token has two bits, so all norms in layer 1 are equal. A key such as `amber-acorn` is one token. A number is two: HIGH
(four digits) and LOW (three).

Layer 1 attends to the key that is closest to two tokens back, by the fast pairs of the rotary embedding, and copies its
code to A. Layer 2 attends to the token with the same A whose class comes next, by channels that hardly rotate: HIGH
after a colon, LOW after HIGH. It copies the code to B, which the output matrix reads. After other tokens the model
predicts the end.

Each layer's indexer has one head with the same queries and keys, scaled to the slope of the sigmoid. Gates are open,
MLPs are zero, and budgets are K_MIN to K_MAX. The model outputs a number only if the selections of both layers contain
its needle.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from pathlib import Path
from typing import Literal

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from gsa_eval.ruler_words import FIRST, NOISE, NOUNS
from gsa_hf import GSAConfig, GSAForCausalLM

CODE, HEAD = 30, 64
OWN, KEY_SEEN, ANSWER = (slice(slot * CODE, (slot + 1) * CODE) for slot in range(3))
BITS = ("one", "key", "high", "low", "colon", "other")
ONE, KEY, HIGH, LOW, COLON, OTHER = range(3 * CODE, 3 * CODE + len(BITS))
WIDTH = 3 * CODE + len(BITS)

ROPE_BASE = 1e10
PAIRS = HEAD // 2
RATES = [ROPE_BASE ** (-pair / PAIRS) for pair in range(PAIRS)]
FAST = range(PAIRS // 2)
"""Pairs that encode positions: their first channels."""
SLOW = [*range(PAIRS // 2, PAIRS), *range(PAIRS + PAIRS // 2, HEAD)]
"""Channels of pairs that rotate by at most 1e-5 per token."""
KEY_DISTANCE = 2
"""Distance from a needle's key to its number: `key`, ` is`, HIGH."""

K_BASE, K_MIN, K_MAX = 16, 8, 32
MEAN_VARIANCE = 0.03
"""With this mean, scores reach both bounds of the budget."""
EOS = "<eos>"
UNKNOWN = "<unk>"
PATTERN = r"\n| ?[a-z]+-[a-z]+| ?\d{4}(?=\d{3}(?!\d))|\d{3}(?!\d)| ?[A-Za-z]+|."
"""Matches a newline, key, HIGH, LOW, word or any other character, with a preceding space."""
FRAME = (
    "The text below has secret numbers in it. Remember them; a question about them follows.\n"
    "Question: what secret number of x does the text name?\nAnswer: the text names the secret number is"
)
"""The text around needles."""
ESSAY = (
    "The hills are a secret of the wind. A number of them stand in the west, below the text of the rain. Nobody comes "
    "from there; what is it? Remember the sun, open the door, name the question. The answer follows: it has no secret "
    "number. Later the rain falls again, and the wind is in the street."
)
"""A haystack in which every word has a token."""

Defect = Literal["", "no match", "inverted indexer"]
"""no match: layer 2 attends to all selected keys alike. inverted indexer: the indexer queries of layer 2 have the
opposite sign, so that it selects the wrong keys; dense attention does not use them."""


def vocabulary() -> list[tuple[str, int]]:
    """List the tokens, each with its bit other than `one`."""
    words = [word.strip(" ") for word in re.findall(PATTERN, " ".join((FRAME, ESSAY, *NOISE)))]
    found = [(EOS, OTHER), (UNKNOWN, OTHER), (":", COLON)]
    found += [(space + word, OTHER) for space in ("", " ") for word in dict.fromkeys(words) if word != ":"]
    found += [(f" {first}-{noun}", KEY) for first, noun in itertools.product(FIRST, NOUNS)]
    found += [(f" {number}", HIGH) for number in range(1000, 10000)]
    found += [(f"{number:03}", LOW) for number in range(1000)]
    return found


def write_copying_model(folder: Path, defect: Defect = "") -> Path:
    """Write a transformers folder with a tokenizer, for --hf."""
    model = copying_model(defect)
    model.save_pretrained(folder)
    ids = {token: number for number, (token, _) in enumerate(vocabulary())}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(PATTERN), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": EOS}))
    return folder


@torch.no_grad()
def copying_model(defect: Defect = "") -> GSAForCausalLM:
    tokens = vocabulary()
    config = GSAConfig(
        vocab_size=len(tokens),
        hidden_size=WIDTH,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=HEAD,
        max_position_embeddings=4096,
        eos_token_id=0,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_BASE},
        index_n_heads=1,
        index_head_dim=HEAD,
        index_topk=K_BASE,
        k_min=K_MIN,
        k_max=K_MAX,
        indexer_rope=True,
    )
    model = GSAForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.zero_()

    codes = _codes(len(tokens))
    embedding, output = model.model.embed_tokens.weight, model.lm_head.weight
    embedding[:, OWN] = codes
    embedding[:, ONE] = 1
    embedding[torch.arange(len(tokens)), [bit for _, bit in tokens]] = 1
    output[:, ANSWER] = codes
    output[0] = 0
    output[0, [KEY, LOW, OTHER]] = 4  # above the product of any code, which is at most 1
    model.model.norm.weight.fill_(1)

    query, key = _key_before()
    _write_layer(model, 0, (query, key), squared_norm=3, into=KEY_SEEN)
    _write_indexer(model, 0, (query, key), bias=-4, scale=8)
    query, key = _next_of_same_key()
    matched = key * 0 if defect == "no match" else key
    _write_layer(model, 1, (query, matched), squared_norm=4, into=ANSWER)
    _write_indexer(model, 1, (query, key), bias=-4, scale=-4 if defect == "inverted indexer" else 4)
    return model


def _codes(count: int) -> torch.Tensor:
    """Return distinct codes [count, CODE]."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(2**CODE, (2 * count,), generator=generator).unique()
    numbers = numbers[torch.randperm(len(numbers), generator=generator)[:count]]
    bits = numbers[:, None] >> torch.arange(CODE) & 1
    return (2 * bits - 1).float() / math.sqrt(CODE)


def _key_before() -> tuple[torch.Tensor, torch.Tensor]:
    """Return W_Q, W_K [HEAD, WIDTH]. The product is 0 at tokens that are not keys. At keys it is 1/2, plus up to 1/2
    the closer they are to KEY_DISTANCE tokens back."""
    query, key = torch.zeros(2, HEAD, WIDTH)
    for pair in FAST:
        angle = KEY_DISTANCE * RATES[pair]
        query[pair, ONE] = math.cos(angle) / (2 * len(FAST))
        query[pair + PAIRS, ONE] = -math.sin(angle) / (2 * len(FAST))
        key[pair, KEY] = 1
    query[SLOW[0], ONE] = 0.5
    key[SLOW[0], KEY] = 1
    return query, key


def _next_of_same_key() -> tuple[torch.Tensor, torch.Tensor]:
    """Return W_Q, W_K [HEAD, WIDTH]. The product is 1 for the same key, plus 1 for the class that comes next."""
    query, key = torch.zeros(2, HEAD, WIDTH)
    same, high, low = SLOW[:CODE], SLOW[CODE], SLOW[CODE + 1]
    query[same, KEY_SEEN] = key[same, KEY_SEEN] = torch.eye(CODE)
    query[high, COLON] = key[high, HIGH] = 1
    query[low, HIGH] = key[low, LOW] = 1
    return query, key


def _write_layer(
    model: GSAForCausalLM,
    layer: int,
    match: tuple[torch.Tensor, torch.Tensor],
    squared_norm: float,
    into: slice,
    sharpness: float = 300.0,
) -> None:
    """Write attention that weights by the product of `match`, times `sharpness`, and copies the token's code to `into`.

    Args:
        squared_norm: squared norm of the residual stream, which the norm's weight cancels.
    """
    block = model.model.layers[layer]
    attention = block.self_attn
    block.input_layernorm.weight.fill_(math.sqrt(squared_norm / WIDTH))
    block.post_attention_layernorm.weight.fill_(1)
    attention.q_proj.weight.copy_(match[0] * sharpness / attention.scaling)
    attention.k_proj.weight.copy_(match[1])
    attention.v_proj.weight[:CODE, OWN] = torch.eye(CODE)
    attention.o_proj.weight[into, :CODE] = torch.eye(CODE)
    for gate in (attention.value_gate_proj, attention.output_gate_proj):
        gate.bias.fill_(30)


def _write_indexer(
    model: GSAForCausalLM, layer: int, match: tuple[torch.Tensor, torch.Tensor], bias: float, scale: float
) -> None:
    """Write an indexer with scores sigmoid(scale * product + bias)."""
    indexer = model.model.layers[layer].self_attn.indexer
    indexer.wq.weight.copy_(match[0] * scale * math.sqrt(HEAD))
    indexer.wk.weight.copy_(match[1])
    indexer.weights_proj.bias.fill_(30)
    indexer.score_bias.fill_(bias)
    indexer.variance_ema.fill_(MEAN_VARIANCE)
