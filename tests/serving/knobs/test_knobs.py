"""The table of knobs: complete against the guides, right about versions, strict about itself."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.errors import UserError
from pipeline.serving.environment import VllmEnvironment
from pipeline.serving.knobs.files import read_knobs
from pipeline.serving.knobs.table import (
    FACTS,
    Condition,
    knob,
    known_in,
    parse_condition,
    parse_version,
    replacement,
    table,
    within,
)

ROOT = Path(__file__).parents[3]
INTERFACES = sorted((ROOT / "tests/assets/vllm").glob("*.json"), key=lambda path: parse_version(path.stem))
GUIDES = yaml.safe_load((ROOT / "tests/assets/guide-knobs.yaml").read_text(encoding="utf-8"))


@cache
def interface(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def named() -> Iterator[tuple[str, str, str]]:
    """(guide, section, knob) of everything that a guide names."""
    for guide, sections in GUIDES["guides"].items():
        for section, names in sections.items():
            for name in names:
                if name not in GUIDES["other_programs"]:
                    yield guide, section, GUIDES["spellings"].get(name, name)


def test_every_knob_of_the_guides_has_an_entry_that_cites_the_guide() -> None:
    missing = {name for _, _, name in named()} - table().keys()
    assert not missing
    uncited = {
        (name, guide)
        for guide, _, name in named()
        if not any(citation.startswith(f"{guide}: ") for citation in table()[name].guides)
    }
    assert not uncited
    assert len({name for _, _, name in named()}) > 90


def test_citations_name_sections_that_are_there() -> None:
    known = {(name, f"{guide}: {section}") for guide, section, name in named()}
    assert not {(item.name, citation) for item in table().values() for citation in item.guides} - known
    for item in table().values():
        for rule in item.rules:
            for source in rule.source.split("; "):
                guide, separator, section = source.partition(": ")
                if separator and guide in GUIDES["guides"]:
                    assert section in GUIDES["guides"][guide], (item.name, source)


@pytest.mark.parametrize("path", INTERFACES, ids=lambda path: path.stem)
def test_versions_are_those_of_the_source(path: Path) -> None:
    found, version = interface(path), parse_version(path.stem)
    wrong = []
    for item in table().values():
        if item.outside or item.kind in ("host", "docker"):
            continue
        there = found["bench" if item.topic == "Benchmarks" else "flags" if item.kind == "flag" else "env"]
        if item.known(version) != (item.name in there):
            wrong.append(item.name)
    assert not wrong


def test_what_is_not_vllms_own_is_in_none_of_its_interfaces() -> None:
    outside = {item.name for item in table().values() if item.outside}
    for path in INTERFACES:
        found = interface(path)
        assert not outside & set(found["flags"]) | outside & set(found["env"])


CHOICES = {"--attention-backend": "attention backends", "VLLM_ATTENTION_BACKEND": "attention backends"}


@pytest.mark.parametrize("path", INTERFACES, ids=lambda path: path.stem)
def test_values_are_among_the_choices_of_their_version(path: Path) -> None:
    found, version = interface(path), parse_version(path.stem)
    checked = 0
    for item in table().values():
        choices = found["choices"].get(CHOICES.get(item.name, item.name))
        if choices is None or not item.known(version):
            continue
        for rule in item.rules:
            if within(version, rule.first, rule.end) and isinstance(rule.value, str) and "{" not in rule.value:
                assert rule.value in choices, (item.name, rule.value)
                checked += 1
        if path == INTERFACES[-1]:
            assert set(item.sweep) <= set(choices), item.name
    assert checked


def test_a_rule_never_waits_for_a_version_that_lacks_its_knob() -> None:
    for item in table().values():
        for rule in item.rules:
            assert not item.end or not rule.first or within(rule.first, (), item.end), item.name
            assert not item.first or not rule.end or within(item.first, (), rule.end), item.name


def test_every_fact_is_asked_for_or_said() -> None:
    asked = {name for item in table().values() for rule in item.rules for name in rule.when}
    said = {
        name
        for item in table().values()
        for rule in item.rules
        if isinstance(rule.value, str)
        for name in re.findall(r"\{([a-z_]+)\}", rule.value)
    }
    assert asked | said <= FACTS.keys()


def test_what_took_a_knobs_place() -> None:
    assert replacement("VLLM_ATTENTION_BACKEND", "0.33.0") == "--attention-backend"
    assert replacement("--attention-backend", "0.12.0") == "VLLM_ATTENTION_BACKEND"
    assert replacement("--num-scheduler-steps", "0.24.0") == "--async-scheduling"
    assert replacement("VLLM_ALL2ALL_BACKEND", "0.15.0") is None  # still there
    assert replacement("--swap-space", "0.33.0") is None  # nothing
    assert known_in("VLLM_ROCM_USE_AITER_FP4_ASM_GEMM", "0.31.2")
    assert not known_in("VLLM_ROCM_USE_AITER_FP4_ASM_GEMM", "0.30")
    with pytest.raises(UserError, match="did you mean '--block-size'"):
        knob("--blok-size")


@pytest.mark.parametrize(
    ("text", "holds", "fails"),
    [
        (">= 4, <= 8", (4, 8), (3, 9)),
        ("!= 64, != 128", (96,), (64, 128)),
        ("< 1", (0.78,), (1.0, 3)),
        ("> 1", (2,), (1,)),
    ],
)
def test_comparisons(text: str, holds: tuple[float, ...], fails: tuple[float, ...]) -> None:
    condition = parse_condition(text)
    assert all(condition.holds(value) for value in holds)
    assert not any(condition.holds(value) for value in fails)


def test_a_list_is_one_of() -> None:
    assert Condition(values=("64", "128")).holds(128)
    assert not Condition(values=("64", "128")).holds(96)


GOOD = """\
--a:
  kind: flag
  topic: T
  about: something
  vllm: ["0.13", null]
  rules:
    - value: x
      when: {kind: [rocm], tp: ">= 2"}
      why: because
      source: someone
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("topic:", "topik:", r"t\.yaml:3: 'topik' is not a key here; did you mean 'topic'"),
        ("kind: flag", "kind: flags", r"t\.yaml:2: 'flags' is not a kind of knob; did you mean 'flag'"),
        ("[rocm]", "[rcom]", r"t\.yaml:8: 'rcom' is not a value of kind; did you mean 'rocm'"),
        ("tp:", "tpp:", r"t\.yaml:8: 'tpp' is not a key here; did you mean"),
        ('">= 2"', '"=> 2"', r"t\.yaml:8: tp: expected a list of values or comparisons"),
        ("{kind: [rocm]", '{kind: "> 1"', r"t\.yaml:8: kind is text: expected a list"),
        ("value: x", 'value: "{gpu}"', r"t\.yaml:7: 'gpu' is not a fact; did you mean 'gpus'"),
        ("value: x", "value: 112", r"t\.yaml:7: expected text, found 112; numbers stand in quotes"),
        ('["0.13", null]', "[0.20, null]", r"t\.yaml:5: expected a version in quotes"),
        ('["0.13", null]', '["0.13"]', r"t\.yaml:5: expected \[first, end\)"),
        ("  topic: T\n", "", r"t\.yaml:1: --a: missing key 'topic'"),
        ("  rules:", "  never: no\n  rules:", r"t\.yaml:1: --a: expected either rules, or `never`"),
        ("  about: something", "  about: something\n  replaced_by: [--b]", r"t\.yaml:5: '--b' is not a knob"),
        ("      why: because\n", "", r"t\.yaml:7: a rule without 'why'"),
        ("tp:", "tp: [1], kind:", r"t\.yaml:8:\d+: .*twice"),
    ],
)
def test_a_wrong_table_is_refused_at_its_line(old: str, new: str, message: str) -> None:
    assert read_knobs({"t.yaml": GOOD})["--a"].first == (0, 13)
    assert old in GOOD
    with pytest.raises(UserError, match=message):
        read_knobs({"t.yaml": GOOD.replace(old, new, 1)})


def test_a_name_stands_in_one_file_only() -> None:
    with pytest.raises(UserError, match=r"b\.yaml:1: --a appears a second time, first in a\.yaml"):
        read_knobs({"a.yaml": GOOD, "b.yaml": GOOD})


@pytest.mark.vllm
@pytest.mark.slow
def test_the_interface_read_from_the_source_is_the_parsers_own(
    warm_vllm: VllmEnvironment, warm_environment: dict[str, str]
) -> None:
    kept = ROOT / "tests/assets/vllm" / f"{warm_vllm.version.partition('+')[0]}.json"
    if not kept.exists():
        pytest.skip(f"no interface of vLLM {warm_vllm.version} is kept")
    command = [warm_vllm.python, Path(__file__).with_name("vllm_interface.py")]
    run = subprocess.run(command, env=warm_environment, capture_output=True, text=True, check=True)
    flags, variables = (json.loads(line) for line in run.stdout.splitlines()[-2:])
    assert set(flags) - {"-h", "--help"} == set(interface(kept)["flags"])
    assert variables == interface(kept)["env"]
