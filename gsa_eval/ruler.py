"""Make prompts for 11 of RULER's 13 tasks (Hsieh et al., arXiv 2404.06654) by RULER's rules, with our own texts.

A prompt has `size` units of filler text, such as words or list items. `fill` finds the largest `size`, within 1%, at
which the prompt has at most a given number of tokens.
"""

from __future__ import annotations

import math
import random
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from gsa_data.tokenize import Tokenizer
from gsa_eval.ruler_words import NOISE, TooFewWords, distinct, letters, list_words

SENTENCE_ENDS = (".", "!", "?")


@dataclass(frozen=True)
class Sample:
    prompt: str
    answers: list[str]
    depth: float | None = None
    """Place of a single needle, from 0 (the text's beginning) to 1 (its end)."""
    tokens: tuple[int, ...] = ()
    """Tokens of the prompt, if `samples` fitted it into a length."""


@dataclass(frozen=True)
class Setting:
    length_tokens: int
    """Tokens of the prompt and its answer. Some frequencies depend on it."""
    essay: Sequence[str] = ()
    """Words of the text that hides needles."""


Make = Callable[[random.Random, int, Setting], Sample]
"""(random numbers, units of filling, setting) -> a sample."""


@dataclass(frozen=True)
class Task:
    make: Make
    new_tokens: int
    """Tokens of an answer."""
    needs_essay: bool = False


def niah(
    haystack: str, keys: str, values: str, num_keys: int = 1, num_values: int = 1, num_queries: int = 1
) -> Make:
    """Make a needle-in-a-haystack task.

    Args:
        haystack: filler text: `noise`, `essay`, or `needles` with other keys.
        keys, values: kind of the names and values in needles: `words`, `numbers` or `uuids`.
    """

    def make(rng: random.Random, size: int, setting: Setting) -> Sample:
        names = distinct(rng, keys, max(num_keys, num_queries))
        hidden = {name: distinct(rng, values, num_values) for name in names}
        needles = [_needle(values, name, value) for name in names for value in hidden[name]]
        rng.shuffle(needles)
        places = sorted(rng.random() for _ in needles)
        if haystack == "noise":
            units = [NOISE[place % len(NOISE)] for place in range(size)]
        elif haystack == "essay":
            start = rng.randrange(len(setting.essay))  # the text begins again after its end
            units = [setting.essay[(start + place) % len(setting.essay)] for place in range(size)]
        else:
            others = distinct(rng, keys, size, set(names))
            units = [_needle(values, name, distinct(rng, values, 1)[0]) for name in others]
        text, hidden_at = _hide(units, needles, places, at_sentences=haystack == "essay")
        asked = names[:num_queries]
        listed = " and ".join([", ".join(asked[:-1]), asked[-1]] if len(asked) > 1 else asked)
        what = f"{values[:-1]} of {listed}" if num_values * num_queries == 1 else f"{values} of {listed}"
        prompt = (
            f"The text below has secret {values} in it. Remember them; a question about them follows.\n\n{text}\n\n"
            f"Question: what secret {what} does the text name?\nAnswer: the text names the secret {what}:"
        )
        depth = hidden_at[0] / max(1, len(units)) if len(hidden_at) == 1 else None
        return Sample(prompt, [value for name in asked for value in hidden[name]], depth)

    return make


def _needle(kind: str, key: str, value: str) -> str:
    return f"The secret {kind[:-1]} of {key} is {value}."


def _hide(
    units: Sequence[str], needles: Sequence[str], places: Sequence[float], at_sentences: bool = False
) -> tuple[str, list[int]]:
    """Insert the needles into the text. Returns the text, and for each needle the number of units before it.

    `places` has the relative position of each needle, from 0 (the beginning of the text) to 1 (its end). With
    `at_sentences`, needles stand only between sentences."""
    inside: dict[int, list[str]] = {}
    hidden_at = []
    for needle, share in zip(needles, places, strict=True):
        place = math.floor(share * (len(units) + 1))
        while at_sentences and 0 < place < len(units) and not units[place - 1].endswith(SENTENCE_ENDS):
            place += 1
        inside.setdefault(place, []).append(needle)
        hidden_at.append(place)
    parts: list[str] = []
    for place in range(len(units) + 1):
        parts += inside.get(place, [])
        parts += units[place : place + 1]
    return " ".join(parts), hidden_at


def _chain(rng: random.Random, size: int, hops: int = 4) -> tuple[str, str, list[str]]:
    """Returns a text of noise with assignments `a = value`, `b = a`, ..., the value, and the variables' names."""
    value = str(rng.randrange(10**4, 10**5))
    names: list[str] = []
    while len(names) < hops + 1:
        name = letters(rng, 5, string.ascii_uppercase)
        names += [name] * (name not in names)
    lines = [f"VAR {names[0]} = {value}."]
    lines += [f"VAR {after} = VAR {before}." for before, after in pairwise(names)]
    places = sorted(rng.random() for _ in lines)
    text, _ = _hide([NOISE[place % len(NOISE)] for place in range(size)], lines, places)
    return text, value, names


def variable_tracking(rng: random.Random, size: int, _: Setting) -> Sample:
    """Make a variable-tracking prompt, with an example in front."""

    def asked(text: str, value: str, names: Sequence[str]) -> str:
        return (
            "Follow the variables in the text below.\n\n"
            f"{text}\n\nQuestion: which variables have the value {value}, at first or through another variable?\n"
            f"Answer: the {len(names)} variables with the value {value} are"
        )

    example, chain = _chain(rng, 5), _chain(rng, size)
    return Sample(f"{asked(*example)} {' '.join(example[2])}\n\n{asked(*chain)}", chain[2])


SHORT_TOKENS = 4096
"""Below this length, the list of `cwe` repeats its words less often."""


def common_words(rng: random.Random, size: int, setting: Setting) -> Sample:
    """Make a prompt with two lists of words: an example list with its answer, and a list without an answer.

    Each answer names the ten common words. The example has 30 other words, or 10 in short prompts. The second list has
    `size` other words. Numbers and frequencies follow RULER's `common_words_extraction.py`."""
    is_short = setting.length_tokens < SHORT_TOKENS

    def listed(others: int, times: int, times_of_others: int) -> tuple[str, list[str]]:
        """Return a question about a shuffled list, and its common words, which are in the list `times` times."""
        words = list_words(rng, 10 + others)
        common = words[:10]
        in_list = common * times + words[10:] * times_of_others
        rng.shuffle(in_list)
        text = (
            "Some words of the numbered list below are in it more often than others.\n\n"
            f"{_numbered(in_list)}\n\n"
            "Question: which 10 words are in the list most often?\nAnswer: the 10 most frequent words are"
        )
        return text, common

    example, of_example = listed(10, 3, 1) if is_short else listed(30, 10, 3)
    asked, common = listed(size, 6, 1) if is_short else listed(size, 30, 3)
    return Sample(f"{example} {_numbered(of_example)}\n\n{asked}", common)


def _numbered(words: Sequence[str]) -> str:
    return " ".join(f"{place}. {each}" for place, each in enumerate(words, 1))


MOST_FREQUENT = 100
"""Words of the shortest coded text. With fewer words, the third and the fourth code would be equally frequent."""


def frequent_words(rng: random.Random, size: int, setting: Setting) -> Sample:
    """Make a prompt that asks for the most frequent coded words of a text. Frequencies are proportional to 1 / rank^2.

    The most frequent word is three dots ("..."), which the answer leaves out. As in RULER's `freq_words_extraction.py`,
    a text of n tokens has n // 50 different words, including "..."."""
    codes: list[str] = []
    while len(codes) < max(4, setting.length_tokens // 50 - 1):
        code = letters(rng, 6)
        codes += [code] * (code not in codes)
    total = MOST_FREQUENT + size
    counts = [math.floor(total / (math.pi**2 / 6) / rank**2) for rank in range(1, len(codes) + 2)]
    words = [each for code, count in zip(["...", *codes], counts, strict=True) for each in [code] * count]
    rng.shuffle(words)
    prompt = (
        f"Read the coded text below and count its coded words. Leave out the dots.\n\n{' '.join(words)}\n\n"
        "Question: which three coded words are in the text most often?\nAnswer: the three most frequent coded words are"
    )
    return Sample(prompt, codes[:3])


TASKS: dict[str, Task] = {
    "niah_single_1": Task(niah("noise", "words", "numbers"), 128),
    "niah_single_2": Task(niah("essay", "words", "numbers"), 128, needs_essay=True),
    "niah_single_3": Task(niah("essay", "words", "uuids"), 128, needs_essay=True),
    "niah_multikey_1": Task(niah("essay", "words", "numbers", num_keys=4), 128, needs_essay=True),
    "niah_multikey_2": Task(niah("needles", "words", "numbers"), 128),
    "niah_multikey_3": Task(niah("needles", "uuids", "uuids"), 128),
    "niah_multivalue": Task(niah("essay", "words", "numbers", num_values=4), 128, needs_essay=True),
    "niah_multiquery": Task(niah("essay", "words", "numbers", num_queries=4), 128, needs_essay=True),
    "vt": Task(variable_tracking, 30),
    "cwe": Task(common_words, 120),
    "fwe": Task(frequent_words, 50),
}
"""RULER's settings: kinds, numbers of needles, frequencies, tokens of answers."""


def check_task(name: str, length_tokens: int, tokenizer: Tokenizer, essay: Sequence[str]) -> None:
    """Raise ValueError if the task is unknown, lacks `essay`, or exceeds `length_tokens` even without filler text."""
    if name not in TASKS:
        raise ValueError(f"RULER has no task {name}; give some of {', '.join(TASKS)}")
    if TASKS[name].needs_essay and not essay:
        raise ValueError(f"RULER's {name} hides needles in text; give --haystack PLACE")
    task = TASKS[name]
    empty = task.make(random.Random(0), 0, Setting(length_tokens, essay)).prompt
    if len(tokenizer.encode_prompt(empty)) > length_tokens - task.new_tokens:
        raise ValueError(f"{name} at {length_tokens} tokens: {NO_ROOM}")


def samples(
    name: str, length_tokens: int, count: int, seed: int, tokenizer: Tokenizer, essay: Sequence[str]
) -> list[Sample]:
    """Make samples whose prompt and answer together fill `length_tokens`.

    Raises:
        ValueError: the task exceeds this length even without filler text.
    """
    task, setting = TASKS[name], Setting(length_tokens, essay)
    found = []
    size = 64  # The last sample's size is a good guess.
    for index in range(count):
        own_seed = f"{seed} {name} {length_tokens} {index}"

        def make(units: int, own_seed: str = own_seed) -> Sample:
            return task.make(random.Random(own_seed), units, setting)

        what = f"{name} at {length_tokens} tokens"
        size, sample = fill(make, length_tokens - task.new_tokens, tokenizer, size, what)
        found.append(sample)
    return found


NO_ROOM = "has no room for the task with this tokenizer; give a longer length"
LINE_ERROR, LINE_ERROR_TOKENS = 0.35, 32
"""Largest error of an extrapolated token count: a share of the extrapolated difference, because essays alternate
between prose and code, plus the tokens of a long word."""


def fill(
    make: Callable[[int], Sample], room_tokens: int, tokenizer: Tokenizer, guess: int, what: str
) -> tuple[int, Sample]:
    """Returns the largest number of units (such as list items), within 1%, at which the prompt has at most
    `room_tokens`, and the sample of that size. Because tokenizing is slow, lengths far from the limit are
    extrapolated from tokenized prompts."""
    made: dict[int, Sample] = {}
    without_words: dict[int, TooFewWords] = {}

    def fits(units: int) -> bool:
        if units not in made and units not in without_words:
            try:
                sample = make(units)
                made[units] = replace(sample, tokens=tuple(tokenizer.encode_prompt(sample.prompt).tolist()))
            except TooFewWords as error:  # the search may try more words than exist
                without_words[units] = error
        return units in made and len(made[units].tokens) <= room_tokens

    def seems_to_fit(units: int) -> bool:
        nearest = min(made, key=lambda other: abs(other - units))
        largest = max(made)
        rate = (len(made[largest].tokens) - len(made[0].tokens)) / max(1, largest)
        more = rate * (units - nearest)
        left = room_tokens - len(made[nearest].tokens) - more
        sure = nearest and abs(left) > LINE_ERROR * abs(more) + LINE_ERROR_TOKENS
        return left > 0 if sure else fits(units)

    if not fits(0):
        raise ValueError(f"{what}: {NO_ROOM}")
    for judge in (seems_to_fit, fits):
        low, high = 0, max(guess, 1)
        fits(high)
        while judge(high):
            low, high = high, math.ceil(high * 1.5)
        while high - low > max(1, low // 100):
            middle = (low + high) // 2
            low, high = (middle, high) if judge(middle) else (low, middle)
        if fits(low):
            break
    if high in without_words:  # all words fit
        raise without_words[high]
    return low, made[low]
