"""Twelve faults of twelve are stopped, each by what names it, and no sound checkpoint is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quantmint.eval.verdict import Verdict
from quantmint.pipeline.base.hardware import local_cpu_flags, refusal
from quantmint.pipeline.serving.environment import VllmEnvironment
from tests.trap import mixture, predictor
from tests.trap.checkpoints import SOUND, Sound, Workshop
from tests.trap.faults import FAULTS, ROUNDED, TRANSPOSED
from tests.trap.run import table, try_fault, try_layouts, try_sound, write
from tests.trap.tensor_parallel import EXPECTED, verdict
from tests.zoo.models import read, stack_experts

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("trap"))


@pytest.mark.parametrize("base", SOUND, ids=lambda base: base.name)
def test_a_sound_checkpoint_passes(workshop: Workshop, base: Sound) -> None:
    result = try_sound(workshop, base)
    assert result.stoppers == (), result.reasons
    assert len(result.verdicts) == (4 if base.is_trained else 2)


@pytest.mark.parametrize("name", [name for name in FAULTS if name not in (TRANSPOSED, ROUNDED)])
def test_a_fault_of_the_files_is_named(workshop: Workshop, name: str) -> None:
    fault = FAULTS[name]
    result = try_fault(workshop, fault)
    assert any(reason.startswith(f"{fault.rule}: ") for reason in result.reasons["inspection"]), result.reasons


def test_a_proof_by_another_rounding_than_the_target_s_is_void(workshop: Workshop) -> None:
    result = try_fault(workshop, FAULTS[ROUNDED])
    assert result.stoppers == ("servers",)
    assert "rounded with MX scales to 'even', the target rounds to 'up'" in result.reasons["servers"][0]


@pytest.mark.vllm
def test_a_transposed_shard_of_tensor_parallelism_is_stopped(workshop: Workshop, warm_vllm: VllmEnvironment) -> None:
    """In a real vLLM on two processes: the sound launch passes, and the same with one shard transposed does not."""
    if (reason := refusal("cpu", "ptpc_fp8", "fp8", "compressed-tensors", cpu_flags=local_cpu_flags())) is not None:
        pytest.skip(reason)
    good, broken = try_layouts(workshop, warm_vllm)
    assert good.verdicts == {"layout": Verdict.PASS}, good.reasons
    assert broken.verdicts == {"layout": Verdict.FAIL}, broken.reasons
    assert "TP 2 beside TP 1 of the same weights: reading" in broken.reasons["layout"][0]


def next_tokens(config: dict[str, Any], tensors: dict[str, torch.Tensor], **inputs: torch.Tensor) -> torch.Tensor:
    """Return the likeliest token after each row of inputs, by transformers' GLM-4.5 in float32."""
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    model = Glm4MoeForCausalLM(Glm4MoeConfig.from_dict(config)).float()
    missing, _ = model.load_state_dict({name: tensor.float() for name, tensor in tensors.items()}, strict=False)
    assert missing == []
    with torch.no_grad():
        return model(**inputs).logits[:, -1].argmax(-1)


def test_the_mixture_s_predictor_says_what_the_model_will_say_by_its_experts(tmp_path: Path) -> None:
    """The predictor is a model of one layer, which reads the embedding of the last token through `eh_proj`."""
    tensors = stack_experts(read(mixture.build(tmp_path)))
    ids = torch.arange(mixture.VOCABULARY)[:, None]
    answers = next_tokens(mixture.CONFIG, tensors, input_ids=ids)
    root, layer = mixture.PREDICTOR, "model.layers.0."
    names = {f"{root}shared_head.norm.": "model.norm.", f"{root}shared_head.head.": "lm_head.", root: layer}
    config = {**mixture.CONFIG, "num_hidden_layers": 1, "first_k_dense_replace": 0}
    embeds = torch.nn.functional.rms_norm(tensors[f"{root}embed_tokens.weight"].float(), (mixture.HIDDEN,))
    both = torch.cat([embeds, torch.randn(embeds.shape, generator=torch.Generator().manual_seed(0))], dim=1)
    inputs = (both @ tensors[f"{root}eh_proj.weight"].float().T)[:, None]
    ahead = {"model.embed_tokens.weight": tensors["model.embed_tokens.weight"]}
    for name, tensor in tensors.items():
        if (prefix := next((prefix for prefix in names if name.startswith(prefix)), None)) is not None:
            ahead[name.replace(prefix, names[prefix])] = tensor
    assert (next_tokens(config, ahead, inputs_embeds=inputs) == answers).float().mean() > 0.98

    largest = torch.finfo(torch.float8_e4m3fn).max
    for name in (name for name in ahead if ".experts." in name):
        rows = ahead[name].float().abs().amax(-1, keepdim=True)
        ahead[name] = ahead[name].float() / rows * largest  # codes, as they are without scales
    assert (next_tokens(config, ahead, inputs_embeds=inputs) == answers).float().mean() < 0.1


@pytest.mark.vllm
def test_runs_of_a_predictor_end_with_the_candidate_s_acceptance(warm_vllm: VllmEnvironment, tmp_path: Path) -> None:
    """The stages alone: this machine need not have a GPU."""
    runs = [predictor.verdict(tmp_path, name, "h100", dry_run=True) for name in predictor.EXPECTED]
    sides = [f"{stage}-{side}" for side in ("baseline", "candidate") for stage in ("serve", "acceptance")]
    assert [run["stages"] for run in runs] == [["source", "quantize", *sides]] * 2


@pytest.mark.vllm
def test_on_two_gpus_both_runs_end_with_the_layout(warm_vllm: VllmEnvironment, tmp_path: Path) -> None:
    """The stages alone: this machine need not have a GPU."""
    runs = [verdict(tmp_path, name, "h100", dry_run=True) for name in EXPECTED]
    assert [run["stages"] for run in runs] == [["source", "quantize", "serve-candidate", "layout"]] * 2


def test_the_table_is_written_between_its_marks(workshop: Workshop, tmp_path: Path) -> None:
    name = "weights of two layers exchanged"
    text = table({name: try_fault(workshop, FAULTS[name])}, {"sound": try_sound(workshop, SOUND[0])})
    assert f"| {name} | **error too large** | passes |" in text
    assert "| sound | passes | passes | passes | passes |" in text
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- trap: written by `make trap` -->\nold\n<!-- trap: end -->\nafter\n")
    write(text, page=page)
    content = page.read_text()
    assert text in content
    assert "old" not in content
    assert content.startswith("before\n")
    assert content.endswith("\nafter\n")
    page.write_text("no marks")
    with pytest.raises(ValueError, match="found no <!-- trap"):
        write(text, page=page)
