"""The text of a card as a renderer reads it: whole tables, no markup that came with a name, what each reader needs."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

from quantmint.eval import workloads
from quantmint.eval.report import markdown
from quantmint.pipeline.publish.card import notice_text, release_title, render
from quantmint.pipeline.publish.licences import terms
from quantmint.pipeline.recipe.load import load_recipe
from quantmint.pipeline.recipe.sections import Licence
from quantmint.pipeline.recipe.serving import Speculative
from quantmint.pipeline.serving.model.facts import model_facts
from quantmint.pipeline.stages.card import launches
from tests.eval.report import made as reports
from tests.publish.card import samples

CARDS = {
    "llama": samples.llama,
    "mxfp4": lambda: samples.llama("llama70b-mxfp4"),
    "ptpc": lambda: samples.llama("llama70b-ptpc"),
    "tiny": samples.tiny,
    "hostile": samples.hostile,
    "stopped": lambda: samples.llama(report=reports.stopped()),
    "by the reference": lambda: samples.llama(report=reports.by_reference()),
    "invalid": lambda: samples.llama(report=reports.invalid()),
}


@cache
def text_of(name: str) -> str:
    return render(CARDS[name]())


def body(text: str) -> str:
    return text.split("\n---\n", 1)[1]


def tokens(text: str) -> list[Token]:
    parsed = MarkdownIt("commonmark", {"html": True}).enable("table").parse(body(text))
    return [token for outer in parsed for token in (outer, *(outer.children or ()))]


def section(text: str, title: str) -> str:
    return re.split(r"^## ", body(text).split(f"\n## {title}\n")[1], flags=re.MULTILINE)[0]


@pytest.mark.parametrize("name", CARDS)
def test_every_table_is_whole_and_nothing_is_markup_of_its_own(name: str) -> None:
    found = tokens(text_of(name))
    assert not [token.content for token in found if token.type in ("html_block", "html_inline")]
    links = [str(token.attrGet("href")) for token in found if token.type == "link_open"]
    assert all(re.match(r"https://|[A-Za-z][\w./-]*$", address) for address in links)
    assert not [token for token in found if token.type == "image"]
    for table in re.findall(r"(?:^\|.*\n)+", body(text_of(name)), flags=re.MULTILINE):
        cells = [len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()]
        assert len(set(cells)) == 1
    rows = len(re.findall(r"^\| ", body(text_of(name)), flags=re.MULTILINE))
    assert sum(token.type == "tr_open" for token in found) == rows - sum(token.type == "table_open" for token in found)
    assert "None" not in re.split(r"\W", body(text_of(name)))
    assert "\n\n\n" not in body(text_of(name))


@pytest.mark.parametrize("name", CARDS)
def test_a_card_has_one_title_and_its_sections(name: str) -> None:
    found = tokens(text_of(name))
    heads = [
        (token.tag, found[number + 1].content) for number, token in enumerate(found) if token.type == "heading_open"
    ]
    assert [tag for tag, _ in heads].count("h1") == 1
    wanted = ["Serve it", "Memory", "How it was made", "Limits", "Verify it", "Licence"]
    assert [title for tag, title in heads if tag == "h2" and title in wanted] == wanted


def test_the_same_facts_give_the_same_bytes() -> None:
    assert render(samples.llama()) == text_of("llama")


def test_the_figures_are_the_reports() -> None:
    assert markdown.size(reports.good()) in text_of("llama")
    accuracy = section(text_of("llama"), "Accuracy").replace("\xa0", " ").replace("\N{MINUS SIGN}", "-")
    assert "| gsm8k (exact\\_match) | 81.67 % | 81.52 % | -0.15 pt (-1.33 to +1.08) |" in accuracy
    assert "| 660 of 1,319 | PASS at -2.00 pt |" in accuracy
    assert "On AMD Instinct MI300X with vLLM 0.32.0." in section(text_of("llama"), "Throughput")
    assert "2,524,704 tokens" in section(text_of("llama"), "Memory")


def test_each_machine_has_its_command() -> None:
    served = section(text_of("llama"), "Serve it")
    assert re.findall(r"^### (.*)$", served, flags=re.MULTILINE) == ["AMD Instinct MI300X", "AMD Instinct MI355X"]
    commands = [token.content for token in tokens(text_of("llama")) if token.type == "fence" and token.info == "bash"]
    assert all("vllm serve my-org/Llama-3.3-70B-FP8-KV \\\n" in command for command in commands)
    assert all("export VLLM_ROCM_USE_AITER=1\n" in command for command in commands)
    assert all("--kv-cache-dtype fp8" in command for command in commands)
    assert "This is the first of 8 servers" in served


def test_what_a_machine_cannot_do_natively_is_said() -> None:
    before, _, after = section(text_of("mxfp4"), "Serve it").partition("### AMD Instinct MI300X")
    assert "gfx942 has no MX arithmetic" not in before
    assert "gfx942 has no MX arithmetic" in after
    assert "needs amd-quark" in after


def test_a_server_over_several_machines_has_its_whole_script() -> None:
    recipe = load_recipe("llama405b-fp8kv").recipe
    knobs = {"--tensor-parallel-size": 8, "--pipeline-parallel-size": 2}
    target = recipe.target.model_copy(update={"gpus": 16})
    recipe = recipe.model_copy(update={"target": target, "serve": recipe.serve.model_copy(update={"knobs": knobs})})
    facts = model_facts(samples.CONFIGS / "Llama-3.1-405B-Instruct")
    found = launches(recipe, workloads.load(recipe.target.workload), facts, "my-org/L", vllm="0.32.0")
    assert [launch.target for launch in found] == ["mi300x:8x2", "mi355x:8x2"]
    assert "---- node 1 (NODE_1_IP)" in found[0].command
    assert found[0].servers == 1
    assert "--pipeline-parallel-size" not in found[1].command  # a knob is for the machine that it was found on


def test_what_is_only_here_is_not_on_the_card() -> None:
    recipe = load_recipe("llama70b-fp8kv").recipe
    speculative = Speculative(method="eagle3", model="/models/draft", tokens=2)
    serve = recipe.serve.model_copy(update={"speculative": speculative, "tunableop": "tuned.csv"})
    facts = model_facts(samples.CONFIGS / "Llama-3.3-70B-Instruct")
    changed = recipe.model_copy(update={"serve": serve})
    found = launches(changed, workloads.load("throughput"), facts, "my-org/x", vllm="0.32.0")
    assert all("/models/draft" not in launch.command and "tuned.csv" not in launch.command for launch in found)
    assert all(len(launch.cautions) >= 2 for launch in found)
    assert "TunableOp found, whose file is not here" in " ".join(found[0].cautions)


def test_the_recipes_own_hardware_comes_first_and_names_no_thread_of_this_machine() -> None:
    served = section(text_of("tiny"), "Serve it")
    assert served.index("### CPU") < served.index("### AMD Instinct MI300X")
    assert 'export OMP_NUM_THREADS="$(nproc)"' in served


def test_a_machine_that_cannot_serve_it_says_why() -> None:
    refused = replace(samples.llama().launches[0], refusal="vLLM's CPU build has no kernel", command="")
    assert "It does not run there: vLLM's CPU build has no kernel." in render(samples.llama(launches=(refused,)))


def test_figures_from_elsewhere_are_said_before_they_are_read() -> None:
    text = text_of("by the reference")
    assert text.index("> **Before you read the figures.** Both sides were answered by the reference") < text.index(
        "| Size"
    )
    assert "Throughput was not measured: nothing is promised of it." in section(text, "Limits")
    assert "\n## Throughput" not in text
    assert "The commands for AMD Instinct MI300X and AMD Instinct MI355X are planned" in section(text, "Limits")


def test_what_was_judged_otherwise_is_no_pass() -> None:
    assert "**FAIL**: The canary stopped this checkpoint" in text_of("stopped")
    assert "- FAIL: No finite log probability" in text_of("stopped")
    assert "**INVALID**" in text_of("invalid")


def test_how_it_was_made_names_what_was_used() -> None:
    text = section(text_of("llama"), "How it was made")
    assert "`6f6073b423013f6a7d4d9f39144961bfbfbc386b`" in text
    assert "[HuggingFaceH4/ultrachat\\_200k](https://huggingface.co/datasets/HuggingFaceH4/ultrachat_200k)" in text
    assert "512 samples of at most 2,048 tokens, 1,048,576 tokens in all" in text
    assert "none: no scale depends on data" in section(text_of("ptpc"), "How it was made")


@pytest.mark.parametrize(
    ("signed", "wanted"),
    [
        ("key", ["--key PUBLIC_KEY", "model_signing verify key", "--public_key PUBLIC_KEY"]),
        ("keyless", ["--identity WHO --issuer ISSUER", "model_signing verify sigstore", "--identity_provider ISSUER"]),
        (None, ["--unsigned", "It is not signed"]),
    ],
)
def test_verification_by_the_commands_that_there_are(signed: str | None, wanted: list[str]) -> None:
    text = section(render(samples.llama(signed=signed)), "Verify it")
    assert all(words in text for words in wanted)


def test_what_the_licence_asks_to_be_shown_is_shown() -> None:
    text = text_of("llama")
    assert text.index("**Built with Llama.**") < text.index("**PASS**")
    licence = section(text, "Licence")
    assert "**Built with Llama.**" in licence
    assert "Acceptable Use Policy" in licence
    assert "[LICENSE](LICENSE), [USE\\_POLICY.md](USE_POLICY.md), [quantmint/NOTICE](quantmint/NOTICE)" in licence
    assert "Llama 3.3 is licensed under the Llama 3.3 Community License" in str(notice_text(samples.llama()))
    assert notice_text(samples.tiny()) is None
    assert "states no licence" in section(text_of("tiny"), "Licence")


def test_a_free_licence_asks_for_little() -> None:
    facts = samples.llama(terms=terms({"license": "apache-2.0"}, ("LICENSE",), Licence()))
    text = render(facts)
    assert "Built with" not in text
    assert "Changed files say that they were changed" in section(text, "Licence")
    assert notice_text(facts) is None


def test_a_title_is_one_plain_line() -> None:
    assert release_title(samples.llama()) == "meta-llama/Llama-3.3-70B-Instruct in fp8 with an FP8 KV cache, quark"


def test_text_that_looks_like_markup_is_shown_as_it_is() -> None:
    html = MarkdownIt("commonmark", {"html": True}).enable("table").render(body(text_of("hostile")))
    assert "<img" not in html
    assert "<script" not in html
    assert "&lt;img src=x onerror=alert(1)&gt;" in html
    assert 'href="javascript' not in html
    assert "<code>re:.*(q|k)_proj`</code>" in html
    assert all(
        "$" not in token.content or token.type != "text" for token in tokens(text_of("hostile").replace("\\$", ""))
    )
