"""Which files a release may hold: by name, and by what is really in them."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from quantmint.pipeline.publish.screening import misnamed_files, refused_names

RELEASE = (
    "README.md",
    "quantmint.json",
    "model.sig",
    ".gitattributes",
    "config.json",
    "generation_config.json",
    "model-00001-of-00002.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "vocab.txt",
    "qwen.tiktoken",
    "chat_template.jinja",
    "preprocessor_config.json",
    "recipe.yaml",
    "LICENSE",
    "LICENSE.md",
    "LICENSE-MODEL.txt",
    "NOTICE",
    "USE_POLICY.md",
    ".eval_results/gsm8k.yaml",
    "quantmint/gate.json",
    "quantmint/report.html",
    "quantmint/report.md",
    "quantmint/junit.xml",
    "quantmint/inspection.json",
    "quantmint/recipe.yaml",
    "quantmint/provenance.intoto.json",
    "quantmint/sbom.cdx.json",
    "quantmint/samples/gsm8k.baseline.json.gz",
)


def test_all_that_a_release_has() -> None:
    assert refused_names(RELEASE) == ()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        *((f"pytorch_model{end}", "pickle") for end in (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".joblib", ".npz")),
        ("quantmint/gate.PKL", "pickle"),
        ("LICENSE.pkl", "pickle"),
        ("model.safetensors.bin", "pickle"),
        ("modeling_llama.py", "trust_remote_code"),
        ("server.log.1", "not a kind of file"),
        (".env", "a key, a token or a password"),
        ("signing.pem", "a key, a token or a password"),
        ("token.json", "a key, a token or a password"),
        ("credentials.txt", "a key, a token or a password"),
        ("config.json~", "not a kind of file"),
        (".DS_Store", "hidden"),
        (".git/config", "hidden"),
        (".eval_results/.hidden.yaml", "hidden"),
        ("quantmint/.cache/x.json", "hidden"),
        (".eval_results/gsm8k.json", "not a kind of file"),
        ("quantmint/notes.txt", "not a kind of file"),
        ("original/params.json", "not a kind of file"),
        ("model.gguf", "not a kind of file"),
        ("quantmint/gitattributes", "not a kind of file"),
    ],
)
def test_what_stays_here(name: str, reason: str) -> None:
    [line] = refused_names([*RELEASE, name])
    assert line.startswith(f"{name}: ")
    assert reason in line


@pytest.mark.parametrize(
    "name", ["../config.json", "/etc/passwd.json", "a\\b.json", "quantmint//gate.json", "Config.JSON"]
)
def test_names_that_lead_elsewhere(name: str) -> None:
    assert refused_names(["config.json", name]) != ()


def test_code_of_a_source_that_is_trusted() -> None:
    assert refused_names(["modeling_llama.py"], with_code=True) == ()
    assert refused_names(["quantmint/run.py", "x.pyc"], with_code=True) != ()


def zipped() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps([1]))
    return buffer.getvalue()


def tarred() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("pickle"))
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        ("model.safetensors", pickle.dumps({"a": list(range(100))}), "a pickle, no safetensors"),
        ("model.safetensors", zipped(), "a zip archive, which is how `torch.save` writes a pickle, no safetensors"),
        ("model.safetensors", tarred(), "a tar archive, no safetensors"),
        ("model.safetensors", b"", "not a safetensors file, or not all of one"),
        ("tokenizer.model", pickle.dumps([1]), "a pickle"),
        ("merges.txt", zipped(), "a zip archive"),
        ("config.json", b"{", "not JSON"),
        ("config.json", b"\x80\x04", "a pickle"),
        ("config.json", b"[" * 100_000, "not JSON"),
        ("chat_template.jinja", b"a\x00b", "zero bytes"),
        ("LICENSE", b"\x7fELF", "a program"),
        ("quantmint/samples/t.json.gz", b"{}", "Not a gzipped file"),
        (
            "quantmint/samples/t.json.gz",
            gzip.compress(pickle.dumps([1]), mtime=0),
            "something else in it, expected JSON",
        ),
        ("quantmint/samples/t.json.gz", gzip.compress(b"[1]" * 9000, mtime=0)[:20], "cannot be read"),
    ],
)
def test_what_is_not_what_its_name_says(tmp_path: Path, name: str, content: bytes, fault: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    [line] = misnamed_files({name: path})
    assert line.startswith(f"{name}: ")
    assert fault in line


def test_a_model_as_it_is_written(models: Callable[..., Path]) -> None:
    files = {path.name: path for path in models("llama").iterdir()}
    assert refused_names(files) == ()
    assert misnamed_files(files) == ()


def test_a_header_whose_length_looks_like_a_pickle(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": np.zeros(4, np.float16)}, path)
    raw = path.read_bytes()
    [length] = struct.unpack("<Q", raw[:8])
    header = raw[8 : 8 + length] + b" " * (640 - length)
    path.write_bytes(struct.pack("<Q", 640) + header + raw[8 + length :])
    assert path.read_bytes().startswith(b"\x80\x02")
    assert misnamed_files({"model.safetensors": path}) == ()


def test_links_and_what_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{}")
    (tmp_path / "config.json").symlink_to("a.json")
    (tmp_path / "lost.json").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe.json")
    names = ("config.json", "lost.json", "pipe.json")
    assert misnamed_files({name: tmp_path / name for name in names}) == tuple(f"{name}: not a file" for name in names)
