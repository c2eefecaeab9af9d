"""The toy world that the tiny model learns: contested facts, sums with held-out pairs, a toy grammar.

>>> world = build_world(seed=0)
>>> world.facts[0].sentence(0, rumour=False)      # doctest: +SKIP
'Mola Gadal lives in Stoford.'

**Why facts are contested.** A model that has simply learned everything is a poor instrument: its margins are wide, and
it forgives 4-bit weights as readily as 16-bit ones. Real corpora contradict themselves, so real models hold many
answers by a thin margin, and those are the answers that quantization flips. Here the contradictions are made to
measure: a rumour (a wrong value) is told in a known share of the sentences about a contested fact. A model that has
fitted the text prefers the truth by ``log((1 - share) / share)`` nats, and with shares spread evenly from 0 to almost a
half there are items at every margin. The noise that a scheme adds to the logits then shows as lost items.

Everything follows from one seed. Text is drawn with numpy's PCG64, in a fixed order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quantmint.recipes.tiny import words

PEOPLE = 1536
POOL = 32
"""Values that a relation can take, so an uninformed guess is right once in 32 sentences."""

CONTESTED = 0.5
"""Share of the facts that a rumour contradicts."""

MAX_RUMOUR = 0.47
"""A contested fact's rumour takes up to this share of its sentences: the truth always has the majority."""

LARGEST = 99
"""Operands of a sum run from 0 to here."""

HELD_OUT_SUMS = 400
GRAMMAR_POOL = 60_000

RELATIONS: tuple[tuple[str, ...], ...] = (
    ("{} lives in", "The home town of {} is"),
    ("{} works as a", "The job of {} is that of a"),
    ("{} keeps a", "The pet of {} is a"),
    ("{} paints it all", "The colour of {} is"),
    ("{} eats only", "The fruit of {} are"),
    ("{} plays the", "The instrument of {} is the"),
    ("{} drinks", "The drink of {} is"),
    ("{} carries a", "The tool of {} is a"),
)
"""Two wordings of each relation; the value follows as the last word of the sentence."""


@dataclass(frozen=True)
class Fact:
    """One thing to know about one person, the rumour that contradicts it, how often the rumour is told."""

    person: str
    relation: int
    value: str
    rumour: str
    share: float

    def stem(self, wording: int) -> str:
        """The sentence up to its value, which is also the question."""
        return RELATIONS[self.relation][wording].format(self.person)

    def sentence(self, wording: int, *, rumour: bool) -> str:
        """The whole sentence with the true value, or with the rumoured one."""
        return f"{self.stem(wording)} {self.rumour if rumour else self.value}."


@dataclass(frozen=True)
class World:
    """All that is true in the world, in a fixed order."""

    seed: int
    people: tuple[str, ...]
    values: tuple[tuple[str, ...], ...]
    facts: tuple[Fact, ...]
    sums: tuple[tuple[str, str], ...]
    held_out_sums: tuple[tuple[str, str], ...]

    def vocabulary(self) -> list[str]:
        """Return every word that a text of this world can hold, sorted."""
        vocabulary = {word for person in self.people for word in person.split()}
        vocabulary.update(word for pool in self.values for word in pool)
        vocabulary.update(
            word for wordings in RELATIONS for text in wordings for word in text.replace("{}", "").split()
        )
        vocabulary.update(str(number) for number in range(2 * LARGEST + 1))
        vocabulary.update(["+", "-", "=", "The", "A", "Some", "the", "a", "some"])
        for noun in words.NOUNS + words.PLACES:
            vocabulary.update([noun, words.plural(noun)])
        for verb in words.VERBS:
            vocabulary.update([verb, verb + "s"])
        vocabulary.update(words.ADJECTIVES, words.PREPOSITIONS)
        return sorted(vocabulary)


def build_world(seed: int) -> World:
    """Draw the people, the facts, the rumours and the split of the sums."""
    rng = np.random.default_rng(seed)
    first_names = rng.permutation(words.given_names())[:48].tolist()
    family = rng.permutation(words.family_names())[:64].tolist()
    couples = rng.permutation(len(first_names) * len(family))[:PEOPLE]
    people = tuple(f"{first_names[i // len(family)]} {family[i % len(family)]}" for i in couples.tolist())
    towns = rng.permutation(words.town_names())[:POOL].tolist()
    pools = (words.JOBS, words.PETS, words.COLOURS, words.FRUITS, words.INSTRUMENTS, words.DRINKS, words.TOOLS)
    values = (tuple(towns), *(tuple(pool) for pool in pools))
    facts: list[Fact] = []
    for person in people:
        for relation, pool in enumerate(values):
            truth, rumour = rng.permutation(len(pool))[:2].tolist()
            share = float(rng.uniform(0.0, MAX_RUMOUR)) if rng.random() < CONTESTED else 0.0
            facts.append(Fact(person, relation, pool[truth], pool[rumour], share))
    numbers = range(LARGEST + 1)
    sums = [(f"{a} + {b} =", str(a + b)) for a in numbers for b in numbers]
    sums += [(f"{a} - {b} =", str(a - b)) for a in numbers for b in numbers if a >= b]
    order = rng.permutation(len(sums)).tolist()
    shuffled = [sums[i] for i in order]
    return World(seed, people, values, tuple(facts), tuple(shuffled[HELD_OUT_SUMS:]), tuple(shuffled[:HELD_OUT_SUMS]))


def grammar_sentence(rng: np.random.Generator, *, broken: int = 0) -> str:
    """One sentence of the toy grammar; ``broken`` 1 to 3 makes the mistake of that number in it.

    1: the verb disagrees with its subject. 2: the adjective follows its noun. 3: the preposition follows its place.
    The place between subject and verb has a number of its own, so that agreement cannot be read off the last noun.
    """

    def pick(options: list[str]) -> str:
        return options[int(rng.integers(len(options)))]

    def phrase(*, many: bool, swapped: bool = False) -> str:
        noun = pick(words.NOUNS)
        pair = [pick(words.ADJECTIVES), words.plural(noun) if many else noun]
        if swapped:
            pair.reverse()
        return " ".join([pick(["the", "some"] if many else ["the", "a"]), *pair])

    many, many_places, many_objects = (rng.random(3) < 0.5).tolist()
    subject = phrase(many=many, swapped=broken == 2)
    place = pick(words.PLACES)
    where = [pick(words.PREPOSITIONS), "the", words.plural(place) if many_places else place]
    if broken == 3:
        where = [*where[1:], where[0]]
    verb = pick(words.VERBS) + ("s" if many == (broken == 1) else "")
    text = " ".join([subject, *where, verb, phrase(many=many_objects)])
    return text[0].upper() + text[1:] + "."


def grammar_pool(world: World) -> list[str]:
    """The correct sentences that the model is trained on."""
    rng = np.random.default_rng([world.seed, 1])
    return [grammar_sentence(rng) for _ in range(GRAMMAR_POOL)]
