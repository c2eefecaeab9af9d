"""Faults of `scheme: auto` and its budget, with their positions."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from quantmint.pipeline.recipe.load import LoadedRecipe
from quantmint.pipeline.stages.checks import check

HEAD = "name: r\nsource: {repo: org/model}\ntarget: {hardware: mi355x}\ncalibration: {set: tiny}\nquantization:\n"


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ("scheme: auto", ':6:11: quantization.scheme: found "auto", expected it with `from` (schemes) and `bits`'),
        ("scheme: auto\n  from: [mxfp4, fp8]", 'quantization.scheme: found "auto", expected it with `from`'),
        ("scheme: auto\n  from: [mxfp4]\n  bits: 5", ":7:9: quantization.from: found mxfp4, expected two schemes or"),
        (
            "scheme: auto\n  from: [fp8, fp8]\n  bits: 8",
            ":7:9: quantization.from: found fp8, fp8, expected two schemes",
        ),
        ("scheme: auto\n  from: [mxfp4, fq8]\n  bits: 5", ':7:17: quantization.from[1]: found "fq8", expected one of'),
        ("scheme: auto\n  from: [mxfp4, fp8]\n  bits: 4", ":8:9: quantization.bits: found 4, expected at least 4.25, "),
        ("scheme: auto\n  from: [mxfp4, fp8]\n  bits: 9", ":8:9: quantization.bits: found 9, expected at most 8, "),
        ("scheme: fp8\n  speedup: 2", ":7:12: quantization.speedup: found 2, expected it only with `scheme: auto`"),
        (
            "scheme: auto\n  from: [mxfp4, fp8]\n  bits: 5\n  speedup: 2",
            ":9:12: quantization.speedup: found 2, expected it only with `objective: throughput`",
        ),
        (
            "scheme: auto\n  from: [mxfp4, fp8]\n  objective: throughput",
            'quantization.scheme: found "auto", expected it with `from` (schemes) and `speedup` (a budget); speedup is',
        ),
        ("scheme: fp8\n  bits: 5", ":7:9: quantization.bits: found 5, expected it only with `scheme: auto`"),
        ("scheme: fp8\n  from: [mxfp4, fp8]", ":7:9: quantization.from: found a list, expected it only with"),
        ("scheme: fp8\nsearch: {tries: 3}", ":7:9: search: found a search, expected it only with"),
        ("scheme: auto\n  from: [mxfp4, fp8]\n  bits: 5\nsearch: {tries: 1}", ":9:17: search.tries: found 1, expected"),
    ],
)
def test_faults_of_a_choice_of_schemes(message: Callable[[str], str], section: str, expected: str) -> None:
    assert expected in message(f"{HEAD}  {section}\n")


@pytest.mark.parametrize(
    ("section", "more", "expected"),
    [
        (
            "",
            "  format: compressed-tensors",
            "r.yaml:7:17: quantization.from[1]: found mxfp4_fp8 in compressed-tensors",
        ),
        (", int8_w8a8", "  format: quark", "r.yaml:7:28: quantization.from[2]: found int8_w8a8, expected a scheme"),
        ("", "  format: quark\ncalibration: null", "quantization.scheme: found auto without calibration, expected a"),
        ("", "  format: quark\n  algorithm: awq", "quantization.algorithm: engine stream has no awq for mxfp4: "),
    ],
)
def test_schemes_that_cannot_be_made_are_refused_with_their_place(
    load: Callable[[str], LoadedRecipe], section: str, more: str, expected: str
) -> None:
    text = f"{HEAD}  scheme: auto\n  from: [mxfp4, mxfp4_fp8{section}]\n  bits: 4.25\n{more}\n"
    text = text.replace("calibration: {set: tiny}\n", "") if "null" in more else text
    assert any(expected in str(fault) for fault in check(load(text)))


@pytest.mark.parametrize(
    ("hardware", "speedup", "found", "expected"),
    [
        ("mi355x", "2.5", "mxfp4, fp8", []),
        ("mi300x", "1.5", "fp8, ptpc_fp8", []),
        ("cuda", "2", "fp8, ptpc_fp8", ["r.yaml:8:14: quantization.objective: found throughput for cuda, whose"]),
        ("mi300x", "2", "ptpc_fp8, mxfp4", ["r.yaml:7:20: quantization.from[1]: found mxfp4, which mi300x unpacks to"]),
        ("mi355x", "4.5", "mxfp4, fp8", ["r.yaml:9:12: quantization.speedup: found 4.5, expected at most 4: no"]),
    ],
)
def test_a_speed_that_the_targets_figures_cannot_tell(
    load: Callable[[str], LoadedRecipe], hardware: str, speedup: str, found: str, expected: list[str]
) -> None:
    text = f"{HEAD}  scheme: auto\n  from: [{found}]\n  objective: throughput\n  speedup: {speedup}\n"
    faults = [str(fault) for fault in check(load(text.replace("mi355x", hardware)))]
    assert [fault[: len(start)] for fault, start in zip(faults, expected, strict=True)] == expected


def test_an_algorithm_that_one_of_the_schemes_carries_is_no_fault(load: Callable[[str], LoadedRecipe]) -> None:
    text = f"{HEAD}  scheme: auto\n  from: [mxfp4, fp8_block]\n  bits: 5\n  algorithm: gptq\n"
    assert check(load(text)) == []


def test_each_try_has_an_equal_share_of_the_error(load: Callable[[str], LoadedRecipe]) -> None:
    text = f"{HEAD}  scheme: auto\n  from: [mxfp4, fp8]\n  bits: 5\n"
    assert load(text).recipe.confidence == 0.95
    assert load(f"{text}search: {{tries: 5}}\n").recipe.confidence == pytest.approx(0.99)


def test_unset_fields_are_in_no_dump_and_no_fingerprint(load: Callable[[str], LoadedRecipe]) -> None:
    plain = load(f"{HEAD}  scheme: mxfp4\n").recipe.model_dump(mode="json")
    assert {"from", "from_", "bits", "objective", "speedup"}.isdisjoint(plain["quantization"])
    assert "search" not in plain
