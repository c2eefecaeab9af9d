"""Credentials in the texts of a release are found and never shown; digests and words are none.

The samples are put together here, so that no scanner takes this file for a leak.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import socket
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from quantmint.pipeline.publish.screening import Secret, detectors, find_secrets

_LETTERS = "AbCdEfGhIjKlMnOpQrStUvWxYzAbCdEfGhIjKlMnOpQrStUvWxYz"
_DIGITS = "3f1c0a52e7d94b603f1c0a52e7d94b603f1c0a52e7d94b60"
_WEB = ".".join(
    base64.urlsafe_b64encode(part).decode().rstrip("=")
    for part in (b'{"alg":"HS256"}', b'{"sub":"1234567890"}', bytes(range(32)))
)
# kind -> a text that has one
SECRETS = {
    "Hugging Face token": "hf_" + _LETTERS[:34],
    "AWS key": "AKIA" + "Z7Q2" * 4,
    "GitHub token": "ghp_" + _LETTERS[:36],
    "GitHub fine-grained token": "github_pat_" + _LETTERS + _LETTERS[:30],
    "GitLab token": "glpat-" + _LETTERS[:20],
    "Google key": "AIza" + _LETTERS[:35],
    "OpenAI key": "sk-" + _LETTERS[:20] + "T3Blbk" + "FJ" + _LETTERS[:20],
    "Anthropic key": "sk-ant-" + _LETTERS[:40],
    "Slack token": "xox" + "b-12345-67890-" + _DIGITS[:20],
    "Stripe key": "sk_" + "live_" + _LETTERS[:24],
    "PyPI token": "pypi-AgEIcHlwaS5vcmc" + _LETTERS + _LETTERS[:30],
    "npm token": "npm_" + _LETTERS[:36],
    "SendGrid key": "SG." + _LETTERS[:22] + "." + _LETTERS[:43],
    "Twilio key": "SK" + _DIGITS[:32],
    "Mailchimp key": _DIGITS[:32] + "-us12",
    "Telegram token": "123456789:" + _LETTERS[:35],
    "Discord token": "M" + _LETTERS[:23] + "." + _LETTERS[:6] + "." + _LETTERS[:27],
    "Square secret": "sq0csp-" + _LETTERS[:43],
    "Azure storage key": "AccountKey=" + "a/b+" * 21 + "abc=",
    "Databricks token": "dapi" + _DIGITS[:32],
    "W&B key": f'"WANDB_API_KEY": "{_DIGITS[:40]}"',
    "MLflow credentials": "MLFLOW_TRACKING_PASSWORD=tr0ub4dor",
    "Authorization header": "Authorization: Bearer " + _LETTERS[:24] + "7",
    "JSON web token": _WEB,
    "password in an address": "https://anna:tr0ub4dor@models.example.org/x",
    "signed address": "https://x.example.org/a?X-Amz-Signature=" + _DIGITS[:32] * 2,
    "private key": "-----BEGIN ENCRYPTED PRIVATE KEY-----",
}


def looked(tmp_path: Path, name: str, content: str | bytes, environment: dict[str, str] | None = None) -> Any:
    path = tmp_path / "file"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return find_secrets({name: path}, environment or {})


@pytest.mark.parametrize("kind", SECRETS)
def test_each_kind_where_it_stands_and_without_the_secret(tmp_path: Path, kind: str) -> None:
    text = SECRETS[kind]
    [found] = looked(tmp_path, "quantmint/report.html", f"one\ntwo\nx = '{text}'\nfour\n")
    assert found == Secret("quantmint/report.html", 3, kind)
    assert str(found) == f"quantmint/report.html:3: {kind}"
    # In a JSON text: at the start of a line that stands escaped there.
    escaped = json.dumps({"log": f"line\n{text}\n"}, indent=1)
    assert [secret.kind for secret in looked(tmp_path, "quantmint/gate.json", escaped)] == [kind]
    assert [secret.kind for secret in looked(tmp_path, "s/a.json.gz", gzip.compress(escaped.encode()))] == [kind]


def test_every_detector_is_asked() -> None:
    assert {detector.kind for detector in detectors({})} == {*SECRETS, "password or key by its name"}


@pytest.mark.parametrize(
    "text",
    [
        hashlib.sha256(b"x").hexdigest(),
        "sha256-" + base64.b64encode(hashlib.sha256(b"x").digest()).decode(),
        "x" + SECRETS["AWS key"] + "y",
        "https://user:password@host/",
        "https://${USER}:${PASSWORD}@host/",
        "Authorization: Bearer <token>",
        "Authorization: Bearer $HF_TOKEN",
        "curl -H 'Authorization: Bearer YOUR_API_KEY'",
        "the bearer of bad news should always be remembered",
        '"tools": {"detect-secrets": "1.5.0", "tokenizers": "0.22.1"}',
        "hf_quantizer",
        "export HF_TOKEN=hf_xxx",
        "http://localhost:8000/v1",
        "model.layers.12.self_attn.k_proj.k_scale",
    ],
)
@pytest.mark.parametrize("name", ["README.md", "quantmint/gate.json", "tokenizer.json"])
def test_what_is_none(tmp_path: Path, name: str, text: str) -> None:
    assert looked(tmp_path, name, f"a\n{text}\nb\n") == ()


def test_a_password_by_its_name_in_what_people_write(tmp_path: Path) -> None:
    text = "description: A test.\npassword: tr0ub4dor-and-3\napi_key: null\nsecret: ${SECRET_1}\n"
    assert looked(tmp_path, "quantmint/recipe.yaml", text) == (
        Secret("quantmint/recipe.yaml", 2, "password or key by its name"),
    )
    assert looked(tmp_path, "tokenizer_config.json", text) == ()


def test_values_of_this_process(tmp_path: Path) -> None:
    environment = {
        "HF_TOKEN": "anything-at-all",
        "AWS_SECRET_ACCESS_KEY": 'with "quotes"/and+signs',
        "QUANTMINT_SIGNING_PASSPHRASE": "grüße an alle",
        "TOKENIZERS_PARALLELISM": "falsehood",  # no token by its name
        "VLLM_API_KEY": "EMPTY",  # too short
        "CACHE_KEY": "production",  # a word
        "SSH_KEY": str(tmp_path),  # where one is, not what it is
    }
    text = f"x falsehood production EMPTY {tmp_path}\nanything-at-all\n" + json.dumps(environment, indent=1)
    assert looked(tmp_path, "quantmint/gate.json", text, environment) == (
        Secret("quantmint/gate.json", 2, "the value of HF_TOKEN"),
        Secret("quantmint/gate.json", 4, "the value of HF_TOKEN"),
        Secret("quantmint/gate.json", 5, "the value of AWS_SECRET_ACCESS_KEY"),
        Secret("quantmint/gate.json", 6, "the value of QUANTMINT_SIGNING_PASSPHRASE"),
    )
    assert looked(tmp_path, "tokenizer.json", "grüße an alle", environment) != ()


def test_the_process_environment_and_the_hubs_store_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TEST_TOKEN", "no-form-at-all")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "a-stored-token")
    path = tmp_path / "a.json"
    path.write_text("no-form-at-all a-stored-token")
    assert [secret.kind for secret in find_secrets({"a.json": path})] == [
        "the Hub's token of this machine",
        "the value of MY_TEST_TOKEN",
    ]


def test_nothing_is_asked_over_the_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """detect-secrets would send an AWS key to AWS, a GitHub token to GitHub, and so on, to see whether it is real."""

    def refuse(*arguments: Any, **options: Any) -> Any:
        raise AssertionError("the network was asked")

    for name in ("socket", "create_connection", "getaddrinfo"):
        monkeypatch.setattr(socket, name, refuse)
    text = "\n".join(SECRETS.values())
    assert {secret.kind for secret in looked(tmp_path, "a.json", text)} >= {"AWS key", "GitHub token", "Slack token"}


def test_the_header_of_weights(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    tensors = {"a": np.frombuffer(SECRETS["GitHub token"].encode(), np.uint8)}
    save_file(tensors, path, metadata={"by": SECRETS["Hugging Face token"]})
    assert find_secrets({"model.safetensors": path}, {}) == (Secret("model.safetensors", 1, "Hugging Face token"),)
    path.write_bytes(struct.pack("<Q", 1 << 60) + b"{}")
    assert find_secrets({"model.safetensors": path}, {}) == ()
