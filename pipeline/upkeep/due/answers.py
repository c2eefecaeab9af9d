"""Answers from elsewhere for all recipes of a call: newest releases, commits of models and of data sets.

Each repository, data set and destination is asked once, whichever recipes name it, all at once, in threads that end
with their own timeouts or with the process. Nothing is tried twice, and an error is kept as the answer: the caller goes
on with what is known.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from quantmint.calibration.errors import CalibrationError
from quantmint.calibration.sets import load_set
from quantmint.eval import suites
from quantmint.eval.errors import DefinitionError
from quantmint.eval.suites import located
from quantmint.pipeline.base.errors import QuantmintError
from quantmint.pipeline.publish.addresses import recipe_destinations
from quantmint.pipeline.publish.hub.client import MissingError, connect
from quantmint.pipeline.publish.manifest import ManifestError
from quantmint.pipeline.publish.newest import TIMEOUT_S, NewestRelease, hub_file, newest_release
from quantmint.pipeline.recipe.load import LoadedRecipe
from quantmint.pipeline.recipe.models import COMMIT
from quantmint.pipeline.store.files import DamagedError

PATIENCE_S: Final = 10.0
"""Without any answer for so long, what is left is given up."""
_AT_ONCE: Final = 16

K = TypeVar("K")
V = TypeVar("V")
Key = tuple[str, ...]


class UnaskedError(QuantmintError):
    """A model or data set that a plan needs did not answer."""


@dataclass(frozen=True, slots=True)
class Base:
    """A model's commit, and a folder with its config.json, the only file that a plan reads."""

    commit: str
    folder: Path


@dataclass(frozen=True, slots=True)
class ReleasePlaces:
    """The releases at a recipe's destinations.

    ``there`` has the newest release of each destination, ``newest`` is the newest of them (None: there is none).
    ``empty`` are addresses of destinations without a release; ``unasked`` and ``damaged`` hold a sentence for each
    destination that did not answer, and for each whose release cannot be read.
    """

    newest: NewestRelease | None
    there: tuple[NewestRelease, ...]
    empty: tuple[str, ...]
    unasked: tuple[str, ...]
    damaged: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers by question, or the exceptions raised instead. Recipes' folders are resolved against ``home``."""

    home: Path
    by_question: Mapping[Key, Any] = field(default_factory=dict)

    def base(self, repo: str, revision: str) -> Base:
        """Return a model's commit and config.json at a revision.

        Raises `MissingError` if the model does not exist, and `UnaskedError` if another error came instead.
        """
        answer = self.by_question[("base", repo, revision)]
        if isinstance(answer, Base):
            return answer
        raise answer if isinstance(answer, MissingError) else UnaskedError(_sentence(repo, answer))

    def dataset(self, repo: str, revision: str) -> str:
        """Return a data set's commit at a revision. Raises `UnaskedError` if an error came instead."""
        answer = self.by_question[("dataset", repo, revision)]
        if isinstance(answer, str):
            return answer
        raise UnaskedError(_sentence(repo, answer))

    def releases(self, loaded: LoadedRecipe) -> ReleasePlaces:
        """Return the releases at a recipe's destinations; errors become sentences."""
        addresses = [target.address for target in recipe_destinations(loaded.recipe, self.home)]
        answers = {address: self.by_question[("release", address)] for address in addresses}
        there = tuple(answer for answer in answers.values() if isinstance(answer, NewestRelease))
        errors = {address: answer for address, answer in answers.items() if isinstance(answer, Exception)}
        sentences: dict[bool, list[str]] = {True: [], False: []}  # by whether the release is damaged
        for address, error in errors.items():
            sentences[isinstance(error, DamagedError | ManifestError)].append(_sentence(address, error))
        return ReleasePlaces(
            # Of one that lies in several places, the first place's.
            newest=max(there, key=lambda release: (release.created, release.tag), default=None),
            there=there,
            empty=tuple(address for address, answer in answers.items() if answer is None),
            unasked=tuple(sentences[False]),
            damaged=tuple(sentences[True]),
        )


def ask(recipes: Sequence[LoadedRecipe], home: Path) -> Answers:
    """Ask for the releases, models and data sets of all recipes; folders of recipes are resolved against ``home``."""
    questions: dict[Key, Callable[[], Any]] = {}
    for loaded in recipes:
        source = loaded.recipe.source
        for target in recipe_destinations(loaded.recipe, home):
            questions.setdefault(("release", target.address), partial(newest_release, target))
        if source.repo is not None:
            repo, revision = source.repo, str(source.revision)
            questions.setdefault(("base", repo, revision), partial(_base, repo, revision))
        for repo, revision in _data(loaded):
            questions.setdefault(("dataset", repo, revision), partial(_commit, "dataset_info", repo, revision))
    return Answers(home, ask_all(questions))


def ask_all(questions: Mapping[K, Callable[[], V]], *, patience: float = PATIENCE_S) -> dict[K, V | Exception]:
    """Call all questions in threads; return by key the value of each, or the exception that it raised.

    The value is a `TimeoutError` for questions without an answer once ``patience`` seconds have passed since the last
    one: destinations that all hang cost that time once, and not once each.
    """
    done, slots = queue.SimpleQueue[tuple[K, V | Exception]](), threading.Semaphore(_AT_ONCE)

    def work(key: K, question: Callable[[], V]) -> None:
        with slots:
            try:
                done.put((key, question()))
            except Exception as error:
                done.put((key, error))

    for item in questions.items():
        threading.Thread(target=work, args=item, daemon=True).start()
    answers: dict[K, V | Exception] = {}
    with suppress(queue.Empty):
        while len(answers) < len(questions):
            key, answer = done.get(timeout=patience)
            answers[key] = answer
    return {key: answers.get(key, TimeoutError(f"no answer within {patience:.0f} s")) for key in questions}


def _sentence(what: str, error: object) -> str:
    if isinstance(error, QuantmintError):
        return error.message if what in error.message else f"{what}: {error.message}"
    return f"{what}: {str(error) or type(error).__name__}"


def _data(loaded: LoadedRecipe) -> Iterator[tuple[str, str]]:
    """Yield the (repository, revision) of each data set of the Hub that a recipe uses.

    A calibration set or a suite that cannot be read is left out: planning the recipe reports it.
    """
    recipe = loaded.recipe
    for name in (None if recipe.calibration is None else recipe.calibration.set, loaded.long_set):
        with suppress(CalibrationError):
            chosen = None if name is None else load_set(name)
            if chosen is not None and chosen.repo is not None and chosen.revision is not None:
                yield chosen.repo, chosen.revision
    with suppress(DefinitionError):
        for task in suites.load(recipe.evaluation.suite).tasks:
            yield from map(located, task.data)


def _base(repo: str, revision: str) -> Base:
    commit = _commit("model_info", repo, revision)
    return Base(commit, hub_file(connect(repo, tries=1), commit, "config.json").parent)


def _commit(info: str, repo: str, revision: str) -> str:
    """Return the commit of a repository's revision; ``info`` is the method of the Hub's client that resolves it."""
    if COMMIT.fullmatch(revision):
        return revision
    client = connect(repo, tries=1)
    question = partial(getattr(client.api, info), repo, revision=revision, timeout=TIMEOUT_S)
    answer: Any = client.call(f"resolve {revision} to a commit", question)
    return str(answer.sha)
