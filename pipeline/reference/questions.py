"""What is asked and what is answered, in tokens: plain data between the protocol and the model."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt, and what is wanted of it.

    ``prompt_top`` is how many likeliest tokens are wanted at each position of the prompt, ``top`` the same for
    generated ones; None where no log probability is. ``ends`` are token ids that end the answer, ``stop`` strings.
    """

    ids: tuple[int, ...]
    max_tokens: int = 0
    prompt_top: int | None = None
    top: int | None = None
    ends: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()

    @property
    def longest(self) -> int:
        """Tokens of the prompt and of the longest answer."""
        return len(self.ids) + self.max_tokens


@dataclass(frozen=True, slots=True)
class Position:
    """A token that was read or made: its log probability (nats), its rank from 1, the likeliest tokens first."""

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]

    def cut(self, top: int | None) -> Position:
        """The same with so many likeliest tokens."""
        wanted = self.top[: top or 0]
        return self if len(wanted) == len(self.top) else replace(self, top=wanted)


@dataclass(frozen=True, slots=True)
class Answer:
    """``prompt`` has a position for each token of the prompt but the first; both are empty where none were wanted.

    ``stopped`` is the stop string or the token that ended the answer, None where it came to its length.
    """

    ids: tuple[int, ...]
    prompt: tuple[Position, ...]
    positions: tuple[Position, ...]
    stopped: str | int | None
