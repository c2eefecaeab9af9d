"""Sections on 16-bit models: the source, and a draft that is quantized beside it."""

from __future__ import annotations

import re
from typing import Any

from pydantic import Field, model_validator

from quantmint.pipeline.base import schemes
from quantmint.pipeline.recipe.quantization import ModuleName, SchemeName
from quantmint.pipeline.recipe.section import PRINTABLE, Section, wrong

COMMIT = re.compile(r"[0-9a-f]{40}")


class Source(Section):
    """The 16-bit model to start from: a folder, or a repository of the Hub at a revision."""

    folder: str | None = Field(default=None, min_length=1, pattern=PRINTABLE)
    """Folder with config.json, safetensors and tokenizer; relative to this file."""
    repo: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?$")
    """Repository of the Hugging Face Hub, as organisation/name."""
    revision: str | None = Field(default=None, min_length=1)
    """Branch, tag or 40-digit commit of the repository (default: main). It is resolved to a commit when the recipe
    runs, and that commit is what is recorded."""

    @model_validator(mode="before")
    @classmethod
    def _revision_of_a_repo(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("repo") is not None and data.get("revision") is None:
            return {**data, "revision": "main"}
        return data

    @model_validator(mode="after")
    def _one_of_two(self) -> Source:
        if self.folder is None and self.repo is None:
            raise wrong("a folder or a repo", actual="neither")
        if self.folder is not None and self.repo is not None:
            raise wrong(
                "one of them; write `repo: null` or `folder: null` to drop an inherited one",
                actual="a folder with a repo",
            )
        if self.folder is not None and self.revision is not None:
            raise wrong("a repo for it; a folder has no revision", at="revision")
        return self

    @property
    def pinned(self) -> bool:
        """Whether the revision is a commit, which no one can move."""
        return self.revision is not None and COMMIT.fullmatch(self.revision) is not None


class Draft(Section):
    """A model that proposes tokens, quantized beside its target, published with it and served with it."""

    folder: str = Field(min_length=1, pattern=PRINTABLE)
    """Folder of the draft in 16 bit, EAGLE-3's, DFlash's or a whole model; relative to this file."""
    scheme: SchemeName
    """Scheme of its linear layers; one without static scales, since a draft is not calibrated."""
    exclude: tuple[ModuleName, ...] = Field(default=(), strict=False)
    """Modules left in 16 bit besides embeddings and lm_head, as in `quantization.exclude`."""

    @model_validator(mode="after")
    def _without_calibration(self) -> Draft:
        if schemes.scheme(self.scheme).needs_ranges:
            raise wrong("a scheme without static scales, such as ptpc_fp8", actual=self.scheme, at="scheme")
        return self
