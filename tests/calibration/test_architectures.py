"""Architectures of every kind: recurrent, hybrid, sliding, latent, sparse, sharing; resident and layer by layer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from quantmint.calibration import layers
from quantmint.calibration.calibrate import CalibrationOutcome, Execution, calibrate
from quantmint.calibration.calls import replay_obstacle
from quantmint.calibration.errors import CalibrationError
from quantmint.calibration.measurement import rotary_part
from quantmint.calibration.observers import Observation
from quantmint.calibration.parts import attention_modules, shared_attention
from quantmint.calibration.ranges import Ranges, load_ranges, ranges_of, run_resident
from quantmint.calibration.replica import load_resident, replica
from quantmint.calibration.weights import build
from tests.measuring import observe
from tests.zoo.models import names

Zoo = Callable[..., Path]
WALKED = [
    "bloom",  # layers that return tuples
    "deepseek_v4",  # norms in float32, caches of its own classes
    "deepseek_v32",  # an indexer with a cache of its own
    "falcon_h1",  # attention beside a state space
    "falcon_mamba",  # no attention
    "gemma3n_text",  # shared K and V, four streams, projections around the layers
    "gemma4_text",
    "glm_moe_dsa",  # the choice of an indexer, which the next layer takes
    "granitemoehybrid",
    "jamba",
    "kimi_linear",
    "lfm2",
    "mamba2",
    "minimax",  # a class of caches of its own
    "nemotron_h",
    "olmo_hybrid",
    "qwen3_5_text",
    "qwen3_next",
    "qwen4_exp_text",
]
WHOLE = {
    "hrm_text": "its layers are not one list",
    "mllama": "it skips layer 1 on text alone",
    "zamba2": "its layers share weights: model.layers.3.shared_transformer.self_attn.q_proj.weight",
}
BROKEN = {
    "diffusion_gemma": "it cannot be measured on text alone: its decoder writes nothing into the cache that it reads",
}


@pytest.fixture
def run(tmp_path: Path, listener: Any) -> Callable[..., CalibrationOutcome]:
    def run(folder: Path, batches: list[torch.Tensor], **more: Any) -> CalibrationOutcome:
        observation = more.pop("observation", Observation())
        execution = Execution(**{"devices": ["cpu"], "work": tmp_path / "work", **more})
        return calibrate(folder, batches, observation, execution, watcher=listener)

    return run


@pytest.mark.slow
@pytest.mark.parametrize("name", WALKED)
def test_layer_mode_finds_what_resident_mode_finds(
    zoo: Zoo,
    blocks: torch.Tensor,
    run: Callable[..., CalibrationOutcome],
    same: Callable[[Ranges, Ranges], None],
    name: str,
) -> None:
    """A state that another batch has left would change what is found: batches come in the other order."""
    batches = list(blocks[:10].split(4))
    observation = Observation(inputs="percentile", cache="mse", percentile=95.0)
    reference = observe(load_resident(zoo(name), "cpu"), batches, observation)
    layered = run(zoo(name), batches[::-1], observation=observation, mode="layer", activation_bytes=0)
    assert layered.decision.mode == "layer"
    same(reference, layered.ranges)
    assert reference.inputs


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in names() if name not in (*WALKED, *WHOLE, *BROKEN)])
def test_all_others_too(
    zoo: Zoo,
    blocks: torch.Tensor,
    run: Callable[..., CalibrationOutcome],
    same: Callable[[Ranges, Ranges], None],
    name: str,
) -> None:
    resident = run(zoo(name), [blocks[:4]], mode="resident")
    same(resident.ranges, run(zoo(name), [blocks[:4]], mode="layer").ranges)


@pytest.mark.parametrize("name", WHOLE)
def test_what_cannot_be_walked_is_run_whole(
    zoo: Zoo, blocks: torch.Tensor, run: Callable[..., CalibrationOutcome], name: str
) -> None:
    decision = run(zoo(name), [blocks[:2]]).decision
    assert decision.mode == "resident"
    assert decision.reason.startswith(f"its layers cannot be run one at a time: {WHOLE[name]}")
    with pytest.raises(CalibrationError, match=r"found calibration\.mode layer, but .*; take mode: resident, or auto"):
        run(zoo(name), [blocks[:2]], mode="layer")


@pytest.mark.parametrize("name", [*WALKED, *WHOLE])
def test_an_obstacle_is_known_without_weights(zoo: Zoo, name: str) -> None:
    obstacle = replay_obstacle(build(zoo(name)))
    assert (obstacle or "").startswith(WHOLE.get(name, ""))
    assert (obstacle is None) == (name in WALKED)


@pytest.mark.parametrize("mode", ["resident", "layer"])
@pytest.mark.parametrize("name", BROKEN)
def test_what_cannot_be_run_is_said(
    zoo: Zoo, blocks: torch.Tensor, run: Callable[..., CalibrationOutcome], name: str, mode: str
) -> None:
    with pytest.raises(CalibrationError, match=BROKEN[name]):
        run(zoo(name), [blocks[:2]], mode=mode)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mamba", []),
        ("minimax", ["model.layers.1.self_attn"]),  # the other one is called attention too
        ("kimi_linear", ["model.layers.1.self_attn"]),
        ("longcat_flash", [f"model.layers.{layer}.self_attn.{part}" for layer in (0, 1) for part in (0, 1)]),
        ("qwen3_next", ["model.layers.1.self_attn"]),
        ("nemotron_h", ["model.layers.2.mixer"]),
        ("gpt2", ["transformer.h.0.attn", "transformer.h.1.attn"]),
    ],
)
def test_attention_is_what_hands_keys_to_a_cache(zoo: Zoo, name: str, expected: list[str]) -> None:
    assert list(attention_modules(build(zoo(name)))) == expected


@pytest.mark.parametrize("name", ["bamba", "falcon_h1", "gemma3_text", "lfm2", "qwen3_next", "deepseek_v32"])
def test_ranges_are_those_of_the_models_own_cache(zoo: Zoo, blocks: torch.Tensor, name: str) -> None:
    one = load_resident(zoo(name), "cpu")
    ranges = observe(one, [blocks[:4, :12]])
    with torch.inference_mode():
        cache = one.model.base_model(input_ids=blocks[:4, :12], use_cache=True).past_key_values
    assert list(ranges.keys) == list(one.attention)
    for attention, keys in ranges.keys.items():
        layer = cache.layers[one.model.get_submodule(attention).layer_idx]
        assert torch.equal(keys, layer.keys.abs().amax(dim=(0, 2, 3)).float())
        assert torch.equal(ranges.values[attention], layer.values.abs().amax(dim=(0, 2, 3)).float())


def test_what_attention_caches_must_be_an_attention_modules(zoo: Zoo, blocks: torch.Tensor) -> None:
    one = load_resident(zoo("qwen3"), "cpu")
    layer = one.model.model.layers[1]
    forward = layer.forward

    def caches(hidden: torch.Tensor, **more: Any) -> Any:
        more["past_key_values"].update(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4), 1)
        return forward(hidden, **more)

    layer.forward = caches
    with pytest.raises(CalibrationError, match="layer 1 caches K and V that no known attention module has made"):
        observe(one, [blocks[:1]])


# One hands its latent and the rotated part to the cache, the other keys and values of all heads.
@pytest.mark.parametrize("name", ["deepseek_v3", "glm_moe_dsa"])
def test_the_latent_and_the_rotated_part_of_keys_are_measured(
    zoo: Zoo, blocks: torch.Tensor, tmp_path: Path, name: str
) -> None:
    one = load_resident(zoo(name), "cpu")
    ranges = observe(one, blocks[:8].split(4), Observation(inputs="percentile", cache="percentile", percentile=50.0))
    attention = one.model.model.layers[1].self_attn
    latents: list[float] = []
    handle = attention.kv_a_layernorm.register_forward_hook(lambda *_: latents.append(float(_[2].abs().max())))
    with torch.inference_mode():
        cache = one.model.base_model(input_ids=blocks[:8], use_cache=True).past_key_values.layers[1]
    handle.remove()
    rotated = cache.values if name == "deepseek_v3" else cache.keys[..., -attention.qk_rope_head_dim :]
    expected = torch.tensor([max(latents), float(rotated.abs().max())])
    found = ranges.latents["model.layers.1.self_attn"]
    torch.testing.assert_close(found, expected, rtol=0.01, atol=0)
    assert float(found[1]) > 0
    assert set(ranges.latents) == set(ranges.keys)
    ranges.save(tmp_path / "ranges.safetensors")
    again = load_ranges(tmp_path / "ranges.safetensors").latents
    assert again.keys() == ranges.latents.keys()
    assert all(torch.equal(again[module], found) for module, found in ranges.latents.items())


def test_a_latent_without_positions_has_no_rotated_part(zoo: Zoo, blocks: torch.Tensor) -> None:
    (found,) = observe(load_resident(zoo("glm5_next"), "cpu"), [blocks[:2]]).latents.values()
    assert found[0] > 0
    assert found[1] == 0


def test_where_no_columns_are_all_heads_the_keys_count() -> None:
    keys = torch.arange(48.0).view(1, 2, 3, 8)
    assert rotary_part(keys, keys, 2) is keys
    keys[..., :2] = 1.0
    assert rotary_part(keys, keys, 2).tolist() == torch.ones(1, 2, 3, 2).tolist()
    keys[..., -2:] = 2.0
    assert rotary_part(keys, keys, 2).unique().tolist() == [2.0]


def test_layers_that_use_the_keys_and_values_of_others_have_their_ranges(zoo: Zoo, blocks: torch.Tensor) -> None:
    name = "model.layers.{}.self_attn".format
    one = load_resident(zoo("gemma3n_text"), "cpu")
    assert shared_attention(one.model) == {name(2): name(0), name(3): name(1)}
    ranges = observe(one, [blocks[:4]])
    assert list(ranges.keys) == [name(layer) for layer in range(4)]
    for user, maker in one.shared.items():
        assert torch.equal(ranges.keys[user], ranges.keys[maker])
        assert torch.equal(ranges.values[user], ranges.values[maker])
    assert not torch.equal(ranges.keys[name(0)], ranges.keys[name(1)])


def test_an_input_range_is_of_all_modules_that_have_the_weight(zoo: Zoo, blocks: torch.Tensor) -> None:
    one = load_resident(zoo("zamba2"), "cpu")
    modules = [f"model.layers.{layer}.shared_transformer.self_attn.q_proj" for layer in (1, 3)]
    largest = dict.fromkeys(modules, 0.0)
    for module in modules:
        one.model.get_submodule(module).register_forward_pre_hook(
            lambda _, args, module=module: largest.__setitem__(module, float(args[0].abs().max()))
        )
    ranges = observe(one, [blocks[:4]])
    assert len(set(largest.values())) == 2
    assert float(ranges.inputs[modules[0]]) == max(largest.values())
    assert len(ranges.keys) == 2, "each layer has a cache of its own"


def test_experts_have_the_names_that_servers_know(zoo: Zoo, blocks: torch.Tensor) -> None:
    ranges = observe(load_resident(zoo("llama4_text"), "cpu"), [blocks[:2]])
    parts = ("gate_proj", "up_proj", "down_proj")
    experts = [f"model.layers.1.feed_forward.experts.{number}.{part}" for number in range(4) for part in parts]
    assert set(experts) < ranges.inputs.keys()


def test_an_expert_that_no_token_reaches_has_the_largest_range_of_its_layer(zoo: Zoo, blocks: torch.Tensor) -> None:
    """LongCat's experts cannot be shown tokens that the router does not send them."""
    one = load_resident(zoo("longcat_flash"), "cpu")
    found = run_resident(one, [blocks[:1, :2]], Observation())
    assert len(found.routed_only) == 2 * 6
    layer, ranges = "model.layers.1.mlp.experts", ranges_of(one, found.finish())
    experts = {number: ranges.inputs[f"{layer}.{number}.down_proj"] for number in range(4)}
    unreached = [number for number in experts if not found.tokens[f"{layer}.{number}"]]
    assert unreached
    assert all(experts[number] == max(experts.values()) for number in unreached)


def test_experts_of_images_have_no_range(zoo: Zoo, blocks: torch.Tensor) -> None:
    ranges = observe(load_resident(zoo("ernie4_5_vl_moe"), "cpu"), [blocks[:2]])
    experts = {int(name.split(".")[5]) for name in ranges.inputs if ".experts." in name}
    assert experts == {0, 1, 2, 3}


@pytest.mark.parametrize("name", ["gemma3n_text", "glm_moe_dsa"])
def test_what_is_carried_is_committed_too(
    zoo: Zoo,
    blocks: torch.Tensor,
    run: Callable[..., CalibrationOutcome],
    same: Callable[[Ranges, Ranges], None],
    monkeypatch: pytest.MonkeyPatch,
    listener: Any,
    name: str,
) -> None:
    folder, batches = zoo(name), list(blocks[:8].split(4))
    whole = run(folder, batches, mode="layer")
    monkeypatch.setattr(layers, "COMMIT_SECONDS", 0.0)
    advances: list[int] = []

    def interrupted(count: int) -> None:
        advances.append(count)
        if len(advances) == 4:  # in the second layer
            raise KeyboardInterrupt

    monkeypatch.setattr(listener, "advance", interrupted)
    with suppress(KeyboardInterrupt):
        run(folder, batches, mode="layer")
    assert advances == [0, 4, 4, 4]
    monkeypatch.setattr(listener, "advance", advances.append)
    resumed = run(folder, batches, mode="layer")
    assert advances[4] == 8, "it goes on at the second layer"
    same(whole.ranges, resumed.ranges)


def test_nothing_is_left_of_what_a_recording_replaced(zoo: Zoo) -> None:
    one = replica(zoo("falcon_h1"), "cpu")
    assert one.walkable.length == 1
    assert not any("forward" in vars(module) for module in one.model.modules())
