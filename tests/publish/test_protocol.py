"""The protocol of all places, held to its promise by faults: readers always get one whole release.

A fault comes before a step of the storage: a call of the operating system for a folder, of an object for a bucket, of
the client for the Hub. `strike` brings it before the n-th one, and each test goes through the steps of an operation.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from quantmint.pipeline.base.errors import QuantmintError, StageError
from quantmint.pipeline.publish import destination as protocol
from quantmint.pipeline.publish.bucket import BucketDestination
from quantmint.pipeline.publish.destination import Destination
from quantmint.pipeline.publish.folder import FolderDestination
from quantmint.pipeline.publish.hub.client import HubClient
from quantmint.pipeline.publish.hub.destination import HubDestination
from quantmint.pipeline.publish.release import MANIFEST, Release
from quantmint.pipeline.store.files import DamagedError
from quantmint.pipeline.store.objects import Objects
from tests.publish.conftest import MakeRelease
from tests.publish.destinations import KINDS, TOLD, MakeDestination, contents, maker, publish, read, states

SYSTEM = ("fsync", "link", "mkdir", "rename", "replace", "rmdir", "symlink", "unlink")
OBJECTS = ("holds", "names", "put_if", "read", "remove", "remove_folder", "send", "sizes")
FEW = 5  # steps of an operation that are tried where not all are
Two = tuple[Release, Release]


class _CutOffError(BaseException):
    """A kill, to the code that it meets: nothing catches it."""


@pytest.fixture(params=[kind if kind == "folder" else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS])
def make_destination(request: pytest.FixtureRequest, tmp_path: Path) -> MakeDestination:
    return maker(request.param, request, tmp_path)


@pytest.fixture
def two(make_release: MakeRelease) -> Two:
    return make_release("one", day=1), make_release("two", day=2)


@contextmanager
def strike(kind: type[Destination], number: int, fault: Callable[[], object]) -> Iterator[list[str]]:
    """Bring a fault before the step of that number; the value lists the steps, without those of the fault."""
    steps: list[str] = []
    main = threading.get_ident()

    def struck(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def step(*arguments: Any, **named: Any) -> Any:
            if threading.get_ident() == main and not steps[number:]:
                steps.append(name)
                if len(steps) == number:
                    steps.append("the fault")
                    fault()
            return original(*arguments, **named)

        return step

    targets: list[tuple[object, str]]
    if issubclass(kind, FolderDestination):
        targets = [(os, name) for name in SYSTEM]
    elif issubclass(kind, BucketDestination):
        targets = [(Objects, name) for name in OBJECTS]
    else:
        targets = [(HubClient, "call")]
    with pytest.MonkeyPatch.context() as patch:
        for target, name in targets:
            patch.setattr(target, name, struck(name, getattr(target, name)))
        yield steps


def steps_of(place: Destination, operation: Callable[[Destination], object]) -> list[int]:
    """Numbers of steps to strike before: a few of all that an operation takes, the first and the last among them."""
    with strike(type(place), 10**9, lambda: None) as steps:
        operation(place)
    assert len(steps) > 2, "the steps were not counted"
    stride = max(1, len(steps) // FEW)
    return sorted({*range(1, len(steps) + 1, stride), *range(max(1, len(steps) - 2), len(steps) + 1)})


def take_lock(place: Destination) -> None:
    """The holder of the lock is dead, or paused for too long: a successor takes it, wherever that happened."""
    if isinstance(place, FolderDestination):
        for path in place._home.glob("lock*"):
            path.unlink()


def require_whole(place: Destination, folder: Path, *releases: Release) -> None:
    """Readers get one of these releases, and every release that is listed can be had whole."""
    known = {release.tag: contents(release) for release in releases}
    listed = states(place)
    # A commit on `main` that is not tagged yet is current, and not in the list.
    assert list(listed.values()).count("current") == 1 or isinstance(place, HubDestination), listed
    assert read(place, folder / "current") in known.values()
    for number, (tag, state) in enumerate(listed.items()):
        assert read(place, folder / f"{number}", tag) == known[tag]
        if state == "current":
            assert read(place, folder / "current") == known[tag], "the list does not say what readers get"
    if isinstance(place, FolderDestination):
        kept = [path for path in place._home.iterdir() if not path.is_symlink() and "partial" not in path.name]
        kept = [path for path in kept if path.is_dir()]
        assert {path.name for path in kept} == listed.keys()


def test_cut_off_before_any_step_the_same_command_publishes(
    make_destination: MakeDestination, two: Two, tmp_path: Path
) -> None:
    first, second = two

    def begun(name: str) -> Destination:
        publish(make_destination(name), first)
        return make_destination(name)

    for number in steps_of(begun("counted"), lambda place: publish(place, second)):
        place = begun(f"r{number}")
        with strike(type(place), number, _raise_cut_off), suppress(_CutOffError):
            publish(place, second)
        take_lock(place)
        require_whole(make_destination(f"r{number}"), tmp_path / f"{number}", first, second)
        again = publish(make_destination(f"r{number}"), second)
        assert again.current
        assert states(make_destination(f"r{number}")) == {second.tag: "current", first.tag: ""}
        require_whole(make_destination(f"r{number}"), tmp_path / f"{number}-again", first, second)


def test_paused_longer_than_the_lock_and_gone_on(
    make_destination: MakeDestination, make_release: MakeRelease, tmp_path: Path
) -> None:
    """Another publisher comes and goes meanwhile: it swept the halves, and moved the pointer."""
    old, mine, theirs = (make_release(name, day=day) for day, name in enumerate(("old", "mine", "theirs"), 1))

    def begun(name: str) -> Destination:
        publish(make_destination(name), old)
        return make_destination(name)

    for number in steps_of(begun("counted"), lambda place: publish(place, mine)):
        name = f"r{number}"
        place = begun(name)

        def meanwhile(name: str = name, place: Destination = place) -> None:
            take_lock(place)
            publish(make_destination(name), theirs)

        refused = None
        with strike(type(place), number, meanwhile):
            try:
                publish(place, mine)
            except StageError as error:
                refused = error
        require_whole(make_destination(name), tmp_path / f"{number}", old, mine, theirs)
        shown = [tag for tag, state in states(make_destination(name)).items() if state == "current"]
        assert shown in ([mine.tag], [theirs.tag])
        if refused is not None:
            assert shown == [theirs.tag], "what was refused moved the pointer"
            assert refused.hint, refused
            publish(make_destination(name), mine)
        require_whole(make_destination(name), tmp_path / f"{number}-again", old, mine, theirs)


@pytest.mark.parametrize("first", ["prune", "rollback"])
def test_a_rollback_and_a_prune_at_once(
    make_destination: MakeDestination, two: Two, tmp_path: Path, first: str
) -> None:
    """The release that somebody goes back to is the one that another removes."""
    old, new = two
    operations: dict[str, Callable[[Destination], object]] = {
        "prune": lambda place: place.prune(keep=1, dry_run=False, progress=TOLD),
        "rollback": lambda place: place.rollback(old.tag, dry_run=False, progress=TOLD),
    }
    second = next(name for name in operations if name != first)

    def begun(name: str) -> Destination:
        publish(make_destination(name), old)
        publish(make_destination(name), new)
        return make_destination(name)

    for number in steps_of(begun("counted"), operations[first]):
        name = f"r{number}"
        place = begun(name)

        def meanwhile(name: str = name, place: Destination = place) -> None:
            take_lock(place)
            with suppress(QuantmintError):  # it may come too late
                operations[second](make_destination(name))

        with strike(type(place), number, meanwhile), suppress(QuantmintError):
            operations[first](place)
        require_whole(make_destination(name), tmp_path / f"{number}", old, new)
        make_destination(name).prune(keep=1, dry_run=False, progress=TOLD)
        require_whole(make_destination(name), tmp_path / f"{number}-again", old, new)


def test_a_prune_that_was_cut_off_is_finished(make_destination: MakeDestination, two: Two, tmp_path: Path) -> None:
    old, new = two

    def begun(name: str) -> Destination:
        publish(make_destination(name), old)
        publish(make_destination(name), new)
        return make_destination(name)

    def prune(place: Destination) -> None:
        place.prune(keep=1, dry_run=False, progress=TOLD)

    for number in steps_of(begun("counted"), prune):
        name = f"r{number}"
        place = begun(name)
        with strike(type(place), number, _raise_cut_off), suppress(_CutOffError):
            prune(place)
        take_lock(place)
        assert states(make_destination(name))[new.tag] == "current"
        assert read(make_destination(name), tmp_path / f"{number}") == contents(new)
        prune(make_destination(name))
        assert states(make_destination(name)) == {new.tag: "current"}
        if isinstance(place, BucketDestination):
            assert place._objects.sizes(old.tag) == {}
            assert place._objects.names() == ("current.json", f"{new.tag}.json")
        elif isinstance(place, FolderDestination):
            assert [path.name for path in place._home.iterdir() if path.name != new.tag] == []
        publish(make_destination(name), old)  # it may come back
        require_whole(make_destination(name), tmp_path / f"{number}-again", old, new)


def test_a_promotion_that_was_cut_off_leaves_no_candidate(make_destination: MakeDestination, two: Two) -> None:
    """Neither where the same command is repeated, nor where somebody goes back to the former release."""
    old, new = two

    def begun(name: str) -> Destination:
        publish(make_destination(name), old)
        publish(make_destination(name), new, candidate=True)
        return make_destination(name)

    def promote(place: Destination) -> None:
        place.promote(new.tag, dry_run=False, progress=TOLD)

    for number in steps_of(begun("counted"), promote):
        name = f"r{number}"
        place = begun(name)
        with strike(type(place), number, _raise_cut_off), suppress(_CutOffError):
            promote(place)
        take_lock(place)
        promote(make_destination(name))
        assert states(make_destination(name)) == {new.tag: "current", old.tag: ""}
        make_destination(name).rollback(old.tag, dry_run=False, progress=TOLD)
        assert states(make_destination(name)) == {new.tag: "", old.tag: "current"}


def test_a_damaged_release_is_replaced_under_its_readers(tmp_path: Path, make_release: MakeRelease) -> None:
    """There is no moment at which the link leads nowhere, or a file that was sound is not there."""
    release = make_release("one", files={"sound.safetensors": b"sound" * 99})
    publish(FolderDestination(tmp_path / "published", "counted"), release)
    link = tmp_path / "published" / "r"
    seen: list[str] = []

    def look() -> None:
        assert (link / "sound.safetensors").read_bytes() == b"sound" * 99
        assert (link / "config.json").is_file()
        seen.append((link / "config.json").read_text())

    number = 0
    while True:
        number += 1
        publish(FolderDestination(tmp_path / "published", "r"), release)
        (link / "config.json").write_bytes(b"x" * release.files["config.json"].size)
        (link / "stray.safetensors").write_bytes(b"stray")
        with strike(FolderDestination, number, look) as steps:
            assert not publish(FolderDestination(tmp_path / "published", "r"), release).again
        assert read(FolderDestination(tmp_path / "published", "r"), tmp_path / f"copy-{number}") == contents(release)
        if "the fault" not in steps:
            break
    assert len(set(seen)) == 2, "it was looked at before and after"


def test_another_release_of_the_same_tag_is_refused(
    make_destination: MakeDestination, two: Two, tmp_path: Path
) -> None:
    """A tag holds 8 of 64 hex digits: two manifests may share them."""
    from dataclasses import replace

    first, second = two
    place = make_destination("r")
    publish(place, first)
    with pytest.raises(QuantmintError, match="another"):
        publish(make_destination("r"), replace(second, tag=first.tag))
    assert read(make_destination("r"), tmp_path / "copy") == contents(first)


def test_a_manifest_is_held_against_all_digits_that_are_known(
    make_destination: MakeDestination, two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record beside the release holds 64: a manifest that shares the tag's 8 is not taken for it."""
    place = make_destination("r")
    if not isinstance(place, BucketDestination):
        pytest.skip("nothing beside the release holds its identity")
    first, second = two
    publish(place, first)
    publish(place, second)
    place._objects.send(f"{first.tag}/{MANIFEST}", second.files[MANIFEST], lambda _: None)
    monkeypatch.setattr(protocol, "identity_in", lambda _: "")  # as if the 8 digits were the same
    with pytest.raises(DamagedError, match="is damaged"):
        place.rollback(first.tag, dry_run=False, progress=TOLD)


def _raise_cut_off() -> None:
    raise _CutOffError
