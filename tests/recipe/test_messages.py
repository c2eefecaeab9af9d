"""The exact message of every kind of fault."""

from __future__ import annotations

from collections.abc import Callable

import pytest

HEAD = "name: r\nsource: {repo: org/model}\n"
SCHEMES = (
    "ptpc_fp8, fp8, fp8_block, mxfp4, mxfp4_weight_only, mxfp4_fp8, mxfp6_e2m3, mxfp6_e3m2, mxfp8, nvfp4, "
    "nvfp4_weight_only, int8_w8a8, w4a16, auto"
)
OK = HEAD + "quantization: {scheme: ptpc_fp8}\n"

CASES = {
    "misspelt key": (
        HEAD + "quantization:\n  schem: ptpc_fp8\n",
        "r.yaml:4:3: quantization.schem: found an unknown key, expected one of algorithm, autoround, bits, engine, "
        "exclude, format, from, gptq, keep, kv_cache, kv_cache_granularity, mtp, objective, overrides, scheme, "
        'shared_scales, smoothquant, speedup, tuned (did you mean "scheme"?)',
    ),
    "misspelt value": (
        HEAD + "quantization:\n  scheme: ptcp_fp8\n",
        f'r.yaml:4:11: quantization.scheme: found "ptcp_fp8", expected one of {SCHEMES} (did you mean "ptpc_fp8"?)',
    ),
    "key in the wrong section": (
        OK + "kv_cache: fp8\n",
        "r.yaml:4:1: kv_cache: found an unknown key, expected one of calibration, description, draft, evaluation, "
        "extends, gate, name, publish, quantization, refresh, search, serve, source, target, tracking, "
        'trust_remote_code (did you mean "quantization.kv_cache"?)',
    ),
    "a cron expression that means nothing": (
        OK + 'refresh: {schedule: "0 3 * * 8"}\n',
        'r.yaml:4:21: refresh.schedule: found "0 3 * * 8", expected a cron expression of five fields (Bad day-of-week)',
    ),
    "a time zone that is none": (
        OK + "refresh: {timezone: Europe/Berln}\n",
        'r.yaml:4:21: refresh.timezone: found "Europe/Berln", expected a time zone of the IANA database, such as '
        'Europe/Paris (did you mean "Europe/Berlin"?)',
    ),
    "missing key": (
        HEAD + "quantization:\n  kv_cache: auto\n",
        f"r.yaml:3:1: quantization.scheme: found nothing, expected one of {SCHEMES}",
    ),
    "missing section": (
        HEAD,
        "r.yaml:1:1: quantization: found nothing, "
        "expected a mapping with scheme, from, bits, objective, speedup, kv_cache, kv_cache_granularity, format, "
        "engine, algorithm, gptq, tuned, smoothquant, autoround, shared_scales, exclude, keep, overrides, mtp",
    ),
    "text for a number": (
        OK + "calibration: {set: tiny, samples: many}\n",
        'r.yaml:4:35: calibration.samples: found "many", expected a whole number of at least 1',
    ),
    "number too small": (
        OK + "target: {gpus: 0}\n",
        "r.yaml:4:16: target.gpus: found 0, expected a whole number of at least 1",
    ),
    "percent for a fraction": (
        OK + "gate: {accuracy: {margin: 2}}\n",
        "r.yaml:4:27: gate.accuracy.margin: found 2, expected a number above 0, below 1",
    ),
    "scalar for a section": (
        OK + "gate: strict\n",
        'r.yaml:4:7: gate: found "strict", expected a mapping with accuracy, canary, kl, layout, throughput, '
        "acceptance, tools, long, reasoning",
    ),
    "number for text": (
        "name: r\nsource: {repo: org/model, revision: 1.0}\nquantization: {scheme: fp8}\n",
        "r.yaml:2:37: source.revision: found 1.0, expected text (put it in quotes)",
    ),
    "glob for a module": (
        HEAD + "quantization: {scheme: fp8, exclude: [lm_head, '*.gate']}\n",
        'r.yaml:3:48: quantization.exclude[1]: found "*.gate", '
        "expected an exact module name, or re: before a regular expression",
    ),
    "override without modules": (
        HEAD + "quantization:\n  scheme: fp8\n  overrides:\n  - scheme: mxfp4\n    modules: []\n",
        "r.yaml:7:14: quantization.overrides[0].modules: found a list, expected a list with at least one item",
    ),
    "two sources": (
        "name: r\nsource: {repo: org/model, folder: here}\nquantization: {scheme: fp8}\n",
        "r.yaml:2:9: source: found a folder with a repo, "
        "expected one of them; write `repo: null` or `folder: null` to drop an inherited one",
    ),
    "revision of a folder": (
        "name: r\nsource: {folder: here, revision: main}\nquantization: {scheme: fp8}\n",
        'r.yaml:2:34: source.revision: found "main", expected a repo for it; a folder has no revision',
    ),
    "list for a knob": (
        OK + "serve: {knobs: {--max-num-seqs: [256]}}\n",
        "r.yaml:4:33: serve.knobs.--max-num-seqs: found a list, expected text, a number, true or false",
    ),
    "name of another file": (
        OK.replace("name: r", "name: other"),
        'r.yaml:1:7: name: found "other", expected the name of its file, "r"',
    ),
    "capitals in a name": (
        OK.replace("name: r", "name: R"),
        'r.yaml:1:7: name: found "R", expected text that matches [a-z0-9][a-z0-9.-]*\n'
        'r.yaml:1:7: name: found "R", expected the name of its file, "r"',
    ),
    "publishing to a place of no kind": (
        OK + "publish: {repo: org/name}\n",
        "r.yaml:4:11: publish.repo: found an unknown key, "
        "expected one of folder, hub, keep, licence, sign, storage, to",
    ),
    "publishing to nowhere": (
        OK + "publish: {folder: null}\n",
        "r.yaml:4:10: publish: found none, expected a folder, a storage or a hub "
        "(`quantmint run --until report` publishes nowhere)",
    ),
    "a signature by two": (
        OK + "publish: {sign: {key: signing.pem, keyless: true}}\n",
        "r.yaml:4:17: publish.sign: found both, expected a key or `keyless: true`",
    ),
    "credentials in an address": (
        OK + "publish: {storage: {url: 's3://me:secret@bucket/models'}}\n",
        "r.yaml:4:26: publish.storage.url: found an address with an @, expected an address without credentials, which "
        "come from the environment",
    ),
    "several faults, in the order of the file": (
        "source: {repo: org/model}\nquantization: {scheme: fp9}\ntarget: {hardware: mi300}\n",
        "r.yaml:1:1: name: found nothing, expected text that matches [a-z0-9][a-z0-9.-]*\n"
        f'r.yaml:2:24: quantization.scheme: found "fp9", expected one of {SCHEMES} (did you mean "fp8"?)\n'
        'r.yaml:3:20: target.hardware: found "mi300", expected one of mi300x, mi325x, mi350x, mi355x, cpu, cuda, h100, '
        'h200 (did you mean "mi300x"?)',
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_exact_message(case: str, message: Callable[[str], str]) -> None:
    text, expected = CASES[case]
    assert message(text) == expected
