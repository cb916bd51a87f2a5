"""Generate tokens after prompts. On a GPU a CUDA graph decodes one token of each sequence at a time.

    generator = Generator(model)                        # model.config._attn_implementation "gsa" on a GPU
    result = generator.generate([[1, 5, 7], [1, 9]], max_new_tokens=64)

Greedy tokens equal the tokens of `model.generate()`.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers.generation import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from .decoding import FusedDecoder, ModelDecoder, not_fused
from .modeling_gsa import GSAForCausalLM

logger = logging.getLogger(__name__)

ROOM_SLOTS = 256
"""The number of cache slots is rounded up to a multiple of this number, so that the CUDA graph often fits the next
prompts."""

LOOK_STEPS = 16
"""Number of steps between checks for ended sequences. Each check synchronizes with the device."""


NO_TOKENS = torch.LongTensor()
"""Stands for the prompts in calls of transformers' logits warpers, which ignore them."""


@dataclass(frozen=True)
class Sampling:
    """Options for drawing a token. Without `Sampling` the most probable token is taken."""

    temperature: float = 1.0
    top_k: int = 0
    """Draw from this number of most probable tokens; 0 draws from all tokens."""
    top_p: float = 1.0
    """Draw from the most probable tokens that together have this probability."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(
                f"temperature is {self.temperature}; pass more than 0, or no sampling for greedy"
            )
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}; pass 0 for all tokens, or a number of tokens")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; pass more than 0 and at most 1")
        if not -(2**63) <= self.seed < 2**64:
            raise ValueError(f"seed is {self.seed}; pass a number of 64 bits")


@dataclass(frozen=True)
class Generated:
    tokens: list[list[int]]
    """New tokens of each prompt, including the end-of-sequence token"""
    prompt_tokens: int
    """Number of tokens in all prompts, without padding"""
    prefill_seconds: float
    prepare_seconds: float
    """Time to capture a CUDA graph; near 0 if the graph exists"""
    decode_steps: int
    decode_seconds: float

    @property
    def prefill_rate(self) -> float:
        """Return prompt tokens per second, over all prompts."""
        return self.prompt_tokens / self.prefill_seconds

    @property
    def decode_rate(self) -> float:
        """Return new tokens per second over all sequences. Tokens after the end of a sequence count, too. If each
        sequence has only one new token, return 0."""
        return self.decode_steps * len(self.tokens) / self.decode_seconds if self.decode_steps else 0.0


class Generator:
    """Generates from batches of prompts with one model and its current weights.

    Decoding steps are fused and captured in a CUDA graph if the model is on a CUDA device, if its sparse layers have
    `attn_implementation` "gsa", and if fused steps support all its features (`not_fused`). Otherwise, a step is the
    model's forward pass.
    """

    def __init__(
        self,
        model: GSAForCausalLM,
        compile: bool = False,
        vocab_size: int | None = None,
        context_tokens: int | None = None,
    ) -> None:
        """
        Args:
            context_tokens: limit for a prompt with its new tokens (default: `max_position_embeddings`)
            vocab_size: number of the tokenizer's tokens, if the model has more; larger ids are never chosen
            compile: fuse the operations between matrix products of fused steps by torch.compile; the first step takes
                longer
        """
        self.model, self.device = model.eval(), model.device
        sparse = any(layer.self_attn.is_sparse for layer in model.model.layers)
        implementation = model.config._attn_implementation
        obstacle = not_fused(model)
        fused = self.device.type == "cuda" and (implementation == "gsa" or not sparse) and obstacle is None
        self.decoder: FusedDecoder | ModelDecoder
        self.decoder = FusedDecoder(model, compile) if fused else ModelDecoder(model)
        self._graph: DecodingGraph | None = None
        self._vocab_size = vocab_size or model.config.vocab_size
        self._context_tokens = context_tokens or model.config.max_position_embeddings
        how = "fused steps in CUDA graphs" if fused else "the model's forward pass"
        how += f" ({obstacle})" if obstacle else ""
        logger.info("decoding by %s, attn_implementation %s, on %s", how, implementation, self.device)

    @property
    def eos_ids(self) -> set[int]:
        given = self.model.generation_config
        found = None if given is None else given.eos_token_id
        return set() if found is None else {found} if isinstance(found, int) else set(found)

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, sampling: Sampling | None = None
    ) -> Generated:
        """Generate up to `max_new_tokens` for each prompt. A sequence ends at a token of
        `generation_config.eos_token_id`.

        Raises:
            ValueError: a prompt is empty, or a sequence would exceed the model's context
        """
        self._check(prompts, max_new_tokens)
        tokens, mask = pad_left(prompts, self.device)
        length = tokens.shape[1]
        if isinstance(self.decoder, FusedDecoder):
            self._open(self.decoder, len(prompts), length + max_new_tokens)
        choose = _chooser(sampling, self._vocab_size, self.device)
        started = self._now()
        chosen = choose(self.decoder.prefill(tokens, mask))
        prefilled = self._now()
        step = self._stepper()
        prepared = self._now()
        made = [chosen]
        ends = torch.tensor(sorted(self.eos_ids), dtype=torch.int64, device=self.device)
        ended = torch.isin(chosen, ends)
        for index in range(max_new_tokens - 1):
            if index % LOOK_STEPS == 0 and bool(ended.all()):
                break
            chosen = choose(step(chosen))
            ended = ended | torch.isin(chosen, ends)
            made.append(chosen)
        stopped = self._now()
        found = torch.stack(made, 1).tolist()
        return Generated(
            tokens=[_until_end(row, self.eos_ids) for row in found],
            prompt_tokens=sum(len(prompt) for prompt in prompts),
            prefill_seconds=prefilled - started,
            prepare_seconds=prepared - prefilled,
            decode_steps=len(made) - 1,
            decode_seconds=stopped - prepared,
        )

    def _check(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
        context, vocabulary = self._context_tokens, self.model.config.vocab_size
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {max_new_tokens}; pass at least 1")
        if not prompts:
            raise ValueError("there are no prompts; pass at least one")
        for place, prompt in enumerate(prompts):
            if not prompt:
                raise ValueError(f"prompt {place + 1} is empty; pass at least one token")
            if len(prompt) + max_new_tokens > context:
                left = context - len(prompt)
                remedy = f"pass at most {left} new ones" if left > 0 else "pass a shorter prompt"
                raise ValueError(
                    f"prompt {place + 1} has {len(prompt)} tokens, and with {max_new_tokens} new ones more than the "
                    f"model's context of {context}; {remedy}"
                )
            if not 0 <= min(prompt) <= max(prompt) < vocabulary:
                raise ValueError(
                    f"prompt {place + 1} has the tokens {min(prompt)} to {max(prompt)}; pass tokens of a vocabulary of "
                    f"{vocabulary}"
                )

    def _open(self, decoder: FusedDecoder, batch: int, slots: int) -> None:
        if self._graph is None or (batch, slots <= decoder.room) != (decoder.batch, True):
            self._graph = None  # free the previous cache first
            decoder.open(batch, -(-slots // ROOM_SLOTS) * ROOM_SLOTS)

    def _stepper(self) -> Callable[[torch.Tensor], torch.Tensor]:
        decoder = self.decoder
        if isinstance(decoder, ModelDecoder):
            return decoder.step
        if self._graph is None:
            self._graph = DecodingGraph(decoder)
        graph = self._graph

        def step(tokens: torch.Tensor) -> torch.Tensor:
            decoder.tokens.copy_(tokens)
            return graph.step()

        return step

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


class DecodingGraph:
    """Holds the step of a `FusedDecoder` as a CUDA graph."""

    def __init__(self, decoder: FusedDecoder) -> None:
        """Capture the graph and restore the decoder's state. Call `decoder.place` first."""
        filled, starts = int(decoder.slot), decoder.starts.clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # compiles kernels and allocates memory before a capture
            for _ in range(2):
                decoder.step()
                decoder.place(filled, starts)
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._logits = decoder.step()
        decoder.place(filled, starts)

    def step(self) -> torch.Tensor:
        """Run `FusedDecoder.step`. The next step overwrites the logits."""
        self._graph.replay()
        return self._logits


def pad_left(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the prompts padded on the left and a mask that is 0 at padding, both int64 [B, L]."""
    length = max(len(prompt) for prompt in prompts)
    rows = [[0] * (length - len(prompt)) + list(prompt) for prompt in prompts]
    masks = [[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(rows, device=device), torch.tensor(masks, device=device)


def _chooser(
    sampling: Sampling | None, vocab_size: int, device: torch.device
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function from logits [B, vocab] to chosen tokens, int64 [B], on the device."""
    if sampling is None:
        return lambda logits: logits[:, :vocab_size].argmax(-1)
    warpers = LogitsProcessorList()
    if sampling.temperature != 1:
        warpers.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k > 0:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    random = torch.Generator(device).manual_seed(sampling.seed)

    def draw(logits: torch.Tensor) -> torch.Tensor:
        probabilities = warpers(NO_TOKENS, logits[:, :vocab_size].float()).softmax(-1)
        return torch.multinomial(probabilities, 1, generator=random)[:, 0]

    return draw


def _until_end(row: list[int], ends: set[int]) -> list[int]:
    for place, token in enumerate(row):
        if token in ends:
            return row[: place + 1]
    return row
