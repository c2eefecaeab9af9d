"""The planner: what wins, what is refused and in which words, what a pair shares, what a CPU keeps."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from quantmint.eval.measurements import Server, differences
from quantmint.pipeline.base.canonical import canonical_json
from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.base.hardware import refusal
from quantmint.pipeline.base.schemes import table as schemes
from quantmint.pipeline.recipe.serving import Speculative
from quantmint.pipeline.serving.model.facts import ModelFacts, as_quantized, facts_of_config, model_facts
from quantmint.pipeline.serving.plan import LaunchPlan, ParallelLayout, processes
from quantmint.pipeline.serving.planning.attention import aiter_mla, attention_backend
from quantmint.pipeline.serving.planning.draft import opposite
from quantmint.pipeline.serving.planning.planner import plan_serving
from quantmint.pipeline.serving.planning.request import ServingRequest
from quantmint.pipeline.serving.planning.target import parse_target, profile

CONFIGS = Path(__file__).parents[2] / "assets" / "configs"
LLAMA_8B, LLAMA_70B, LLAMA_405B = (f"Llama-3.1-{size}-Instruct" for size in ("8B", "70B", "405B"))


def facts(name: str = LLAMA_8B) -> ModelFacts:
    return model_facts(CONFIGS / name)


def plan(model: ModelFacts | None = None, target: str = "mi300x:1", **changes) -> LaunchPlan:
    load = {"concurrency": changes.pop("concurrency", 64), "max_model_len": changes.pop("max_model_len", 8192)}
    given = {
        "target": parse_target(target),
        "profile": profile(changes.pop("for_", "latency"), **load),
        "vllm_version": "0.32.0",
    }
    return plan_serving(ServingRequest("/models/m", model or facts(), **(given | changes)))


def flag(made: LaunchPlan, name: str) -> str | None:
    return made.argv[made.argv.index(name) + 1] if name in made.argv else None


def test_the_same_question_has_the_same_answer_wherever_the_model_lies():
    one = plan(target="mi355x:8", for_="throughput", concurrency=512)
    other = replace(one, argv=(*one.argv[:2], "/elsewhere", *one.argv[3:]))
    assert canonical_json(one.canonical()) == canonical_json(other.canonical())
    assert one.canonical() != plan(target="mi355x:8", for_="offline", concurrency=512).canonical()
    told = json.loads(json.dumps(one.to_json()))
    assert told["argv"][:3] == ["vllm", "serve", "/models/m"]
    assert (told["replicas"], told["tensor_parallel_size"], told["expert_parallel"]) == (8, 1, False)
    assert told["memory"]["kv_tokens"] > 8192


def test_versions_that_are_no_longer_or_not_yet_known():
    assert plan(vllm_version="0.19.0").attention_backend == "ROCM_AITER_FA"
    with pytest.raises(UserError, match="not a version"):
        plan(vllm_version="main")
    with pytest.raises(UserError, match=r"vLLM 0\.18\.2 is older than 0\.19\.0, the oldest that is supported"):
        plan(vllm_version="0.18.2")
    assert any("newer than the tables" in warning for warning in plan(vllm_version="0.40.0").warnings)


def test_what_the_recipe_sets_wins_and_memory_follows():
    made = plan(overrides={"--max-num-seqs": "100", "--gpu-memory-utilization": "0.5", "VLLM_ROCM_USE_AITER": "0"})
    assert flag(made, "--max-num-seqs") == "100"
    assert made.env["VLLM_ROCM_USE_AITER"] == "0"
    reasons = {reason.knob: reason for reason in made.reasons}
    assert reasons["--max-num-seqs"][2:] == ("set in the recipe or on the command line", "given")
    assert made.memory.budget < plan().memory.budget
    assert "SAFETENSORS_FAST_GPU" not in plan(overrides={"SAFETENSORS_FAST_GPU": False}).env
    assert plan(overrides={"--max-model-len": "4096"}).memory.concurrency > plan().memory.concurrency
    assert flag(plan(overrides={"--kv-cache-dtype": "fp8"}), "--kv-cache-dtype") == "fp8"


def declaring(**quantization) -> ModelFacts:
    """Llama 8B with a ``quantization_config`` in its config.json."""
    config = json.loads((CONFIGS / LLAMA_8B / "config.json").read_text(encoding="utf-8"))
    return facts_of_config({**config, "quantization_config": quantization})


@pytest.mark.parametrize(
    ("said", "cache"),
    [
        ({"quant_method": "fp8", "activation_scheme": "static", "kv_cache_scheme": "static"}, "fp8"),
        ({"quant_method": "modelopt", "kv_cache_scheme": {"type": "float", "num_bits": 8}}, "fp8"),
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, None),
        ({"quant_method": "modelopt", "kv_cache_scheme": {"type": "float", "num_bits": 4}}, None),
    ],
)
def test_a_checkpoint_that_says_it_has_scales_gets_an_fp8_cache(said, cache):
    made = plan(declaring(**said))
    assert flag(made, "--kv-cache-dtype") == cache
    assert not any("no scales" in warning for warning in made.warnings)


def test_an_fp8_cache_without_scales_is_warned_of():
    assert any("no scales" in one and "beyond 240" in one for one in plan(kv_cache_dtype="fp8").warnings)
    assert any("beyond 448" in one for one in plan(kv_cache_dtype="fp8", target="mi355x:1").warnings)
    dynamic = plan(overrides={"--kv-cache-dtype": "fp8_per_token_head"})
    assert not any("no scales" in one for one in dynamic.warnings)


@pytest.mark.parametrize(("version", "dtype"), [("0.19.1", "float16"), ("0.21.0", "float16"), ("0.22.0", None)])
def test_gptq_starts_in_the_type_that_its_kernels_take(version, dtype):
    assert flag(plan(declaring(quant_method="gptq", bits=4, group_size=128), vllm_version=version), "--dtype") == dtype


def test_an_image_of_a_short_version_has_a_tag_that_exists():
    assert plan(vllm_version="0.26").image == "vllm/vllm-openai-rocm:v0.26.0"


def test_a_flag_that_is_set_silences_its_opposite():
    assert opposite("--no-enable-prefix-caching") == "--enable-prefix-caching"
    measured = {"purpose": "measure"}
    assert "--no-enable-prefix-caching" in plan(**measured).argv
    set_ = plan(overrides={"--enable-prefix-caching": True}, **measured)
    assert "--enable-prefix-caching" in set_.argv
    assert "--no-enable-prefix-caching" not in set_.argv


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"--max-num-sqs": "4"}, 'did you mean "--max-num-seqs"'),
        ({"--calculate-kv-scales": True}, "does not know --calculate-kv-scales"),
        ({"VLLM_ATTENTION_BACKEND": "ROCM_AITER_FA"}, "--attention-backend replaces it"),
        ({"numa_balancing": "0"}, "set on the machine"),
        ({"--port": "80"}, "the launcher gives"),
        ({"--max-num-seqs": "many"}, "expected a whole number"),
        ({"--gpu-memory-utilization": "95"}, "above 0 and up to 1"),
        ({"--max-model-len": "long"}, "expected a number of tokens"),
        ({"--tensor-parallel-size": "4"}, "takes 4 accelerators"),
    ],
)
def test_an_override_that_cannot_be(overrides, message):
    with pytest.raises(UserError) as caught:
        plan(overrides=overrides)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("version", "value", "there"),
    [
        ("0.26.0", "ptpc_fp8", "fp8, fp8_per_tensor, fp8_per_block, fp8_per_channel, mxfp8"),
        ("0.33.0", "ptpc_fp8", "fp8, fp8_per_tensor, fp8_per_block, fp8_per_channel, mxfp8"),
        ("0.23.0", "fp8_per_channel", "fp8, fp8_per_tensor, fp8_per_block, mxfp8"),
        ("0.19.0", "fp8_per_block", "fp8"),
    ],
)
def test_a_quantization_that_a_version_does_not_have(version, value, there):
    with pytest.raises(UserError, match=f"vLLM {version} has no --quantization={value}") as caught:
        plan(vllm_version=version, overrides={"--quantization": value})
    assert caught.value.hint == f"it has {there}"


def test_memory_knows_of_quantization_on_the_fly():
    made = plan(overrides={"--quantization": "fp8_per_channel"})
    assert flag(made, "--quantization") == "fp8_per_channel"
    assert made.memory.weights == plan(as_quantized(facts(), scheme="ptpc_fp8")).memory.weights < plan().memory.weights
    stored = as_quantized(facts(), scheme="mxfp4")
    assert plan(stored, overrides={"--quantization": "quark"}).memory == plan(stored).memory


def test_parallelism_that_the_recipe_spells_out():
    spelled = {"--tensor-parallel-size": "2", "--enable-expert-parallel": True}
    made = plan(facts("Qwen3-30B-A3B"), "mi300x:8", overrides=spelled, for_="throughput", concurrency=512)
    assert made.layout == ParallelLayout(2, expert=True, replicas=4)
    assert made.reasons[0].source == "given"
    with pytest.raises(UserError, match="64 attention heads cannot be split over 6"):
        plan(facts(LLAMA_70B), "mi300x:8", overrides={"--tensor-parallel-size": "6"})


def test_what_cannot_be_planned():
    with pytest.raises(UserError, match="max_model_len is 200,000 tokens, more than the model's context of 131,072"):
        plan(max_model_len=200_000)


def test_what_does_not_fit_is_refused_with_the_smallest_that_does():
    with pytest.raises(UserError) as caught:
        plan(facts(LLAMA_405B), "mi300x:4")
    assert "weights take" in caught.value.message
    assert "GB" in caught.value.message
    assert "--target mi300x:8" in (caught.value.hint or "")
    assert plan(facts(LLAMA_405B), "mi300x:8").layout.tensor == 8
    with pytest.raises(UserError) as caught:
        plan(facts(LLAMA_70B), max_model_len=131072, concurrency=1, overrides={"--gpu-memory-utilization": "0.85"})
    hint = caught.value.hint or ""
    assert "--target mi300x:2" in hint
    assert "--target mi325x:1" in hint
    tokens = int(hint.split("a context of ")[1].split(" ")[0].replace(",", ""))
    shorter = {"max_model_len": tokens, "concurrency": 1, "overrides": {"--gpu-memory-utilization": "0.85"}}
    assert plan(facts(LLAMA_70B), **shorter).memory.kv_tokens >= tokens


def test_attention_takes_what_its_version_takes():
    v32 = facts("DeepSeek-V3.2")
    assert plan(v32, "mi300x:8", vllm_version="0.19.0").attention_backend == "ROCM_AITER_MLA_SPARSE"
    with pytest.raises(UserError, match=r"reads no FP8 KV cache in vLLM 0\.19\.0"):
        plan(v32, "mi300x:8", vllm_version="0.19.0", kv_cache_dtype="fp8")
    assert flag(plan(v32, "mi300x:8", vllm_version="0.24.0", kv_cache_dtype="fp8"), "--kv-cache-dtype") == "fp8"
    kimi = facts("Kimi-K2-Instruct")  # 64 heads: 2 on each of 32
    assert [aiter_mla(kimi, 32, version) for version in ((0, 23), (0, 24))] == [False, True]
    assert not aiter_mla(kimi, 3, (0, 33))
    odd = plan(replace(kimi, heads=72), "mi355x:8", vllm_version="0.33.0")
    assert odd.attention_backend == "TRITON_MLA"
    on = {"VLLM_ROCM_USE_AITER": "1"}
    assert attention_backend(facts(), "rocm", on, ()) == "ROCM_ATTN"
    assert attention_backend(facts(), "rocm", on, ("--attention-backend", "X")) == "X"
    assert [attention_backend(kimi, "rocm", env, ()) for env in (on, {})] == ["ROCM_AITER_MLA", "TRITON_MLA"]
    assert attention_backend(facts(), "cpu", {}, ()) is None


def test_speculation_without_what_vllm_refuses():
    made = plan(speculative=Speculative(method="eagle3", model="/models/draft", tokens=3), concurrency=128)
    said = json.loads(flag(made, "--speculative-config") or "")
    assert said == {"method": "eagle3", "model": "/models/draft", "num_speculative_tokens": 3}
    quiet = plan(speculative=Speculative(method="mtp", tokens=2), concurrency=32)
    assert json.loads(flag(quiet, "--speculative-config") or "") == {"method": "mtp", "num_speculative_tokens": 2}


def test_packed_servers_share_a_gpu_when_that_is_asked():
    busy = {"for_": "throughput", "concurrency": 256}
    packed = plan(servers_per_gpu=2, **busy)
    assert packed.layout == ParallelLayout(packed=2)
    assert flag(packed, "--gpu-memory-utilization") == "0.45"
    assert [(process.gpus, process.port) for process in processes(packed)] == [((0,), 8000), ((0,), 8001)]
    with pytest.raises(UserError, match="does not fit"):
        plan(facts(LLAMA_70B), servers_per_gpu=2, **busy)


@pytest.mark.parametrize("hardware", ["cpu", "mi300x", "mi355x"])
@pytest.mark.parametrize("kv_cache", ["auto", "fp8"])
def test_a_pair_differs_by_what_belongs_to_the_checkpoint(hardware, kv_cache):
    source = facts()
    for scheme, row in schemes().items():
        if refusal(hardware, scheme, kv_cache, row.formats[0]):
            continue
        same = {"target": hardware, "purpose": "measure", "max_model_len": 2048}
        baseline = plan(source, kv_cache_dtype="auto", **same)
        made = as_quantized(source, scheme=scheme, kv_cache=kv_cache, format=row.formats[0])
        candidate = plan(made, kv_cache_dtype=kv_cache, layout=baseline.layout, **same)
        sides = [Server("0.32.0", hardware, side.argv, dict(side.env)) for side in (baseline, candidate)]
        assert differences(*sides) == ()
        assert flag(candidate, "--kv-cache-dtype") == (None if kv_cache == "auto" else "fp8")


def test_experts_that_the_cpu_build_cannot_load_are_refused_and_those_in_16_bit_are_not():
    source = facts("Qwen3-30B-A3B")
    same = {"target": "cpu", "max_model_len": 2048}
    with pytest.raises(UserError, match="multiplies routed experts in FP8 by blocks only"):
        plan(as_quantized(source, scheme="ptpc_fp8"), **same)
    kept = as_quantized(source, scheme="ptpc_fp8", assigned=lambda name: None if ".experts." in name else "ptpc_fp8")
    assert (kept.experts, kept.expert_schemes) == (128, ())
    plan(kept, **same)


@pytest.mark.parametrize(("requests", "data"), [(128, 1), (129, 1), (255, 1), (256, 8), (512, 8)])
def test_latent_attention_changes_where_the_guide_saw_it_cross_over(requests, data):
    made = plan(facts("DeepSeek-R1-0528"), "mi355x:8", for_="throughput", concurrency=requests)
    assert (made.layout.data, made.layout.expert) == (data, True)
    # A dense model has nothing to exchange with others, and is alone from 129 on.
    dense = plan(target="mi300x:8", for_="throughput", concurrency=requests)
    assert dense.layout.replicas == (8 if requests > 128 else 1)


QUICK = "VLLM_ROCM_QUICK_REDUCE_"


@pytest.mark.parametrize("purpose", ["serve", "tune"])
def test_what_was_tuned_of_quick_reduce_is_what_is_served(purpose):
    wide = {"model": facts(LLAMA_405B), "target": "mi300x:8", "for_": "throughput", "purpose": purpose}
    made = plan(**wide)
    assert (made.env[f"{QUICK}QUANTIZATION"], made.env[f"{QUICK}CAST_BF16_TO_FP16"]) == ("FP", "0")
    swept = plan(**wide, overrides={f"{QUICK}QUANTIZATION": "INT8"})
    assert f"{QUICK}CAST_BF16_TO_FP16" not in swept.env, "without the cast INT8 begins at 2048 MB between 8"
    assert made.env.keys() - swept.env.keys() == {f"{QUICK}CAST_BF16_TO_FP16"}
    off = plan(**wide, overrides={f"{QUICK}QUANTIZATION": "NONE"})
    assert [name for name in off.env if name.startswith(QUICK)] == [f"{QUICK}QUANTIZATION"]
    assert off.memory.beside == 0


def test_quick_reduce_takes_what_its_largest_all_reduce_needs_and_the_plan_counts_it():
    wide = {"model": facts(LLAMA_405B), "target": "mi300x:8", "for_": "throughput"}
    made = plan(**wide)
    tokens = int(flag(made, "--max-num-batched-tokens") or 0)
    assert made.env[f"{QUICK}MAX_SIZE_BYTES_MB"] == str(tokens * 16384 * 2 // 2**20)
    assert made.memory.beside == 2 * tokens * 16384 * 2
    assert plan(**wide, overrides={f"{QUICK}MAX_SIZE_BYTES_MB": False}).memory.beside == 2**32
    tight = plan(**wide, overrides={"--gpu-memory-utilization": "0.999"})
    assert any("Quick Reduce takes" in warning and "will not start" in warning for warning in tight.warnings)
    assert not any("Quick Reduce" in warning for warning in made.warnings)


def test_of_many_servers_one_is_measured():
    made = plan(target="mi300x:8", for_="throughput", concurrency=512, purpose="measure")
    assert made.layout.replicas == 8
    assert any("one of 8 independent servers is measured" in warning for warning in made.warnings)
    assert flag(made, "--max-num-seqs") == "512"


def test_a_cpu_plan_takes_little_memory():
    cpu = {"target": "cpu", "purpose": "measure", "cpu_threads": 2}
    small = plan(max_model_len=512, concurrency=8, **cpu)
    assert (small.env["VLLM_CPU_KVCACHE_SPACE"], small.env["OMP_NUM_THREADS"]) == ("1", "2")
    assert plan(concurrency=512, **cpu).env["VLLM_CPU_KVCACHE_SPACE"] == "4"
    assert plan(max_model_len=40960, **cpu).env["VLLM_CPU_KVCACHE_SPACE"] == "5"  # one request takes that
    wide = plan(max_model_len=512, concurrency=8, overrides={"--dtype": "float32"}, **cpu)
    assert small.memory is not None
    assert wide.memory is not None
    assert wide.memory.kv_tokens * 2 == small.memory.kv_tokens
    # What the published CPU figures were measured with.
    assert small.argv[3:] == (
        *("--served-model-name", "model", "--generation-config", "vllm", "--disable-uvicorn-access-log"),
        *("--dtype", "bfloat16", "--max-model-len", "512", "--max-num-seqs", "8"),
        *("--max-num-batched-tokens", "2048", "--no-enable-prefix-caching", "--enforce-eager"),
    )
    assert set(small.env) == {
        *("VLLM_ENABLE_V1_MULTIPROCESSING", "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "VLLM_CPU_KVCACHE_SPACE"),
        *("VLLM_CPU_INT4_W4A8", "VLLM_HTTP_TIMEOUT_KEEP_ALIVE"),
    }


def test_a_small_model_is_repeated_and_not_cut_in_three():
    """vLLM's custom all-reduce takes 2, 4, 6 and 8 accelerators; nine heads are cut in three, or not at all."""
    nine = replace(facts(), heads=9, kv_heads=3)
    made = plan(nine, "mi300x:8", max_model_len=None)
    assert (made.layout.tensor, made.layout.replicas) == (1, 8)
    assert not any("stay idle" in warning for warning in made.warnings)


def test_a_predictor_that_is_not_used_is_told_of():
    made = plan(replace(facts(), predictor=True))
    assert any("`serve: {speculative: {method: mtp, tokens: 1}}`" in warning for warning in made.warnings)
    asked = plan(replace(facts(), predictor=True), speculative=Speculative(method="mtp", tokens=1))
    assert not any("--speculative-config is not set" in warning for warning in asked.warnings)


def test_a_context_that_nobody_said_is_the_longest_that_fits():
    assert flag(plan(max_model_len=None), "--max-model-len") == "32768"
    assert any("no request length was given" in warning for warning in plan(max_model_len=None).warnings)
    tight = plan(facts(LLAMA_70B), max_model_len=None, overrides={"--gpu-memory-utilization": "0.74"})
    assert int(flag(tight, "--max-model-len") or 0) < 32768


def test_a_plan_is_long_enough_for_its_workload():
    load = profile("throughput", concurrency=64, longest=33280)
    assert flag(plan(profile=load), "--max-model-len") == str(33280 + 33280 // 16)
    short = plan(profile=replace(load, longest=4352))
    assert flag(short, "--max-model-len") == "8192", "the least of the usual contexts that has room"
    assert not any("no request length was given" in warning for warning in short.warnings)
    assert flag(plan(replace(facts(), context=512), profile=replace(load, longest=96)), "--max-model-len") == "512"
    assert any("the workload's longest request has 4,352 tokens" in reason.why for reason in short.reasons)
    assert flag(plan(profile=replace(load, longest=131060)), "--max-model-len") == "131072"
    assert flag(plan(profile=replace(load, max_model_len=8192)), "--max-model-len") == "8192"
    with pytest.raises(UserError, match="longest request has 131,073 tokens, more than the model's context of 131,072"):
        plan(profile=replace(load, longest=131073))
    with pytest.raises(UserError, match="does not fit"):  # rather than a plan for shorter ones
        plan(facts(LLAMA_70B), profile=load, overrides={"--gpu-memory-utilization": "0.74"})


@pytest.mark.parametrize(
    ("model", "load", "seqs"),
    [
        (LLAMA_8B, profile("offline"), "2048"),
        (LLAMA_8B, profile("offline", concurrency=3000), "4096"),
        (LLAMA_8B, profile("latency"), "256"),
        (LLAMA_8B, profile("offline", max_model_len=32768, concurrency=100), "128"),
        (LLAMA_8B, profile("throughput", concurrency=64, longest=33280), "128"),
    ],
)
def test_a_length_that_nobody_said_caps_no_batch(model, load, seqs):
    assert flag(plan(facts(model), profile=load), "--max-num-seqs") == seqs


def test_nodes_run_a_process_each():
    staged = plan(facts(LLAMA_405B), "mi300x:4x2", concurrency=16)
    assert staged.layout == ParallelLayout(4, 2, nodes=2)
    assert flag(staged, "--distributed-executor-backend") is None  # a run that is spread over a Ray cluster says ray
    head, worker = processes(staged, host_ips=("10.0.0.1", "10.0.0.2"))
    assert (head.role, worker.role, worker.port) == ("server", "headless", None)
    shared = ("--distributed-executor-backend", "mp", "--nnodes", "2", "--node-rank")
    assert head.argv == (*staged.argv, *shared, "0", "--master-addr", "10.0.0.1")
    assert worker.argv == (*staged.argv, *shared, "1", "--master-addr", "10.0.0.1", "--headless")
    assert (worker.env["VLLM_HOST_IP"], worker.env["CUDA_VISIBLE_DEVICES"]) == ("10.0.0.2", "0,1,2,3")
    spread = plan(facts("Kimi-K2-Instruct"), "mi300x:4x2", for_="throughput", concurrency=512)
    assert (spread.layout.data * spread.layout.tensor, spread.layout.expert, spread.layout.nodes) == (8, True, 2)
    first, second = processes(spread, host_ips=("10.0.0.1", "10.0.0.2"))
    assert (first.role, second.role, second.port) == ("server", "headless", None)
    assert second.argv[-1] == "--headless"
    assert "10.0.0.1" in second.argv
    assert not {"--data-parallel-start-rank", "--nnodes"} & set(first.argv)
    with pytest.raises(UserError, match="1 addresses for 2 nodes"):
        processes(spread, host_ips=("10.0.0.1",))


def heads(count: int, kv: int) -> ModelFacts:
    return replace(facts(), heads=count, kv_heads=kv)


@pytest.mark.parametrize(
    ("model", "target", "layout"),
    [
        (heads(14, 2), "mi300x:8", ParallelLayout(2, replicas=4)),  # Qwen2.5 0.5B: 7 GPUs could share it
        (heads(12, 2), "mi300x:8", ParallelLayout(4, replicas=2)),  # Qwen2.5 1.5B: 6 could, and leave two idle
        (heads(12, 2), "mi300x:6", ParallelLayout(6)),
        (heads(9, 3), "mi300x:3", ParallelLayout(1, replicas=3)),
    ],
)
def test_a_size_that_leaves_gpus_idle_is_not_taken_for_little(model, target, layout):
    made = plan(model, target, concurrency=16)
    assert made.layout == layout
    assert not any("idle" in warning for warning in made.warnings)
    # What the table says of every accelerator of a node is not true of such a layout, so the reason says why.
    said = "vLLM's own all-reduce takes 2, 4, 6 or 8 GPUs" in made.reasons[0].why
    assert said == (layout.tensor != parse_target(target).gpus)


def test_a_size_that_does_not_divide_takes_stages_or_leaves_some_idle():
    idle = plan(facts(LLAMA_70B), "mi300x:6")
    assert (idle.layout.tensor, idle.layout.replicas) == (4, 1)
    assert any("2 of 6 accelerators stay idle" in warning for warning in idle.warnings)
    uneven = plan(as_quantized(facts(LLAMA_405B), scheme="ptpc_fp8"), "mi300x:3")
    assert (uneven.layout.tensor, uneven.layout.pipeline) == (1, 3)


def test_a_mixed_checkpoint_is_refused_for_the_least_of_its_schemes():
    """Most of its weights load on the CPU, and the server broke at the first request."""
    mixed = as_quantized(
        facts(), scheme="ptpc_fp8", assigned=lambda name: "mxfp4_fp8" if ".mlp." in name else "ptpc_fp8"
    )
    assert mixed.schemes == ("mxfp4_fp8", "ptpc_fp8")
    with pytest.raises(UserError, match="no kernel for MXFP4 linear layers"):
        plan(mixed, "cpu")
    plan(mixed, "mi355x")
    plan(as_quantized(facts(), scheme="ptpc_fp8"), "cpu")
