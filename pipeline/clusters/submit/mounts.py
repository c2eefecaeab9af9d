"""What of this machine's filesystem a run finds in its container, at the same paths.

The working folder, the store, the recipe's folder and the Hub's cache; all else is named by `--mount`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from os.path import expandvars, normpath
from pathlib import Path

from pipeline.base.errors import UserError
from pipeline.clusters.submit.place import require_plain
from pipeline.recipe.load import LoadedRecipe

_CACHES = ("HF_HUB_CACHE", "HF_DATASETS_CACHE", "HF_ASSETS_CACHE", "HF_MODULES_CACHE", "HF_XET_CACHE")
"""Where parts of HF_HOME are, if not there."""


@dataclass(frozen=True, slots=True)
class Mount:
    """``source`` of the host at ``target`` in the container; both absolute."""

    source: str
    target: str


@dataclass(frozen=True, slots=True)
class Needs:
    """Folders of a run besides its own. ``recipes`` are there, ``caches`` are made where they are missing.

    ``variables`` say where the Hub's client keeps what it loaded: an image may have values of its own.
    """

    recipes: tuple[Path, ...] = ()
    caches: tuple[Path, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)


def parse_mount(text: str) -> Mount:
    """``/path``, or ``/path:/path-in-the-container``."""
    source, _, target = text.partition(":")
    mount = Mount(source, target or source)
    for path in (mount.source, mount.target):
        require_plain("--mount", path)
        if not path.startswith("/") or set(path) & set(",:") or not normpath(mount.target).strip("/"):
            raise UserError(f"--mount: found {text!r}, expected /path or /path:/path, without commas, not the root")
    return mount


def needs_of(loaded: LoadedRecipe, folder: Path, environment: Mapping[str, str]) -> Needs:
    """The folders of a recipe and of what it extends, and the Hub's cache, of a run that starts in ``folder``.

    A recipe that comes with quantmint is in the image.
    """
    home = environment.get("HF_HOME") or f"{environment.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    told = {"HF_HOME": home, **{name: environment[name] for name in _CACHES if environment.get(name)}}
    hub = {name: Path(expandvars(path)).expanduser().absolute() for name, path in told.items()}
    shipped = Path(str(resources.files("recipes"))).resolve()
    files = (folder / place.file for place in loaded.positions.values.values())
    recipes = dict.fromkeys(file.parent for file in files if not file.resolve().is_relative_to(shipped))
    return Needs(tuple(recipes), tuple(hub.values()), {name: str(path) for name, path in hub.items()})


def mounts_of(paths: Iterable[Path], given: Iterable[Mount]) -> tuple[Mount, ...]:
    """What makes each path readable, and what it leads to, outer ones first; not what lies within another mount.

    Raises UserError for the root, which would hide the image, and for what a list of mounts cannot hold.
    """
    mounts = list(given)
    taken = {Path(mount.target) for mount in mounts}
    names = dict.fromkeys(Path(normpath(name)) for path in paths for name in (path.absolute(), path.resolve()))
    for name in names:
        if name == Path("/") or set(str(name)) & set(",:"):
            expected = "expected none with a comma or colon to mount, and not the root"
            raise UserError(f"--container: found the folder {name}, {expected}")
        if not any(name.is_relative_to(other) for other in taken | (names.keys() - {name})):
            mounts.append(Mount(str(name), str(name)))
    return tuple(sorted(mounts, key=lambda mount: len(Path(mount.target).parts)))
