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
from os.path import exists, expanduser, expandvars, normpath
from pathlib import Path
from urllib.parse import urlsplit

from pipeline.errors import UserError
from pipeline.recipe.load import LoadedRecipe
from pipeline.submit.task import require_plain

_CACHES = ("HF_HUB_CACHE", "HF_DATASETS_CACHE", "HF_ASSETS_CACHE", "HF_MODULES_CACHE", "HF_XET_CACHE")
"""Where parts of HF_HOME are, if not there."""
_LINKS = 40  # as Linux has it
_TOKEN = "HF_TOKEN_PATH"  # noqa: S105 - the name of a variable


@dataclass(frozen=True, slots=True)
class Mount:
    """``source`` of the host at ``target`` in the container; both absolute."""

    source: str
    target: str


@dataclass(frozen=True, slots=True)
class Needs:
    """Paths of a run. ``read`` are there, ``written`` are folders that a run makes where they are missing, outside
    of its own.

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
        if not path.startswith("/") or set(path) & set(",:"):
            raise UserError(f"--mount: found {text!r}, expected /path or /path:/path, without commas")
    if not normpath(mount.target).strip("/"):
        raise UserError(f"--mount: found {text!r}, and what is mounted at the root hides the image")
    return mount


def needs_of(loaded: LoadedRecipe, folder: Path, environment: Mapping[str, str]) -> Needs:
    """The paths of a recipe that runs in ``folder``, and of the Hub's cache. What comes with quantmint is left out."""
    recipe = loaded.recipe
    written = [] if recipe.publish.folder is None else [folder / recipe.publish.folder]
    if recipe.publish.storage is not None and urlsplit(recipe.publish.storage.url).scheme in {"file", "local"}:
        written.append(Path(urlsplit(recipe.publish.storage.url).path))
    hub = _hub_folders(environment)
    shipped = [Path(str(resources.files(package))).resolve() for package in ("recipes", "calibration", "eval")]
    named = [*_named(loaded, folder), *([_meant(environment[_TOKEN])] if environment.get(_TOKEN) else [])]
    own = (path for path in named if not any(path.resolve().is_relative_to(one) for one in shipped))
    variables = {name: str(path) for name, path in hub.items()}
    made = (path for path in (*written, *hub.values()) if not path.resolve().is_relative_to(folder.resolve()))
    read = dict.fromkeys(path for path in own if exists(path))  # noqa: PTH110 - Path's raises what cannot be looked at
    return Needs(tuple(read), tuple(made), variables)


def mounts_of(paths: Iterable[Path], asked: Iterable[Mount]) -> tuple[Mount, ...]:
    """What makes each path readable, once, outer ones first; what lies within another, or within ``asked``, is not.

    Raises UserError for the root, which would hide the image, and for what a list of mounts cannot hold.
    """
    names: dict[Path, None] = {}
    for path in paths:
        names |= dict.fromkeys(_crossed(path))
    mounts = list(asked)
    taken = [Path(mount.target) for mount in mounts]
    if twice := next((path for path in taken if taken.count(path) > 1), None):
        raise UserError(f"--mount: found {twice} twice, expected one folder at one place")
    for name in names:
        if name == Path("/") or set(str(name)) & set(",:"):
            expected = "expected none with a comma or colon to mount, and not the root"
            raise UserError(f"--container: found the folder {name}, {expected}")
        others = (other for other in (*names, *taken) if other != name or other in taken)
        if not any(name.is_relative_to(other) for other in others):
            mounts.append(Mount(str(name), str(name)))
    return tuple(sorted(mounts, key=lambda mount: len(Path(mount.target).parts)))


def _crossed(path: Path) -> Iterator[Path]:
    """The folders of the links that lie on the way to a path, then where it leads; as a kernel goes it."""
    here, ahead, links = Path("/"), list(reversed(path.absolute().parts[1:])), 0
    while ahead:
        part = ahead.pop()
        there = here.parent if part == ".." else here / part
        if part == ".." or not there.is_symlink():
            here = there
            continue
        links += 1
        if links > _LINKS:
            raise UserError(f"--container: {path} goes through more than {_LINKS} links")
        yield there if here == Path("/") else here
        target = there.readlink()
        here = Path("/") if target.is_absolute() else here
        ahead += [step for step in reversed(target.parts) if step != "/"]
    yield here


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


def _hub_folders(environment: Mapping[str, str]) -> dict[str, Path]:
    """Where the Hub's client keeps what it loaded, by the variables that say so."""
    home = environment.get("HF_HOME") or f"{environment.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    said = {"HF_HOME": home, **{name: environment[name] for name in _CACHES if environment.get(name)}}
    return {name: _meant(path) for name, path in said.items()}


def _meant(path: str) -> Path:
    """As the Hub's client reads it, which leaves a user or a variable that is not there as it stands."""
    return Path(expandvars(expanduser(path))).absolute()  # noqa: PTH111
