"""What of this machine's filesystem a run must find in its container, at the same paths.

The working folder and the store are not all: a recipe names a base model's folder, files of calibration and workload,
a key, a folder to publish to, which may lie anywhere on the shared filesystem. A link stays one: its folder is mounted,
and what it leads to. Mounted itself it would be a folder, and the relative links below it, of which a snapshot of the
Hub is made, would lead elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import resources
from os.path import exists, expandvars, normpath
from pathlib import Path
from urllib.parse import urlsplit

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
    """Paths of a run. ``read`` are there, ``written`` are folders that a run makes where they are missing,
    outside of its own.

    ``variables`` say where the Hub's client keeps what it loaded: an image may have values of its own.
    """

    read: tuple[Path, ...] = ()
    written: tuple[Path, ...] = ()
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
    """The paths of a recipe that runs in ``folder``, and of the Hub's cache. What comes with quantmint is left out."""
    recipe = loaded.recipe
    home = environment.get("HF_HOME") or f"{environment.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    told = {"HF_HOME": home, **{name: environment[name] for name in _CACHES if environment.get(name)}}
    hub = {name: Path(expandvars(path)).expanduser().absolute() for name, path in told.items()}
    written = [] if recipe.publish.folder is None else [folder / recipe.publish.folder]
    if recipe.publish.storage is not None and urlsplit(recipe.publish.storage.url).scheme in {"file", "local"}:
        written.append(Path(urlsplit(recipe.publish.storage.url).path))
    shipped = [Path(str(resources.files(package))).resolve() for package in ("recipes", "calibration", "eval")]
    own = (path for path in _named(loaded, folder) if not any(path.resolve().is_relative_to(one) for one in shipped))
    made = (path for path in (*written, *hub.values()) if not path.resolve().is_relative_to(folder.resolve()))
    read = dict.fromkeys(path for path in own if exists(path))  # noqa: PTH110 - Path's raises what cannot be looked at
    return Needs(tuple(read), tuple(made), {name: str(path) for name, path in hub.items()})


def mounts_of(paths: Iterable[Path], given: Iterable[Mount]) -> tuple[Mount, ...]:
    """What makes each path readable, once, outer ones first; what lies within another, or within ``given``, is not.

    Raises UserError for the root, which would hide the image, and for what a list of mounts cannot hold.
    """
    names = dict.fromkeys(name for path in paths for name in _crossed(path.absolute()))
    mounts = list(given)
    taken = {Path(mount.target) for mount in mounts}
    for name in names:
        if name == Path("/") or set(str(name)) & set(",:"):
            expected = "expected none with a comma or colon to mount, and not the root"
            raise UserError(f"--container: found the folder {name}, {expected}")
        if not any(name.is_relative_to(other) for other in taken | (names.keys() - {name})):
            mounts.append(Mount(str(name), str(name)))
    return tuple(sorted(mounts, key=lambda mount: len(Path(mount.target).parts)))


def _crossed(path: Path) -> Iterator[Path]:
    """The folders of the links that lie on the way to a path, then where it leads."""
    link = next((one for one in reversed((path, *path.parents)) if one.is_symlink()), None)
    if link is None:
        yield Path(normpath(path))
        return
    folder = Path(normpath(link.parent))  # no link is on the way to it
    yield link if folder == Path("/") else folder
    yield from _crossed(folder / link.readlink() / path.relative_to(link))


def _named(loaded: LoadedRecipe, folder: Path) -> Iterator[Path]:
    """What a recipe names, and what that names."""
    from calibration.errors import CalibrationError
    from calibration.sets import load_set
    from eval import workloads
    from eval.errors import DefinitionError

    recipe = loaded.recipe
    yield from (folder / file for file in dict.fromkeys(place.file for place in loaded.positions.values.values()))
    beside = {
        ("source", "folder"): recipe.source.folder,
        ("publish", "sign", "key"): None if recipe.publish.sign is None else recipe.publish.sign.key,
        ("serve", "tunableop"): recipe.serve.tunableop,
    }
    for path, value in beside.items():
        if value is not None:
            yield Path(loaded.place(*path).file).absolute().parent / value
    if loaded.source_folder is not None and loaded.source_folder.is_dir():
        links = (file for file in loaded.source_folder.iterdir() if file.is_symlink())
        yield from dict.fromkeys(file.resolve().parent for file in links)
    try:
        if recipe.calibration is not None:
            texts = load_set(recipe.calibration.set)
            yield from (folder / path for path in (recipe.calibration.set, texts.file) if path is not None)
        yield folder / recipe.target.workload
        cells = workloads.load(recipe.target.workload).cells
        yield from (cell.file.path for cell in cells if cell.file is not None)
    except (CalibrationError, DefinitionError):
        return  # the checks of the recipe say it
    speculative = recipe.serve.speculative
    words = [*recipe.serve.knobs.values(), *recipe.serve.arguments, speculative.model if speculative else None]
    yield from (Path(word) for word in words if isinstance(word, str) and word.startswith("/"))
