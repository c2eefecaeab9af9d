"""The table of knobs: complete against the guides, right about versions; and what people say beside it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.commands.cli import main
from quantmint.pipeline.serving.environment import parse_version, within
from quantmint.pipeline.serving.knobs.overrides import check_arguments
from quantmint.pipeline.serving.knobs.table import (
    NEWEST_READ,
    OLDEST_READ,
    knob,
    parse_condition,
    table,
)
from tests.tools.vllm_interface import read_table

ROOT = Path(__file__).parents[3]
INTERFACES = read_table()
GUIDES = yaml.safe_load((ROOT / "tests/assets/guide-knobs.yaml").read_text(encoding="utf-8"))
CONFIG = ROOT / "tests/assets/configs/DeepSeek-R1-0528"
TEXT, NUMBER, YES_NO = str, float, ("yes", "no")
#: What a rule may ask: the values that a fact can have, or its type.
FACTS: dict[str, tuple[str, ...] | type] = {
    "kind": ("rocm", "cuda", "cpu"),
    "purpose": ("serve", "measure", "tune"),
    "quick_reduce": ("NONE", "FP", "INT8", "INT6", "INT4", "INT3"),
    "quick_reduce_mb": NUMBER,
    "profile": ("latency", "streaming", "throughput", "offline"),
    "family": ("gpt-oss", "dsa", "mla", "moe", "dense"),
    "attention": ("mha", "mla", "dsa", "none"),
    "kv_cache_dtype": ("auto", "fp8"),
    **dict.fromkeys(("arch", "served_model_name", "speculative_config", "vllm_version", "tunableop_file"), TEXT),
    "quantization": TEXT,
    **dict.fromkeys(("nodes", "cpu_threads", "cpu_kv_gib", "engine_concurrency", "context", "max_model_len"), NUMBER),
    **dict.fromkeys(("encoder_share", "head_dim", "parameters_b", "tp", "pp", "dp", "gpus", "packed"), NUMBER),
    **dict.fromkeys(
        ("model_len_given", "trust_remote_code", "speculative", "tuned_gemms", "hybrid", "sliding"), YES_NO
    ),
    **dict.fromkeys(("multimodal", "aiter_mla", "chunked", "mm_prefix", "ep"), YES_NO),
}


def named() -> Iterator[tuple[str, str, str]]:
    """(guide, section, knob) of everything that a guide names and a supported version has."""
    gone = {*GUIDES["gone"], *GUIDES["other_programs"], *(old for item in table().values() for old in item.replaces)}
    for guide, sections in GUIDES["guides"].items():
        for section, names in sections.items():
            spelled = (GUIDES["spellings"].get(name, name) for name in names)
            yield from ((guide, section, name) for name in spelled if name not in gone)


def test_every_knob_of_the_guides_has_an_entry_that_cites_the_guide() -> None:
    names = {name for _, _, name in named()}
    assert not names - table().keys()
    assert len(names) > 80
    for guide, _, name in named():
        assert any(citation.startswith(f"{guide}: ") for citation in table()[name].guides), (name, guide)


def test_citations_name_sections_that_are_there() -> None:
    known = {(name, f"{guide}: {section}") for guide, section, name in named()}
    assert not {(item.name, citation) for item in table().values() for citation in item.guides} - known
    sources = {source for item in table().values() for rule in item.rules for source in rule.source.split("; ")}
    for guide, separator, section in (source.partition(": ") for source in sources):
        if separator and guide in GUIDES["guides"]:
            assert section in GUIDES["guides"][guide]


@pytest.mark.parametrize("version", INTERFACES)
def test_names_and_values_are_those_of_the_source(version: str) -> None:
    found, number, checked = INTERFACES[version], parse_version(version), 0
    for item in table().values():
        kind = "bench" if item.topic == "Benchmarks" else "flags" if item.kind == "flag" else "env"
        if item.vllm is None or item.kind in ("host", "docker"):
            assert item.name not in found["flags"] | found["env"]
            continue
        assert item.exists_in(number) == (item.name in found[kind]), item.name
        choices = found.get(item.name)
        if choices is None or not item.exists_in(number):
            continue
        rules = [rule for rule in item.rules if within(number, *rule.vllm)]
        values = {rule.value for rule in rules if isinstance(rule.value, str) and "{" not in rule.value}
        assert values <= choices, item.name
        assert version != NEWEST_READ or set(item.sweep) <= choices, item.name
        checked += len(values)
    assert checked


def test_every_switch_of_aiter_that_suits_more_than_one_model_is_there() -> None:
    """What is not belongs to one model, or was there for a few versions."""
    single = re.compile(r"_(DSV4|SITUV2\w*|DCP_VERIFY|MEGA_MOE_\w+|PAGED_ATTN)$")
    switches = {name for name in INTERFACES[NEWEST_READ]["env"] if "_AITER" in name and not single.search(name)}
    assert switches <= table().keys()
    assert len(switches) >= 17


def test_the_versions_are_the_supported_ones() -> None:
    assert (min(INTERFACES, key=parse_version), max(INTERFACES, key=parse_version)) == (OLDEST_READ, NEWEST_READ)
    every = [rule.vllm or () for item in table().values() for rule in (item, *item.rules)]
    bounds = {bound for bounds in every for bound in bounds if bound}
    assert all(within(bound, parse_version(OLDEST_READ), ()) and bound != (0, 19) for bound in bounds)


def test_rules_are_complete_and_ask_what_can_be_known() -> None:
    for item in table().values():
        assert item.kind in ("flag", "env", "host", "docker")
        assert bool(item.rules) != bool(item.never), item.name
        for rule in item.rules:
            assert rule.why
            assert rule.source
            if isinstance(rule.value, str):
                assert FACTS.keys() >= set(re.findall(r"\{([a-z_]+)\}", rule.value))
            for name, condition in rule.when.items():
                allowed = FACTS[name]
                assert not condition.comparisons or allowed is NUMBER, (item.name, name)
                assert not isinstance(allowed, tuple) or set(condition.values) <= set(allowed), (item.name, name)


def test_a_name_without_an_entry() -> None:
    assert knob("VLLM_ROCM_USE_AITER_FP4_ASM_GEMM").exists_in((0, 31, 2))
    assert not knob("VLLM_ROCM_USE_AITER_FP4_ASM_GEMM").exists_in((0, 30))
    with pytest.raises(UserError, match='did you mean "--block-size"'):
        knob("--blok-size")
    with pytest.raises(UserError, match="have no VLLM_ATTENTION_BACKEND") as caught:
        knob("VLLM_ATTENTION_BACKEND")
    assert caught.value.hint == "--attention-backend replaces it"


@pytest.mark.parametrize(
    ("given", "holds", "fails"),
    [
        (">= 4, <= 8", (4, 8), (3, 9)),
        ("!= 64, != 128", (96,), (64, 128)),
        ("< 1", (0.78,), (1.0, 3)),
        ("> 1", (2,), (1,)),
        ([64, 128], (128,), (96,)),
    ],
)
def test_conditions(given: str | list[str | int | float], holds: tuple[float, ...], fails: tuple[float, ...]) -> None:
    condition = parse_condition(given)
    assert all(condition.holds(value) for value in holds)
    assert not any(condition.holds(value) for value in fails)
    with pytest.raises(ValueError, match="expected a list of values or comparisons"):
        parse_condition("=> 2")


def test_each_argument_has_its_words() -> None:
    words = ["--reasoning-parser", "deepseek_r1", "--middleware", "a", "b", "--enable-auto-tool-choice", "--x=1"]
    assert [(reason.knob, reason.value) for reason in check_arguments(words)] == [
        ("--reasoning-parser", "deepseek_r1"),
        ("--middleware", "a b"),
        ("--enable-auto-tool-choice", "on"),
        ("--x", "1"),
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["deepseek_r1"], "found 'deepseek_r1' first, expected a flag"),
        (["--max_num_seqs=4"], "--max-num-seqs is a knob of the plan"),
        (["--no-enable-expert-parallel"], "is a knob of the plan"),
        (["--api-key", "secret"], "--api-key would stand in the process list"),
    ],
)
def test_arguments_that_the_plan_would_not_know_of_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        check_arguments(words)
    assert message in caught.value.message
    assert "secret" not in str(caught.value)


def test_arguments_stand_behind_the_plans_own(capsys: pytest.CaptureFixture[str]) -> None:
    options = "--target mi300x:8 --vllm-version 0.33.0 --json -- --reasoning-parser deepseek_r1"
    with pytest.raises(SystemExit) as ended:
        main(["serve", str(CONFIG), *options.split()])
    assert ended.value.code == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["argv"][-2:] == plan["processes"][0]["argv"][-2:] == ["--reasoning-parser", "deepseek_r1"]
    assert plan["reasons"][-1]["source"] == "given"
