"""Costs of changes, layer by layer, against the whole model's own gradients and its real divergence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from quantmint.calibration.replica import Replica, replica
from quantmint.calibration.sensitivity import ModuleChange, Tensors, measure

PARTS = ("self_attn.k_proj", "self_attn.o_proj", "mlp.down_proj")
LAYERS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        tie_word_embeddings=True,
        initializer_range=0.1,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = LlamaForCausalLM(config)
    made = tmp_path_factory.mktemp("plain")
    model.save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def samples() -> list[torch.Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return [torch.randint(64, (48,)) for _ in range(24)]


def moved(weight: torch.Tensor) -> torch.Tensor:
    return weight + 0.02 * torch.sin(torch.arange(weight.numel(), dtype=weight.dtype)).view_as(weight)


class Moving:
    """Changes one module at a time, and remembers what it was told."""

    def __init__(self, model: Any, last: int = -1) -> None:
        self.model, self.last = model, last
        self.layers: list[str] = []
        self.largest: dict[str, float] = {}
        self.hessians: dict[str, torch.Tensor] = {}

    def __call__(self, layer: str, largest: Tensors, hessians: Callable[[], Tensors]) -> list[ModuleChange]:
        if layer.endswith(f".{self.last}"):
            raise InterruptedError
        self.layers.append(layer)
        self.largest |= {name: float(amax) for name, amax in largest.items()}
        self.hessians |= hessians()
        names = [f"{layer}.{part}" for part in PARTS]
        return [ModuleChange(name, (name,), partial(self.moved, self.model.get_submodule(name))) for name in names]

    @staticmethod
    @contextmanager
    def moved(module: Any) -> Iterator[None]:
        weight = module.weight
        module.weight = torch.nn.Parameter(moved(weight.detach()), requires_grad=False)
        yield
        module.weight = weight


def costs(one: Replica, samples: list[torch.Tensor], work: Path, last: int = -1) -> tuple[dict[str, float], Moving]:
    moving = Moving(one.model, last)
    return measure(one, samples, moving, work, "facts"), moving


def whole(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


def test_costs_are_those_of_the_whole_model_s_gradients(
    folder: Path, samples: list[torch.Tensor], tmp_path: Path
) -> None:
    found, told = costs(replica(folder, "cpu"), samples, tmp_path)
    model, draw = whole(folder), torch.Generator().manual_seed(0)
    seen: dict[str, Any] = {}
    for name in found:
        hook = partial(lambda name, _m, args, out: seen.__setitem__(name, (args[0].detach(), out)), name)
        model.get_submodule(name).register_forward_hook(hook)
    totals = dict.fromkeys(found, 0.0)
    hessians = dict.fromkeys(found, torch.zeros(()))
    for sample in samples:
        embedded = model.model.embed_tokens(sample[None]).detach().requires_grad_()
        logits = model(inputs_embeds=embedded).logits[0]
        drawn = torch.multinomial(logits.detach().softmax(-1), 1, generator=draw).squeeze(1)
        loss = torch.nn.functional.cross_entropy(logits, drawn, reduction="sum")
        slopes = torch.autograd.grad(loss, [seen[name][1] for name in found])
        for name, slope in zip(found, slopes, strict=True):
            entering, clean = seen[name]
            hessians[name] = hessians[name] + entering[0].T @ entering[0]
            with torch.no_grad():
                products = ((entering @ moved(model.get_submodule(name).weight).T - clean) * slope).sum(-1)
            totals[name] += float(products.square().sum()) / 2
    tokens = sum(len(sample) for sample in samples)
    assert found == pytest.approx({name: total / tokens for name, total in totals.items()}, rel=1e-3)
    for name, hessian in hessians.items():
        torch.testing.assert_close(told.hessians[name], hessian, rtol=1e-3, atol=1e-2)


def test_a_cost_is_about_the_divergence_that_the_change_makes(
    folder: Path, samples: list[torch.Tensor], tmp_path: Path
) -> None:
    found, _ = costs(replica(folder, "cpu"), samples, tmp_path)
    model = whole(folder)

    def predicted() -> torch.Tensor:
        with torch.inference_mode():
            logits: torch.Tensor = model(input_ids=torch.stack(samples)).logits
            return logits.log_softmax(-1)

    before = predicted()
    for name, cost in found.items():
        with Moving.moved(model.get_submodule(name)):
            after = predicted()
        divergence = float((before.exp() * (before - after)).sum(-1).mean())
        assert cost == pytest.approx(divergence, rel=0.35), name


def test_an_interrupted_run_goes_on_at_its_layer_and_finds_the_same(
    folder: Path, samples: list[torch.Tensor], tmp_path: Path
) -> None:
    found, moving = costs(replica(folder, "cpu"), samples[:3], tmp_path / "whole")
    assert moving.layers == [f"model.layers.{number}" for number in (2, 1, 0)]
    with pytest.raises(InterruptedError):
        costs(replica(folder, "cpu"), samples[:3], tmp_path / "work", last=1)
    again, rest = costs(replica(folder, "cpu"), samples[:3], tmp_path / "work")
    assert rest.layers == ["model.layers.1", "model.layers.0"]
    assert again == found
    assert rest.largest == {name: amax for name, amax in moving.largest.items() if ".2." not in name}
    # Of other samples nothing is gone on with.
    other, anew = costs(replica(folder, "cpu"), samples[3:6], tmp_path / "work")
    assert len(anew.layers) == LAYERS
    assert other != found
