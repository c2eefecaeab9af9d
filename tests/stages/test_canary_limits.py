"""The default limits on the embedded model: what is coarse reaches the evaluation, what is broken does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quantmint.eval import prompts
from quantmint.eval.canary import Answer, CanaryAnswers, CanaryPolicy, compare, judge
from quantmint.eval.verdict import Verdict
from quantmint.pipeline.recipe.load import load_recipe
from quantmint.pipeline.recipe.sections import CanaryGate
from tests.serving.served.cases import MODEL, Case, make_case

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.slow

RECIPE = MODEL.parents[1] / "tiny-ptpc-fp8kv.yaml"
LAYERS = 4


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Products this small take longer in two threads than in one, and much longer where others compute too."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def ask(folder: Path) -> CanaryAnswers:
    """What the checkpoint says to a third of the prompts, computed in this process."""
    from transformers import AutoTokenizer

    from quantmint.pipeline.serving.reference.model import load

    tokenizer, loaded = AutoTokenizer.from_pretrained(MODEL), load(folder, "cpu")
    found = []
    for prompt in prompts.load("tiny")[::3]:
        ids = torch.tensor(tokenizer(prompt.text)["input_ids"])
        with torch.no_grad():
            logprobs = loaded.model(ids[None]).logits[0, :-1].float().log_softmax(-1)
        actual = logprobs.gather(1, ids[1:, None])[:, 0].tolist()
        values, tokens = (top.tolist() for top in logprobs.topk(20))
        rows = tuple(map(tuple, tokens)), tuple(map(tuple, values))
        found.append(Answer(prompt.name, tuple(ids.tolist()), tuple(actual), *rows))
    return CanaryAnswers(tuple(found))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    return lambda scheme, layout: make_case(Case(scheme, layout), tmp_path_factory.mktemp(scheme) / "made")


@pytest.fixture(scope="module")
def baseline() -> CanaryAnswers:
    return ask(MODEL)


@pytest.fixture(scope="module")
def policies() -> tuple[CanaryPolicy, CanaryPolicy]:
    """The defaults, and those of the recipe of this model."""
    own = load_recipe(str(RECIPE)).recipe.gate.canary
    assert own is not None
    return CanaryGate().policy({"ptpc_fp8"}), own.policy({"ptpc_fp8"})


@pytest.mark.parametrize(("scheme", "layout"), [("ptpc_fp8", "compressed-tensors"), ("mxfp4", "quark")])
def test_what_is_coarse_is_the_evaluation_s_to_judge(
    scheme: str,
    layout: str,
    made: Callable[[str, str], Path],
    baseline: CanaryAnswers,
    policies: tuple[CanaryPolicy, CanaryPolicy],
) -> None:
    canary = compare(baseline, ask(made(scheme, layout)))
    assert [judge(canary, policy)[0] for policy in policies] == [Verdict.PASS] * 2


@pytest.mark.parametrize("factor", [2, 4])
def test_one_layer_with_wrong_scales_is_stopped(
    factor: int,
    made: Callable[[str, str], Path],
    baseline: CanaryAnswers,
    policies: tuple[CanaryPolicy, CanaryPolicy],
) -> None:
    from safetensors.torch import load_file, save_file

    [shard] = made("ptpc_fp8", "compressed-tensors").glob("*.safetensors")
    right = load_file(shard)
    for layer in range(LAYERS):
        wrong = {
            name: tensor * factor if f"layers.{layer}." in name and name.endswith("weight_scale") else tensor
            for name, tensor in right.items()
        }
        save_file(wrong, shard, metadata={"format": "pt"})
        canary = compare(baseline, ask(shard.parent))
        assert [judge(canary, policy)[0] for policy in policies] == [Verdict.FAIL] * 2, layer
