"""The words of the toy world: plain lists, because a word that is data can be read, counted and replaced."""

from __future__ import annotations

import itertools

ONSETS = ("b", "br", "d", "f", "g", "h", "k", "l", "m", "n", "p", "r", "s", "st", "t", "v")
VOWELS = ("a", "e", "i", "o", "u")
GIVEN_ENDINGS = ("la", "na", "ro", "mi", "sa", "to")
FAMILY_ENDINGS = ("berg", "dal", "field", "holt", "man", "nik", "sen", "sson", "ton", "vik")
TOWN_ENDINGS = ("burg", "ford", "grad", "mouth", "port", "stad")

# fmt: off
JOBS = [
    "baker", "barber", "blacksmith", "brewer", "builder", "butcher", "carpenter", "cooper", "dentist", "diver",
    "doctor", "driver", "farmer", "fisher", "gardener", "glazier", "hunter", "judge", "lawyer", "mason", "miller",
    "miner", "nurse", "painter", "pilot", "plumber", "porter", "printer", "sailor", "tailor", "teacher", "weaver",
]
PETS = [
    "badger", "beetle", "camel", "cat", "cobra", "crab", "crow", "donkey", "dove", "duck", "ferret", "fox", "frog",
    "gecko", "goat", "goose", "hamster", "hare", "hawk", "hen", "horse", "llama", "lizard", "mouse", "newt",
    "parrot", "pig", "pony", "rabbit", "snail", "toad", "turtle",
]
COLOURS = [
    "amber", "beige", "black", "blue", "bronze", "brown", "copper", "coral", "cream", "crimson", "cyan", "gold",
    "green", "grey", "indigo", "ivory", "jade", "khaki", "lilac", "magenta", "maroon", "navy", "ochre", "olive",
    "pink", "purple", "red", "scarlet", "silver", "teal", "violet", "white",
]
FRUITS = [
    "apples", "apricots", "bananas", "berries", "cherries", "coconuts", "currants", "dates", "figs",
    "gooseberries", "grapes", "guavas", "kiwis", "kumquats", "lemons", "limes", "lychees", "mangoes", "medlars",
    "melons", "nectarines", "oranges", "papayas", "peaches", "pears", "persimmons", "pineapples", "plums",
    "pomegranates", "quinces", "raspberries", "tangerines",
]
INSTRUMENTS = [
    "accordion", "banjo", "bassoon", "bugle", "cello", "clarinet", "cornet", "cymbals", "drum", "fiddle", "flute",
    "gong", "guitar", "harmonica", "harp", "horn", "kazoo", "lute", "lyre", "mandolin", "marimba", "oboe", "organ",
    "piano", "recorder", "saxophone", "sitar", "tambourine", "triangle", "trombone", "trumpet", "viola",
]
DRINKS = [
    "absinthe", "ale", "beer", "brandy", "broth", "chocolate", "cider", "cocoa", "coffee", "cognac", "cordial",
    "espresso", "gin", "juice", "kefir", "lager", "lemonade", "mead", "milk", "nectar", "punch", "rum", "sake",
    "sherry", "soda", "stout", "tea", "tonic", "vermouth", "vodka", "water", "wine",
]
TOOLS = [
    "anvil", "awl", "axe", "bellows", "broom", "brush", "bucket", "chisel", "clamp", "crowbar", "drill", "file",
    "gimlet", "hammer", "hatchet", "hoe", "knife", "ladder", "lathe", "mallet", "needle", "pickaxe", "plane",
    "pliers", "rake", "rope", "saw", "scythe", "shovel", "sickle", "spade", "wrench",
]

NOUNS = [
    "aunt", "bear", "bird", "boy", "brother", "captain", "child", "cousin", "dog", "doctor", "farmer", "friend",
    "giant", "girl", "guard", "guest", "king", "lion", "neighbour", "painter", "pilot", "poet", "sister", "singer",
    "soldier", "stranger", "student", "teacher", "uncle", "wolf",
]
PLACES = [
    "bridge", "castle", "forest", "garden", "harbour", "hill", "lake", "market", "meadow", "mill", "river", "road",
    "station", "tower", "village", "well",
]
VERBS = [
    "admire", "avoid", "blame", "call", "draw", "feed", "follow", "greet", "guide", "help", "hear", "invite",
    "like", "meet", "need", "praise", "remember", "see", "thank", "trust", "visit", "warn",
]
ADJECTIVES = [
    "angry", "brave", "bright", "calm", "clever", "gentle", "happy", "hungry", "lazy", "old", "proud", "quiet",
    "sad", "small", "tall", "tired", "wise", "young",
]
PREPOSITIONS = [
    "behind", "beside", "near", "under",
]
# fmt: on


def plural(noun: str) -> str:
    """The plural of a noun of `NOUNS` or `PLACES`: the world knows one irregular child, one wolf."""
    return {"child": "children", "wolf": "wolves"}.get(noun, noun + "s")


def given_names() -> list[str]:
    """Every given name that the syllables allow, in a fixed order, for example ``Brala``."""
    return [(a + v + e).capitalize() for a, v, e in itertools.product(ONSETS, VOWELS, GIVEN_ENDINGS)]


def family_names() -> list[str]:
    """Every family name that the syllables allow, in a fixed order, for example ``Gidal``."""
    return [(a + v + e).capitalize() for a, v, e in itertools.product(ONSETS, VOWELS, FAMILY_ENDINGS)]


def town_names() -> list[str]:
    """Every town that the syllables allow, in a fixed order, for example ``Stoford``."""
    return [(a + v + e).capitalize() for a, v, e in itertools.product(ONSETS, VOWELS, TOWN_ENDINGS)]
