"""The front matter: what the Hub's own classes read, and nothing of the base that no longer holds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from quantmint.pipeline.publish.card import CardFacts, front_matter, metadata, render
from quantmint.pipeline.publish.licences import terms
from quantmint.pipeline.recipe.sections import Licence
from tests.hub.standin import HubStandIn
from tests.publish.card import samples


def read(facts: CardFacts) -> dict[str, Any]:
    from huggingface_hub import ModelCard

    found: dict[str, Any] = ModelCard(render(facts)).data.to_dict()
    return found


def test_a_quantized_llama_by_the_hubs_own_classes() -> None:
    assert read(samples.llama("llama70b-mxfp4")) == {
        "base_model": ["meta-llama/Llama-3.3-70B-Instruct"],
        "base_model_relation": "quantized",
        "license": "llama3.3",
        "license_link": "https://huggingface.co/meta-llama/Llama-3.3-70B-Instruct/blob/main/LICENSE",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "language": ["en", "fr", "it", "pt", "hi", "es", "th", "de"],
        "tags": ["mxfp4", "gptq", "quark", "vllm", "quantmint", "facebook", "meta", "llama", "llama-3"],
        "datasets": ["HuggingFaceH4/ultrachat_200k"],
    }


def test_the_hub_accepts_it(hub: HubStandIn) -> None:
    """The client has every README.md validated before it commits one."""
    from huggingface_hub import HfApi

    api = HfApi(endpoint=hub.url, token=hub.token)
    api.create_repo("my-org/cards")
    for facts in (samples.llama(), samples.tiny(), samples.hostile()):
        api.upload_file(path_or_fileobj=render(facts).encode(), path_in_repo="README.md", repo_id="my-org/cards")
    assert len(hub.sent("POST", "/api/validate-yaml")) == 3


def test_a_folder_has_no_base_on_the_hub() -> None:
    found = read(samples.tiny())
    assert not {"base_model", "base_model_relation", "datasets", "language", "license_link"} & set(found)
    assert found["license"] == "unknown"
    assert found["tags"] == ["fp8", "ptpc", "compressed-tensors", "vllm", "quantmint"]
    assert "is not on the Hub" in render(samples.tiny())


@pytest.mark.parametrize(
    ("scheme", "tag"),
    [("fp8_block", "fp8"), ("mxfp4_fp8", "mxfp4"), ("nvfp4", "nvfp4"), ("mxfp6_e3m2", "mxfp6"), ("mxfp8", "mxfp8"),
     ("int8_w8a8", "int8"), ("w4a16", "int4")],
)  # fmt: skip
def test_the_format_of_the_weights_is_the_first_tag(scheme: str, tag: str) -> None:
    facts = samples.llama()
    section = facts.quantization.section.model_copy(update={"scheme": scheme})
    assert metadata(replace(facts, quantization=replace(facts.quantization, section=section)))["tags"][0] == tag


def test_other_licences_have_a_name_and_a_link() -> None:
    base = {"license": "other", "license_name": "qwen", "license_link": "LICENSE"}
    found = read(replace(samples.llama(), terms=terms(base, ("LICENSE",), Licence(accepted=True))))
    assert (found["license"], found["license_name"], found["license_link"]) == ("other", "qwen", "LICENSE")


def test_nothing_of_a_strange_card_gets_through() -> None:
    text = front_matter(samples.hostile())
    found = metadata(samples.hostile())
    assert "javascript" not in text.replace(found["license_name"], "")
    assert found["license_name"] == "img-src-x-onerror-alert-1-x-2-a-javascript-alert-1-b-c-lt"
    assert found["tags"][:5] == ["fp8", "gptq", "quark", "vllm", "quantmint"]


@pytest.mark.parametrize(
    ("base", "expected"),
    [
        ({"language": False, "tags": "one"}, (["no"], ["one"])),
        ({"language": "en", "tags": None}, (["en"], [])),
        ({"language": ["de", 7, " "], "tags": ["License:mit", "GGUF", "chat", "Chat", "VLLM"]}, (["de"], ["chat"])),
    ],
)
def test_what_a_base_may_say(base: dict[str, Any], expected: tuple[list[str], list[str]]) -> None:
    facts = samples.llama()
    found = metadata(replace(facts, base=replace(facts.base, metadata=base)))
    assert (found["language"], found["tags"][4:]) == expected


@pytest.mark.parametrize(
    ("architecture", "pictures", "tag"),
    [
        ("LlamaForCausalLM", False, "text-generation"),
        ("Llama4ForConditionalGeneration", True, "image-text-to-text"),
        ("WhisperForConditionalGeneration", False, None),
        ("", False, None),
    ],
)
def test_a_task_by_the_architecture_where_the_base_names_none(
    architecture: str, pictures: bool, tag: str | None
) -> None:
    facts = samples.llama()
    base = replace(facts.base, architecture=architecture, pictures=pictures, metadata={})
    assert metadata(replace(facts, base=base)).get("pipeline_tag") == tag
