"""Write the project whose release is `pages-fp8.tar.xz`: a random model of one layer, judged by perplexity.

`quantmint run pages-fp8.yaml` in the folder where this ran makes and publishes it on a CPU, within two minutes. The
archive holds `published/pages-fp8` as quantmint 0.1.0 made it, and is never made anew: it stands for all releases that
were published before the current version.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers import models as kinds
from tokenizers.pre_tokenizers import Whitespace

WORDS = 256


def write_model(folder: Path) -> None:
    """Write a Llama of one layer with random weights, and a tokenizer of whole words."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=512, tie_word_embeddings=False,
        dtype=torch.bfloat16,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(2 * torch.rand(parameter.shape[:-1]).add_(0.5).unsqueeze(-1).to(parameter.dtype))
    model.save_pretrained(folder)
    words = Tokenizer(kinds.WordLevel({f"w{number}": number for number in range(WORDS)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="w0", bos_token="w1", eos_token="w2", pad_token="w3"
    ).save_pretrained(folder)


def texts(draw: random.Random, count: int, length: int) -> list[str]:
    """Texts of random words."""
    return [" ".join(f"w{draw.randrange(4, WORDS)}" for _ in range(length)) for _ in range(count)]


def write_lines(path: Path, key: str, lines: list[str]) -> None:
    """Write a JSON object a line."""
    path.write_text("".join(json.dumps({key: line}) + "\n" for line in lines))


TASK = """task: texts
dataset_path: json
dataset_kwargs: {data_files: {test: texts.jsonl}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: page
metric_list:
  - metric: word_perplexity
    aggregation: weighted_perplexity
    higher_is_better: false
metadata: {version: 1.0}
"""
SUITE = """name: pages
description: The perplexity of texts of random words.
expected_flip_rate: 0.04
canary: tiny
tasks:
  - {task: texts, metric: word_perplexity, items: 120, gated: true, margin: 0.05, expected_spread: 0.05}
"""
RECIPE = """name: pages-fp8
description: A random model of one layer in FP8, judged by perplexity.
source: {folder: model}
quantization: {scheme: ptpc_fp8, kv_cache: fp8, format: compressed-tensors}
calibration: {set: words.yaml, samples: 4, sequence_length: 64, batch_size: 2, seed: 0}
target: {hardware: cpu, gpus: 1, workload: tiny, max_model_len: 256}
evaluation: {suite: suite/pages.yaml, runtime: reference, concurrency: 4, control: null}
gate: {accuracy: {margin: 0.05}, canary: null, throughput: {min_ratio: null}}
publish: {folder: published, licence: {id: apache-2.0}}
"""


def main() -> None:
    """Write model, suite, calibration texts and recipe into the working folder."""
    draw = random.Random(0)  # noqa: S311 - texts, not keys
    write_model(Path("model"))
    Path("suite").mkdir()
    write_lines(Path("suite/texts.jsonl"), "page", texts(draw, 120, 24))
    Path("suite/texts.yaml").write_text(TASK)
    Path("suite/pages.yaml").write_text(SUITE)
    write_lines(Path("words.jsonl"), "text", texts(draw, 16, 80))
    Path("words.yaml").write_text("name: words\ndescription: Random words.\nfile: words.jsonl\ntext: text\n")
    Path("pages-fp8.yaml").write_text(RECIPE)


if __name__ == "__main__":
    main()
