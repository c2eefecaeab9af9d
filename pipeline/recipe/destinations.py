"""Define the kinds of destination: how a recipe and a command line name each, and which client serves it.

    >>> [kind.key for kind in KINDS]
    ['folder', 'storage', 'hub']
    >>> Storage.parse("s3://bucket/models/llama8b")
    (Storage(url='s3://bucket/models', endpoint=None), 'llama8b')

A kind of destination is a class here, a field of `Destinations`, and a `Destination` in a module of `pipeline.publish`.
No other module names it. `KINDS` is in the order in which releases are published: the nearest first.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, ClassVar, Final, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from quantmint.pipeline.base.argument import HUB_SCHEME, classify
from quantmint.pipeline.recipe.section import PRINTABLE, Section, wrong

RELEASES: Final = ".releases"
"""Folder beside the links of a published folder; what lies below it is not to be touched."""
_URL: Final = re.compile(
    r"(?P<base>(?!http|hf:)[a-z][a-z0-9+.-]*://[^\x00-\x1f@?#]*[^/\x00-\x1f@?#])/(?P<name>[^/\x00-\x1f@?#]+)/?"
)


class DestinationSection(Section):
    """A destination in a recipe; the parameter ``name`` of its methods is the recipe's name."""

    key: ClassVar[str]
    """Key of the recipe's section `publish`, and option of `quantmint publish`."""
    naming: ClassVar[str]
    """The field that names the place."""
    metavar: ClassVar[str]
    """What the option takes."""
    form: ClassVar[str]
    """What the option must look like, in a message."""
    typed_form: ClassVar[str]
    """What a place of this kind looks like where a command takes any, in a message."""
    client: ClassVar[str]
    """The `Destination` of this kind, by module and class; imported when it is opened."""
    bare: ClassVar[bool] = False
    """The recipe's key holds the naming field itself, not a section."""

    @classmethod
    def parse(cls, text: str) -> tuple[Self, str] | None:
        """Return the destination that a person typed, and the release's name in it; None for another kind."""
        raise NotImplementedError

    @classmethod
    def means(cls, text: str) -> str | None:
        """Return the value of the field `naming` for the text of `init --publish`; None if it means another kind."""
        raise NotImplementedError

    def public_name(self, name: str) -> str | None:
        """Return the name under which others can read the release of the recipe ``name``; None if it is private."""
        raise NotImplementedError

    def served_name(self, name: str) -> str:
        """Return the argument of `vllm serve` that loads the release of the recipe called ``name``."""
        raise NotImplementedError

    def needs_approval(self) -> bool:
        """Return whether somebody must accept a release here before readers get it."""
        return False


class Folder(DestinationSection):
    """A folder of this machine."""

    key = "folder"
    naming = "path"
    metavar = "FOLDER"
    form = "the path of a folder"
    typed_form = "a published folder (published/NAME)"
    client = "quantmint.pipeline.publish.folder.FolderDestination"
    bare = True

    path: str = Field(min_length=1, pattern=PRINTABLE)

    @classmethod
    def parse(cls, text: str) -> tuple[Self, str] | None:
        """Return the folder and the release's name in it; None where nothing was published under that path."""
        path = Path(text).absolute()
        there = path.name and (path.parent / RELEASES / path.name).is_dir()
        return (cls(path=str(path.parent)), path.name) if there else None

    @classmethod
    def means(cls, text: str) -> str | None:
        """Return the text unchanged: any text that means no other kind of destination is a folder's path."""
        return text

    def public_name(self, name: str) -> str | None:
        """Return None for every recipe: a folder is private."""
        return None

    def served_name(self, name: str) -> str:
        """Return ``name`` itself: the served model is called as the recipe, whatever the folder."""
        return name


def _without_credentials(address: object) -> object:
    if isinstance(address, str) and "@" in address:
        # The message must not repeat what it refuses.
        raise wrong("an address without credentials, which come from the environment", actual="an address with an @")
    return address


Address = Annotated[str, BeforeValidator(_without_credentials)]


class Storage(DestinationSection):
    """A bucket: S3 and what is compatible with it, Google, Azure, or a folder that machines share."""

    key = "storage"
    naming = "url"
    metavar = "URL"
    form = "a URL such as s3://bucket/prefix"
    typed_form = "a bucket (s3://bucket/prefix/NAME)"
    client = "quantmint.pipeline.publish.bucket.BucketDestination"

    url: Address = Field(pattern=r"^[a-z][a-z0-9+.-]*://[^\x00-\x1f?#]+$")
    """Prefix that receives a subfolder with the recipe's name: s3://bucket/prefix. Credentials come from the
    environment or the provider's own files, never from here."""
    endpoint: Address | None = Field(default=None, pattern=r"^https?://[^\x00-\x20]+$")
    """Address of an S3-compatible server (null: AWS, or what AWS_ENDPOINT_URL says)."""

    @classmethod
    def parse(cls, text: str) -> tuple[Self, str] | None:
        """Return the bucket and, as the release's name, the last part of a URL; None for text that is no such URL."""
        url = _URL.fullmatch(text)
        return None if url is None else (cls(url=url["base"]), url["name"])

    @classmethod
    def means(cls, text: str) -> str | None:
        """Return a bucket's URL unchanged; None for any other text."""
        return text if classify(text).kind == "bucket" else None

    def public_name(self, name: str) -> str | None:
        """Return ``name`` itself: it is the name of the subfolder in the bucket."""
        return name

    def served_name(self, name: str) -> str:
        """Return the URL of the bucket's subfolder ``name``."""
        return f"{self.url.rstrip('/')}/{name}"


class Hub(DestinationSection):
    """A repository of the Hugging Face Hub, or of a server that speaks its protocol (HF_ENDPOINT)."""

    key = "hub"
    naming = "repo"
    metavar = "ORG/NAME"
    form = "org/name"
    typed_form = "a repository (org/name)"
    client = "quantmint.pipeline.publish.hub.destination.HubDestination"

    repo: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Repository as organisation/name; it is created if it is not there."""
    private: bool = True
    """Only members of the organisation see it."""
    gated: Literal["auto", "manual"] | None = None
    """Readers share their address first, and are let in automatically or by hand (null: not gated)."""
    via: Literal["commit", "pull-request"] = "commit"
    """commit: one commit. pull-request: one commit on a pull request, verified there and then merged."""
    collection: str | None = Field(default=None, min_length=1, pattern=PRINTABLE)
    """Collection that lists the repository: its slug (organisation/title-id), or a title of one of the organisation's,
    which is created if it is not there."""

    @classmethod
    def parse(cls, text: str) -> tuple[Self, str] | None:
        """Return the repository and, as the release's name, its part after the organisation; None for other text.

        A path of that form whose folder has published releases is none, unless it starts with ``hf://``.
        """
        argument = classify(text)
        if argument.kind != "repository" or argument.revision is not None:
            return None
        if not text.startswith(HUB_SCHEME) and (Path(text).absolute().parent / RELEASES).is_dir():
            return None
        repo = argument.place.removeprefix(HUB_SCHEME)
        return cls(repo=repo), repo.partition("/")[2]

    @classmethod
    def means(cls, text: str) -> str | None:
        """Return the repository, "owner/name", that the text names; None if it names none."""
        argument = classify(text)
        return argument.place.removeprefix(HUB_SCHEME) if argument.kind == "repository" else None

    def public_name(self, name: str) -> str | None:
        """Return the repository, "owner/name"; the recipe's ``name`` is no part of it."""
        return self.repo

    def served_name(self, name: str) -> str:
        """Return the repository, "owner/name", which `vllm serve` loads; the recipe's ``name`` is no part of it."""
        return self.repo

    def needs_approval(self) -> bool:
        """Return whether releases go through a pull request (``via: pull-request``)."""
        return self.via == "pull-request"


KINDS: tuple[type[DestinationSection], ...] = (Folder, Storage, Hub)


class Destinations(Section):
    """The destinations of a checkpoint that passed."""

    folder: str | None = Field(default="published", min_length=1, pattern=PRINTABLE)
    """Folder that receives a subfolder with the recipe's name; relative to where the run starts (null: no folder)."""
    hub: Hub | None = None
    """Repository of the Hub (null: none)."""
    storage: Storage | None = None
    """Bucket (null: none)."""

    def destinations(self) -> tuple[DestinationSection, ...]:
        """Return the sections of the destinations that are set, in the order of `KINDS`."""
        named = ((kind, getattr(self, kind.key)) for kind in KINDS)
        return tuple(
            kind.model_validate({kind.naming: value}) if kind.bare else value
            for kind, value in named
            if value is not None
        )

    @model_validator(mode="after")
    def _somewhere(self) -> Self:
        if not self.destinations():
            kinds = " or ".join((", ".join(f"a {kind.key}" for kind in KINDS[:-1]), f"a {KINDS[-1].key}"))
            raise wrong(f"{kinds} (`quantmint run --until report` publishes nowhere)", actual="none")
        return self


def section_of(text: str) -> str:
    """Return the recipe's section `publish` for what a person typed, as YAML in one line."""
    kind, value = next((kind, value) for kind in reversed(KINDS) if (value := kind.means(text)) is not None)
    if kind.bare:
        return f"{{{kind.key}: {json.dumps(value)}}}"
    return f"{{folder: null, {kind.key}: {{{kind.naming}: {json.dumps(value)}}}}}"
