"""Train the tiny model from nothing: minutes on a GPU, and hours on a CPU.

    python -m quantmint.recipes.tiny.train --output build/tiny

It writes ``model/``, ``tasks/`` and ``calibration/``. The seed fixes the world, the tasks, the first weights and, on
one kind of device, the text. Backward kernels add in an order of their own, so two runs agree in what the model knows
and not in its last bits: tests judge the shipped model by its scores.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from quantmint.recipes.tiny.shape import add_outlier_channels
from quantmint.recipes.tiny.stream import Sentences
from quantmint.recipes.tiny.tasks import write_tasks
from quantmint.recipes.tiny.tokenizer import build_tokenizer
from quantmint.recipes.tiny.world import build_world

ROW = 64
"""Tokens in a training row: about eight sentences."""

MAX_POSITIONS = 1024


def tiny_config(tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    """A Llama with every width a multiple of 128, so MX groups, FP8 blocks and two-way tensor parallelism all fit."""
    return LlamaConfig(
        vocab_size=math.ceil(len(tokenizer) / 128) * 128,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=MAX_POSITIONS,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="bfloat16",
    )


def learning_rate(step: int, steps: int, peak: float) -> float:
    """A linear warm-up over the first 3 % and a cosine to zero."""
    warmup = max(1, steps * 3 // 100)
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))


def fit(model: LlamaForCausalLM, text: Sentences, *, steps: int, batch: int, peak: float, seed: int) -> float:
    """Train in place on rows drawn from ``text``; returns the mean loss of the last hundred steps."""
    device = text.device
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.98), fused=device.type == "cuda")
    generator = torch.Generator(device=device).manual_seed(seed)
    last: list[torch.Tensor] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, refresh_per_second=1) as bar:
        task = bar.add_task("training", total=steps)
        for step in range(steps):
            ids = text.rows(generator, batch, ROW)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, steps, peak)
            with torch.autocast(device.type, dtype=torch.bfloat16):
                logits = model(input_ids=ids, use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())
            optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            last = [*last[-99:], loss.detach()]
            if step % 100 == 99:
                bar.update(task, completed=step + 1, description=f"loss {loss.item():.4f}")
    return float(torch.stack(last).mean())


def main() -> None:
    """Parse the command line, train, and write the result."""
    parser = argparse.ArgumentParser(description="Train the tiny model of the toy world.")
    parser.add_argument("--output", type=Path, required=True, help="folder for model/, tasks/ and texts")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=6_000)
    parser.add_argument("--batch", type=int, default=512, help=f"rows of {ROW} tokens in a step")
    parser.add_argument("--peak", type=float, default=4e-3, help="highest learning rate")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    console = Console()
    world = build_world(args.seed)
    tokenizer = build_tokenizer(world.vocabulary(), MAX_POSITIONS)
    model = LlamaForCausalLM(tiny_config(tokenizer)).float().to(args.device)
    console.print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} tokens")
    text = Sentences(world, tokenizer, torch.device(args.device))
    loss = fit(model, text, steps=args.steps, batch=args.batch, peak=args.peak, seed=args.seed)
    console.print(f"loss {loss:.4f}")

    folder = args.output / "model"
    model.to(device="cpu", dtype=torch.bfloat16)
    add_outlier_channels(model, seed=args.seed)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        do_sample=False,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # The name that every release of transformers with fast tokenizers can load.
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
    write_tasks(world, args.output)
    console.print(f"wrote {folder}")


if __name__ == "__main__":
    main()
