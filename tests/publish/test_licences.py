"""What a licence asks of those who pass a model on, and when nothing goes out."""

from __future__ import annotations

import re
from typing import Any

import pytest

from quantmint.pipeline.publish.licences import refusal, table, terms
from quantmint.pipeline.recipe.sections import Licence

LLAMA = {"license": "llama3.3"}
ACCEPTED = Licence(accepted=True)
QWEN = {"license": "other", "license_name": "qwen", "license_link": "https://huggingface.co/x/blob/main/LICENSE"}


def test_the_table_is_whole() -> None:
    for key, row in table().items():
        assert re.fullmatch(r"[a-z0-9.+-]+", key)
        assert row["name"]
        assert row["redistribution"] in ("yes", "conditions", "no")
        assert row.get("same", key) in table()
        assert not row.get("acceptance") or row["conditions"]
        assert row.get("link", "https://").startswith("https://")


@pytest.mark.parametrize("name", ["apache-2.0", "mit", "bsd-3-clause", "cc-by-4.0"])
def test_free_licences_let_it_pass(name: str) -> None:
    assert refusal(terms({"license": name}, ()), "my-org/anything") is None


@pytest.mark.parametrize(
    ("metadata", "files", "section", "name", "reason"),
    [
        (LLAMA, ("LICENSE",), None, "my-org/Llama-3.3-70B-FP8", "accepted: true"),
        (LLAMA, ("LICENSE",), ACCEPTED, "my-org/Meta-Llama-3.3-70B", "begins with 'Llama', found 'my-org/Meta-"),
        (LLAMA, ("LICENSE",), ACCEPTED, "llama-org/70B-FP8", "begins with 'Llama'"),
        (LLAMA, ("USE_POLICY.md",), ACCEPTED, "my-org/Llama-3.3-70B-FP8", "the source has no LICENSE"),
        ({"license": "llama3"}, ("LICENSE",), ACCEPTED, "o/Llama-70B", "begins with 'Llama 3'"),
        ({"license": "gemma"}, (), ACCEPTED, "my-org/gemma-3-FP8", "the source has no LICENSE"),
        (QWEN, ("LICENSE",), None, "my-org/Qwen2.5-72B-FP8", "Qwen License Agreement"),
        ({"license": "cc-by-nc-4.0"}, (), None, "o/n", "No commercial use"),
        ({"license": "cc-by-nc-nd-4.0"}, ("LICENSE",), ACCEPTED, "o/n", "does not allow"),
        ({"license": "other", "license_name": "mnpl"}, ("LICENSE",), ACCEPTED, "o/n", "does not allow"),
        ({}, (), ACCEPTED, "o/n", "not in the table"),
        ({"license": "unknown"}, (), None, "o/n", "not in the table"),
        ({"license": "other"}, ("LICENSE",), ACCEPTED, "o/n", "not in the table"),
        ({"license": "other", "license_name": "house-rules"}, (), ACCEPTED, "o/n", "house-rules"),
        ({"license": ["mit", "gemma"]}, ("LICENSE",), ACCEPTED, "o/n", "not in the table"),
        ({"license": "cc-by-nd-4.0"}, (), Licence(id="mit"), "o/n", "publish.licence.id says mit"),
    ],
)
def test_what_does_not_go_out(
    metadata: dict[str, Any], files: tuple[str, ...], section: Licence | None, name: str, reason: str
) -> None:
    assert reason in str(refusal(terms(metadata, files, section), name))


@pytest.mark.parametrize(
    ("metadata", "files", "section", "name"),
    [
        (LLAMA, ("LICENSE", "USE_POLICY.md"), ACCEPTED, "my-org/Llama-3.3-70B-FP8"),
        (LLAMA, ("LICENSE.txt",), ACCEPTED, "llama70b-fp8kv"),
        ({"license": "llama3"}, ("LICENSE",), ACCEPTED, "my-org/Llama-3-8B-FP8"),
        ({"license": "gemma"}, (), Licence(accepted=True, link="https://ai.google.dev/gemma/terms"), "o/gemma-FP8"),
        (QWEN, ("LICENSE",), ACCEPTED, "my-org/Qwen2.5-72B-FP8"),
        ({}, (), Licence(id="apache-2.0"), "o/n"),
        ({"license": "other"}, (), Licence(id="other", link="https://example.org/terms", accepted=True), "o/n"),
        ({"license": "cc-by-nd-4.0"}, (), Licence(id="other", link="https://example.org/", accepted=True), "o/n"),
    ],
)
def test_what_goes_out(metadata: dict[str, Any], files: tuple[str, ...], section: Licence | None, name: str) -> None:
    assert refusal(terms(metadata, files, section), name) is None


def test_terms_are_named_as_the_hub_names_them() -> None:
    found = terms(QWEN, ("LICENSE", "model.safetensors"))
    assert (found.id, found.hub_name, found.link, found.files) == ("other", "qwen", QWEN["license_link"], ("LICENSE",))
    own = terms({"license": "cc-by-nd-4.0"}, (), Licence(id="other", link="https://example.org/"))
    assert (own.id, own.hub_name, own.name, own.link) == (
        "other", "granted", "terms that were granted", "https://example.org/"
    )  # fmt: skip
    assert terms({"license": "MPL-2.0"}, ()).id == "mpl-2.0"  # an identifier of the Hub, though not of the table
    assert terms({}, ()).id == "unknown"


def test_a_link_that_leads_nowhere_from_here_is_not_taken_over() -> None:
    stated = {"license": "other", "license_name": "qwen", "license_link": "LICENSE"}
    assert terms(stated, ("LICENSE",)).link == "LICENSE"
    assert str(terms(stated, ()).link).startswith("https://huggingface.co/Qwen/")
    assert terms({**stated, "license_name": "x", "license_link": "javascript:alert(1)"}, ()).link is None
