"""Generate words, numbers, uuids and noise for RULER's texts. The same seed gives the same text."""

from __future__ import annotations

import random
import string
import uuid
from collections.abc import Callable

ADJECTIVES = """
able amber ancient autumn bitter bold brave brief bright broad calm careful cheap clean clear clever cold common cool
crisp curious damp dark deep dim distant dry dusty eager early easy empty fair famous fast fierce fine firm flat fresh
gentle giant glad golden grand gray green happy hard heavy hidden hollow honest humble icy idle jolly keen kind large
late lazy light little lively lonely long loud lucky mellow mild modest narrow neat noble odd old open pale plain polite
proud pure quick quiet rapid rare rough round royal rusty sharp shy silent simple slow smooth soft solid sour steady
""".split()  # noqa: SIM905 - a list literal would be a page long
NOUNS = """
acorn anchor apple arrow badge barrel basket beacon bell bench boat bottle branch brick bridge brook broom bucket button
cabin candle canyon carpet castle cedar chair chest clock cloud coat comet copper coral crown desk door drum eagle
engine falcon feather fence ferry field finger flame flute forest fossil fountain garden gate glacier glove goose grain
hammer harbor hat hedge helmet hill horse island jacket jar kettle key kite ladder lake lamp lantern leaf lemon letter
lion marble market meadow mirror moon mountain needle nest oak ocean orchard otter paddle parcel pebble pencil pepper
piano
""".split()  # noqa: SIM905
FIRST = (*ADJECTIVES, *NOUNS)
USABLE = 0.9
"""Share of the words that may be drawn at random. With a larger share, finding new words takes long."""
NOISE = (
    "Rain falls on the hills.",
    "The wind comes from the west.",
    "A door stands open.",
    "Nobody is in the street.",
    "Later the sun shines again.",
)


class TooFewWords(ValueError):
    """There are fewer different words than needed."""


def list_words(rng: random.Random, count: int) -> list[str]:
    """Returns different words in random order. Adds pairs, which are longer, only if there are too few single words.

    Raises:
        TooFewWords: there are fewer words.
    """
    found = rng.sample(FIRST, min(count, len(FIRST)))
    found += distinct(rng, "words", count - len(found))
    rng.shuffle(found)
    return found


def letters(rng: random.Random, count: int, alphabet: str = string.ascii_lowercase) -> str:
    return "".join(rng.choices(alphabet, k=count))


KINDS: dict[str, Callable[[random.Random], str]] = {
    "words": lambda rng: f"{rng.choice(FIRST)}-{rng.choice(NOUNS)}",
    "numbers": lambda rng: str(rng.randrange(10**6, 10**7)),
    "uuids": lambda rng: str(uuid.UUID(int=rng.getrandbits(128), version=4)),
}


def distinct(rng: random.Random, kind: str, count: int, without: set[str] | None = None) -> list[str]:
    """Returns different words, numbers or uuids, none of them in `without`.

    Raises:
        TooFewWords: there are fewer words than needed.
    """
    taken = set(without or ())
    there_are = len(FIRST) * len(NOUNS)
    if kind == "words" and count + len(taken) > USABLE * there_are:
        raise TooFewWords(
            f"{count} different words of {there_are} in all; give a shorter length for this task"
        )
    found: list[str] = []
    while len(found) < count:
        drawn = KINDS[kind](rng)
        if drawn not in taken:
            taken.add(drawn)
            found.append(drawn)
    return found
