"""Where a checkpoint that passed goes, under which terms, and who vouches for it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from pipeline.recipe.section import PRINTABLE, Section, wrong


def _without_credentials(address: object) -> object:
    if isinstance(address, str) and "@" in address:
        # The message must not repeat what it refuses.
        raise wrong("an address without credentials, which come from the environment", found="an address with an @")
    return address


Address = Annotated[str, BeforeValidator(_without_credentials)]


class Hub(Section):
    """A repository of the Hugging Face Hub, or of a server that speaks its protocol (HF_ENDPOINT)."""

    repo: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*$",
        description="Repository as organisation/name; it is created if it is not there.",
    )
    private: bool = Field(default=True, description="Only members of the organisation see it.")
    gated: Literal["auto", "manual"] | None = Field(
        default=None,
        description="Readers share their address first, and are let in automatically or by hand (null: not gated).",
    )
    via: Literal["commit", "pull-request"] = Field(
        default="commit",
        description="commit: one commit. pull-request: one commit on a pull request, verified there and then merged.",
    )
    collection: str | None = Field(
        default=None,
        min_length=1,
        pattern=PRINTABLE,
        description="Collection that lists the repository: its slug (organisation/title-id), or a title of one of the "
        "organisation's, which is created if it is not there.",
    )


class Storage(Section):
    """A bucket or a file system that fsspec reaches; S3 and what is compatible with it."""

    url: Address = Field(
        pattern=r"^[a-z][a-z0-9+.-]*://[^\x00-\x1f?#]+$",
        description="Prefix that receives a subfolder with the recipe's name: s3://bucket/prefix. Credentials come "
        "from the environment or the provider's own files, never from here.",
    )
    endpoint: Address | None = Field(
        default=None,
        pattern=r"^https?://[^\x00-\x20]+$",
        description="Address of an S3-compatible server (null: AWS, or what AWS_ENDPOINT_URL says).",
    )


class Signing(Section):
    """Who vouches for what is published: a key, or an identity."""

    key: str | None = Field(
        default=None,
        min_length=1,
        pattern=PRINTABLE,
        description="PEM file with an elliptic-curve private key, relative to this file; its passphrase is read from "
        "QUANTMINT_SIGNING_PASSPHRASE.",
    )
    keyless: bool = Field(
        default=False,
        description="Sign with the identity of the workload or person through Sigstore; needs a network.",
    )

    @model_validator(mode="after")
    def _one_of_two(self) -> Signing:
        if (self.key is not None) == self.keyless:
            found = "both" if self.keyless else "neither"
            raise wrong("a key or `keyless: true`", found=found)
        return self


class Licence(Section):
    """What the source's own card does not say, or asks to be agreed to."""

    id: str | None = Field(
        default=None,
        pattern=r"^[a-z0-9][a-z0-9.-]*$",
        description="Identifier of the licence as the Hub writes it: apache-2.0, llama3.3, ... (null: the source's).",
    )
    link: str | None = Field(
        default=None, pattern=r"^(https://[^\x00-\x20]+|LICENSE[A-Za-z0-9._-]*)$", description="Where its text is."
    )
    accepted: bool = Field(
        default=False,
        description="The conditions of the source's licence on passing on what is made from it are known and met; "
        "asked for where a licence has such conditions.",
    )


class Publish(Section):
    """Where a checkpoint that passed goes."""

    folder: str | None = Field(
        default="published",
        min_length=1,
        pattern=PRINTABLE,
        description="Folder that receives a subfolder with the recipe's name; relative to where the run starts "
        "(null: no folder).",
    )
    hub: Hub | None = Field(default=None, description="Repository of the Hub (null: none).")
    storage: Storage | None = Field(default=None, description="Bucket (null: none).")
    to: Literal["release", "candidate"] = Field(
        default="release",
        description="release: it is what readers get at once. candidate: it waits beside what they get for "
        "`quantmint promote`.",
    )
    keep: int | None = Field(
        default=None,
        ge=1,
        description="Releases that stay; older ones are removed after a publication, never the current one or a "
        "candidate (null: all stay).",
    )
    sign: Signing | None = Field(default=None, description="Signature over all files (null: none).")
    licence: Licence = Field(default_factory=Licence, description="Terms of the source, where its card is silent.")

    @model_validator(mode="after")
    def _somewhere(self) -> Publish:
        if self.folder is None and self.hub is None and self.storage is None:
            raise wrong("a folder, a hub or a storage", found="none of them")
        return self
