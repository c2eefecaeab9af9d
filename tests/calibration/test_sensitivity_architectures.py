"""Costs of changes in recurrent layers, in layers that return more than hidden states, and in listed experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from quantmint.calibration.replica import replica
from quantmint.calibration.sensitivity import ModuleChange, Tensors, measure

Zoo = Callable[..., Path]
SAMPLES = [torch.randint(4, 512, (24,), generator=torch.Generator().manual_seed(seed)) for seed in range(4)]


@contextmanager
def moved(model: Any, names: Sequence[str]) -> Iterator[None]:
    """Other weights for some modules."""
    with ExitStack() as stack:
        for name in names:
            module = model.get_submodule(name)
            stack.callback(setattr, module, "weight", module.weight)
            count = torch.arange(module.weight.numel(), dtype=module.weight.dtype).view_as(module.weight)
            module.weight = torch.nn.Parameter(module.weight.detach() + 0.02 * torch.sin(count), requires_grad=False)
        yield


def costs(folder: Path, groups: Mapping[str, Sequence[str]], work: Path) -> dict[str, float]:
    one = replica(folder, "cpu")

    def changes(layer: str, _largest: Tensors, _hessians: Callable[[], Tensors]) -> list[ModuleChange]:
        return [
            ModuleChange(group, tuple(names), partial(moved, one.model, names))
            for group, names in groups.items()
            if names[0].startswith(f"{layer}.")
        ]

    return measure(one, SAMPLES, changes, work, "facts")


def of_whole(folder: Path, groups: Mapping[str, Sequence[str]], sites: Mapping[str, str]) -> dict[str, float]:
    """Half of the mean of (g d)^2, with the gradients of the whole model at the outputs of ``sites``."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    draw, seen = torch.Generator().manual_seed(0), dict[str, Any]()
    for site in set(sites.values()):
        model.get_submodule(site).register_forward_hook(
            lambda _, args, kwargs, out, site=site: seen.__setitem__(site, (args, kwargs, out)), with_kwargs=True
        )
    totals = dict.fromkeys(groups, 0.0)
    for sample in SAMPLES:
        logits = model(input_ids=sample[None], use_cache=False).logits[0]
        drawn = torch.multinomial(logits.detach().softmax(-1), 1, generator=draw).squeeze(1)
        loss = torch.nn.functional.cross_entropy(logits, drawn, reduction="sum")
        calls = dict(seen)
        slopes = dict(zip(calls, torch.autograd.grad(loss, [out for *_, out in calls.values()]), strict=True))
        for group, names in groups.items():
            args, kwargs, out = calls[sites[group]]
            with moved(model, names), torch.no_grad():
                difference = model.get_submodule(sites[group])(*args, **kwargs) - out
            totals[group] += float((difference * slopes[sites[group]]).sum(-1).square().sum()) / 2
    return {group: total / sum(map(len, SAMPLES)) for group, total in totals.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "modules"),
    [
        ("bamba", ["model.layers.0.mamba.in_proj", "model.layers.1.self_attn.v_proj"]),  # layers that return tuples
        (
            "falcon_h1",
            ["model.layers.0.mamba.in_proj", "model.layers.1.mamba.out_proj", "model.layers.0.self_attn.o_proj"],
        ),
        ("qwen3_5_text", ["model.layers.0.linear_attn.in_proj_qkv", "model.layers.1.mlp.down_proj"]),
        # Keys and values that later layers use too, and choices that no gradient passes.
        ("gemma3n_text", [f"model.layers.{layer}.self_attn.{part}_proj" for layer in (0, 1) for part in "kv"]),
        ("glm_moe_dsa", ["model.layers.0.self_attn.kv_b_proj", "model.layers.1.self_attn.o_proj"]),
        ("lfm2", ["model.layers.0.conv.in_proj", "model.layers.1.self_attn.k_proj"]),
    ],
)
def test_costs_are_those_of_the_whole_model_s_gradients(
    zoo: Zoo, tmp_path: Path, name: str, modules: Sequence[str]
) -> None:
    folder, groups = zoo(name, dtype="float32"), {module: [module] for module in modules}
    found = costs(folder, groups, tmp_path)
    assert found == pytest.approx(of_whole(folder, groups, dict(zip(groups, groups, strict=True))), rel=5e-3)
    assert all(cost > 0 for cost in found.values())


def test_what_only_chooses_has_no_cost(zoo: Zoo, tmp_path: Path) -> None:
    """No gradient passes the choice of an indexer; zero would say that its weights do not matter."""
    attention = "model.layers.0.self_attn"
    groups = {name: [f"{attention}.{name}"] for name in ("indexer.wk", "kv_b_proj")}
    groups["both"] = [f"{attention}.indexer.wk", f"{attention}.q_a_proj"]
    assert costs(zoo("glm_moe_dsa", dtype="float32"), groups, tmp_path).keys() == {"kv_b_proj"}


class ListedConfig(LlamaConfig):
    model_type = "listed_experts"


class Listed(torch.nn.Module):
    """Experts in a list, of which a router sends each token to one; the last one gets none."""

    def __init__(self, mlp: Any, width: int) -> None:
        super().__init__()
        import copy

        self.gate = torch.nn.Linear(width, 2, bias=False)
        self.experts = torch.nn.ModuleList(copy.deepcopy(mlp) for _ in range(3))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        chosen, out = self.gate(hidden).argmax(-1), torch.zeros_like(hidden)
        for number, expert in enumerate(self.experts):
            if bool((chosen == number).any()):
                out[chosen == number] = expert(hidden[chosen == number])
        return out


class ListedForCausalLM(LlamaForCausalLM):
    config_class = ListedConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = Listed(layer.mlp, config.hidden_size)
        self.post_init()


def test_listed_experts_are_seen_where_their_tokens_meet_again(tmp_path: Path) -> None:
    AutoConfig.register("listed_experts", ListedConfig, exist_ok=True)
    AutoModelForCausalLM.register(ListedConfig, ListedForCausalLM, exist_ok=True)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 512}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": False}
    config = ListedConfig(**sizes, **heads, dtype="float32", initializer_range=0.1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        ListedForCausalLM(config).save_pretrained(tmp_path / "model")
    parts = [f"{number}.{part}_proj" for number in range(3) for part in ("gate", "up", "down")]
    groups = {
        f"model.layers.{layer}.mlp.experts": [f"model.layers.{layer}.mlp.experts.{part}" for part in parts]
        for layer in (0, 1)
    }
    found = costs(tmp_path / "model", groups, tmp_path / "work")
    sites = {group: group.removesuffix(".experts") for group in groups}
    assert found == pytest.approx(of_whole(tmp_path / "model", groups, sites), rel=5e-3)
    assert all(cost > 0 for cost in found.values())
