"""What is asked elsewhere for all recipes of a call: newest releases, commits of models and of data sets.

Each repository, data set and place is asked once, whichever recipes name it, all at once, and nobody is waited for
long: a place that is away is told by its exception instead of a value. A thread that still waits when everybody has
gone on ends with its own timeout, or with the process. Of a release only its ``quantmint.json`` is read. Nothing is
tried twice: who asks whether something is due goes on with what is known.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, Final, TypeVar

from quantmint.calibration.errors import CalibrationError
from quantmint.calibration.sets import load_set
from quantmint.eval import suites
from quantmint.eval.errors import DefinitionError
from quantmint.eval.suites import located
from quantmint.pipeline.base.canonical import Json
from quantmint.pipeline.base.errors import QuantmintError
from quantmint.pipeline.publish import manifest
from quantmint.pipeline.publish.addresses import recipe_destinations
from quantmint.pipeline.publish.destination import Destination, ListedRelease
from quantmint.pipeline.publish.hub.client import HubClient, MissingError, connect
from quantmint.pipeline.publish.hub.destination import HubDestination
from quantmint.pipeline.publish.hub.repository import MAIN
from quantmint.pipeline.publish.manifest import Manifest, ManifestError
from quantmint.pipeline.publish.release import MANIFEST, TAG, day_in, identity_in
from quantmint.pipeline.recipe.load import LoadedRecipe
from quantmint.pipeline.recipe.schema import COMMIT, Recipe
from quantmint.pipeline.store.files import DamagedError

TIMEOUT_S: Final = 5.0
"""Of one request to the Hub."""
PATIENCE_S: Final = 10.0
"""Without any answer for so long, what is left is given up."""
_AT_ONCE: Final = 16

K = TypeVar("K")
V = TypeVar("V")
Key = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Released:
    """The newest release at a destination. ``place`` is the destination's address.

    ``shown`` is the tag of the release that readers get there: another one after a rollback or beside a candidate, None
    if readers get none. ``tags`` are the tags of all releases at the destination.
    """

    place: str
    tag: str
    manifest: Manifest
    shown: str | None = None
    tags: frozenset[str] = frozenset()

    @property
    def created(self) -> str:
        """Return the time of the gate's judgement in ISO 8601, UTC."""
        return self.manifest.created

    def to_json(self) -> dict[str, Json]:
        """Return destination, tags and time as plain data, without the manifest."""
        return {"place": self.place, "tag": self.tag, "created": self.created, "shown": self.shown}


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

    newest: Released | None
    there: tuple[Released, ...] = ()
    empty: tuple[str, ...] = ()
    unasked: tuple[str, ...] = ()
    damaged: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers of all remote places, or the exceptions raised instead, by question.

    Relative folders of recipes are resolved against ``home``.
    """

    home: Path
    found: Mapping[Key, Any] = field(default_factory=dict)

    def base(self, repo: str, revision: str) -> Base:
        """Return a model's commit and config.json at a revision.

        Raises `MissingError` if the model does not exist, and `UnaskedError` if another error came instead of an
        answer.
        """
        answer = self.found[("base", repo, revision)]
        if isinstance(answer, Base):
            return answer
        raise answer if isinstance(answer, MissingError) else UnaskedError(_told(repo, answer))

    def dataset(self, repo: str, revision: str) -> str:
        """Return a data set's commit at a revision. Raises `UnaskedError` if an error came instead of an answer."""
        answer = self.found[("dataset", repo, revision)]
        if isinstance(answer, str):
            return answer
        raise UnaskedError(_told(repo, answer))

    def releases(self, loaded: LoadedRecipe) -> ReleasePlaces:
        """Return the releases at a recipe's destinations; errors become sentences."""
        there: list[Released] = []
        empty: list[str] = []
        unasked: list[str] = []
        damaged: list[str] = []
        for place in places(loaded.recipe, self.home):
            answer = self.found[("release", place)]
            if isinstance(answer, Released):
                there.append(answer)
            elif answer is None:
                empty.append(place)
            elif isinstance(answer, DamagedError | ManifestError):
                damaged.append(_told(place, answer))
            else:
                unasked.append(_told(place, answer))
        # Of one that lies in several places, the first place's.
        newest = max(there, key=lambda one: (one.created, one.tag), default=None)
        return ReleasePlaces(newest, tuple(there), tuple(empty), tuple(unasked), tuple(damaged))


def ask(recipes: Sequence[LoadedRecipe], home: Path) -> Answers:
    """Ask for the releases, models and data sets of all recipes at once, each of them once.

    Errors are kept as answers and are not raised here. Relative folders of recipes are resolved against ``home``.
    """
    questions: dict[Key, Callable[[], Any]] = {}
    for loaded in recipes:
        source = loaded.recipe.source
        for place, question in places(loaded.recipe, home).items():
            questions.setdefault(("release", place), question)
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
    done, places_at_once = queue.SimpleQueue[tuple[K, V | Exception]](), threading.Semaphore(_AT_ONCE)

    def work(key: K, question: Callable[[], V]) -> None:
        with places_at_once:
            try:
                done.put((key, question()))
            except Exception as error:
                done.put((key, error))

    for item in questions.items():
        threading.Thread(target=work, args=item, daemon=True).start()
    found: dict[K, V | Exception] = {}
    with suppress(queue.Empty):
        while len(found) < len(questions):
            key, answer = done.get(timeout=patience)
            found[key] = answer
    return {key: found.get(key, TimeoutError(f"no answer within {patience:.0f} s")) for key in questions}


def _told(what: str, answer: object) -> str:
    if isinstance(answer, QuantmintError):
        return answer.message if what in answer.message else f"{what}: {answer.message}"
    return f"{what}: {str(answer) or type(answer).__name__}"


def _data(loaded: LoadedRecipe) -> Iterator[tuple[str, str]]:
    """Yield the (repository, revision) of each data set of the Hub that a recipe uses.

    A calibration set or a suite that cannot be read is left out: planning the recipe reports it.
    """
    recipe = loaded.recipe
    with suppress(CalibrationError):
        chosen = None if recipe.calibration is None else load_set(recipe.calibration.set)
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
    ask = partial(getattr(client.api, info), repo, revision=revision, timeout=TIMEOUT_S)
    found: Any = client.call(f"resolve {revision} to a commit", ask)
    return str(found.sha)


# Releases: in a folder or a bucket, or on the Hub.


def places(recipe: Recipe, home: Path) -> Mapping[str, Callable[[], Released | None]]:
    """Return a function for each destination of a recipe, by address, that returns the newest release there.

    It returns None if nothing was published there, and raises `DamagedError` or `ManifestError` for a release that
    cannot be read.
    """
    return {
        place.address: partial(_newest_on_hub, place.repo)
        if isinstance(place, HubDestination)
        else partial(_newest, place)
        for place in recipe_destinations(recipe, home)
    }


def _newest(target: Destination) -> Released | None:
    """Return the newest release at a folder or bucket; None if there is none.

    The release that readers get is read too: one with a damaged manifest has lost its place in the order. Raises
    `DamagedError` or `ManifestError` if either cannot be read.
    """
    listed = target.releases()
    if not listed:
        return None
    newest, shown = listed[0], next((release for release in listed if release.current), None)
    made, *_ = [_manifest(target, release) for release in dict.fromkeys((newest, shown or newest))]
    tags = frozenset(release.tag for release in listed)
    return Released(target.address, newest.tag, made, None if shown is None else shown.tag, tags)


def _manifest(target: Destination, release: ListedRelease) -> Manifest:
    raw, where = target.manifest_of(release), f"{target.address}: {release.tag}"
    manifest.require_sizes(raw, target.sizes(release), where)
    return manifest.decode(raw, what=f"{where}/{MANIFEST}")


def _newest_on_hub(repo: str) -> Released | None:
    """Return the newest release of a repository; None if the repository does not exist or has no release.

    The day is in the tag, so of many releases only those of the last day are read: their manifests never change, and
    the Hub's cache keeps them. A tag that only looks like a release's is skipped. Raises `QuantmintError`.
    """
    from huggingface_hub import get_token

    client = connect(repo, tries=1)
    try:
        refs = client.call("read its branches and tags", lambda: client.api.list_repo_refs(repo))
    except MissingError:
        if get_token() is None:  # then it may be there all the same: the Hub shows a private one to nobody else
            raise
        return None
    tags = {str(ref.name): str(ref.target_commit) for ref in refs.tags if TAG.fullmatch(ref.name)}
    head = next((_raw(client, str(ref.target_commit)) for ref in refs.branches if ref.name == MAIN), None)
    # What was promoted or rolled back to is on `main` by another commit than the tagged one.
    named = (tag for tag in tags if head is not None and _is_of(head, tag))  # by 8 of the manifest's 64 hex digits
    shown = next((tag for tag in named if _raw(client, tags[tag]) == head), None)
    for _, day in groupby(sorted(tags, reverse=True), key=day_in):
        raws = {tag: raw for tag in day if (raw := _raw(client, tags[tag])) is not None and _is_of(raw, tag)}
        found = [(manifest.decode(raw, what=f"{repo}@{tag}/{MANIFEST}"), tag) for tag, raw in raws.items()]
        if found:
            made, tag = max(found, key=lambda pair: (pair[0].created, pair[1]))
            return Released(repo, tag, made, shown, frozenset(tags))
    return None


def _is_of(raw: bytes, tag: str) -> bool:
    return manifest.identity(raw).startswith(identity_in(tag))


def _raw(client: HubClient, commit: str) -> bytes | None:
    try:
        return hub_file(client, commit, MANIFEST).read_bytes()
    except MissingError:
        return None


def hub_file(client: HubClient, commit: str, name: str) -> Path:
    """Return the path of a small file of a repository at a commit, in the Hub's cache. Raises `QuantmintError`."""
    from huggingface_hub import hf_hub_download

    where = {"revision": commit, "endpoint": client.api.endpoint, "etag_timeout": TIMEOUT_S}
    found: Any = client.call(f"read {name} of {commit[:8]}", lambda: hf_hub_download(client.repo, name, **where))
    return Path(found)
