"""Table of how vLLM builds and loads each architecture, read from its classes, built without weights.

    .venv-vllm/bin/python tests/tools/vllm_loaders.py zoo/*

Run it with vLLM's Python. Each folder holds the config.json and the safetensors files of a tiny model (`tests.zoo`);
only names and shapes of the tensors are read. The table goes to ``pipeline/quantize/model/loaders/vllm-X.Y.yaml``.

A class is built on the meta device with a quantization that records which module asks it for a method, under which
name. Then each tensor of the checkpoint is given to the class's own ``load_weights``, whose last step, the
``weight_loader`` of a parameter, records which parameter the tensor reaches. No model code is interpreted here.
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.machinery
import json
import os
import re
import struct
import sys
import tempfile
import time
import types
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import yaml

LOADERS = Path(__file__).parents[2] / "pipeline" / "quantize" / "model" / "loaders"
HEADER = """\
# How vLLM {version} builds and loads each architecture. Written by tests/tools/vllm_loaders.py; read by ../loader.py.
# Names are vLLM's, without the numbers of layers and experts.
#   quantized    modules that ask for a quantization
#   unquantized  modules with a matrix that never ask: the quantization must exclude them
#   absorbed     projections that latent attention multiplies into its neighbours, in 16 bit
#   experts      containers of routed experts, with the names of an expert's projections on disk
#   fused        module of vLLM: the modules on disk that it is loaded from
#   unlisted     fused modules that a quantization sees as a single module, without the names on disk
#   renames      kind, text on disk, text in vLLM, applied in this order; null: vLLM skips the tensor
#   moves        renames of load_weights that a quantization's lists of names do not go through
#   misnamed     modules that ask under another name, which a quantization's lists are held against
#   skipped      modules on disk that vLLM does not load
#   drafter      class that serves the layers for multi-token prediction
"""
_STUBS = ("torchvision",)
_LFM2 = {
    "conv_dim": 128,
    "block_dim": 128,
    "block_multiple_of": 32,
    "block_auto_adjust_ff_dim": False,
    "block_ffn_dim_multiplier": 1.0,
}
# Fields that releases have in their config.json and that transformers no longer writes, by class; None drops a field.
_FIELDS: dict[str, dict[str, Any]] = {
    "AfmoeForCausalLM": {"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1},
    "DeepseekV4ForCausalLM": {"mlp_layer_types": None, "layer_types": None, "compress_ratios": [0, 4, 128], "num_hash_layers": 1, "head_dim": 512, "index_head_dim": 128},
    "Ernie4_5_VLMoeForConditionalGeneration": {"vision_config": {"embed_dim": 32, "mlp_ratio": 4}, "pixel_hidden_size": 32},
    "Glm4vMoeForConditionalGeneration": {"text_config": {"use_qk_norm": False}},
    "Glm5NextForConditionalGeneration": {"text_config": {"mhc": True, "mla_use_nope": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}},
    "GlmOcrForConditionalGeneration": {"text_config": {"rope_parameters": {"partial_rotary_factor": 1.0}}},
    "HYV3ForCausalLM": {"first_k_dense_replace": 1, "expert_hidden_dim": 128, "route_norm": True},
    "InklingForCausalLM": {"padded_vocab_size": 1024, "use_embed_norm": True, "dense_mlp_idx": 1, "dense_intermediate_size": 256,
        "sconv_kernel_size": 4, "use_global_scale": True, "q_bias": False, "o_bias": False, "gate_activation": "sigmoid", "norm_after_topk": True,
        "use_gate_bias": True, "inference_moe_w13_interleaved": False, "final_logit_softcapping": None},
    "Lfm2ForCausalLM": _LFM2,
    "Lfm2VlForConditionalGeneration": {"text_config": _LFM2},
    "LightOnOCRForConditionalGeneration": {"vision_feature_layer": -1, "projector_hidden_act": "gelu", "image_token_index": 1024, "multimodal_projector_bias": False},
    "LongcatFlashForCausalLM": {"mla_scale_q_lora": True, "mla_scale_kv_lora": True, "zero_expert_type": "identity"},
    "MiMoV2FlashForCausalLM": {"hybrid_layer_pattern": [0, 1], "moe_layer_freq": [0, 1], "layernorm_epsilon": 1e-5,
        "swa_head_dim": 32, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "sliding_window_size": 16},
    "MiniMaxM2ForCausalLM": {"rotary_dim": 16, "scoring_func": "sigmoid"},
    "MiniMaxM3SparseForConditionalGeneration": {"text_config": {"hidden_act": "swigluoai"}, "vision_config": {"img_token_compression_config": {}}},
    "Qwen4ExpForConditionalGeneration": {"vision_config": {"deepstack_visual_indexes": []}, "text_config": {"output_gate_type": "silu"}},
    "Qwen4ExpForCausalLM": {"output_gate_type": "silu"},
    "Step3p7ForConditionalGeneration": {"vision_config": {"output_dim": None, "width": 32, "heads": 2, "layers": 1}},
    "Granite4VisionForConditionalGeneration": {"vision_config": {"hidden_size": 128}},
    "MuseGlimmerForConditionalGeneration": {"vision_config": {"output_dim": 128, "adapter_dim": 64}},
    "QianfanOCRForConditionalGeneration": {"vision_config": {"image_size": 56, "patch_size": 14}},
    "Qwen3OmniMoeForConditionalGeneration": {"thinker_config": {"text_config": {"tie_word_embeddings": False}, "vision_config": {"image_size": 56, "apply_vit_abs_pos_embed": True}}},
    "Qwen3VLMoeForConditionalGeneration": {"text_config": {"norm_topk_prob": True}},
}
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_STACKS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_EXPERTS = {"FusedMoE", "RoutedExperts"}
_HEADS = {"ParallelLMHead"}


def starred(name: str) -> str:
    """Replace the numbers of layers and experts in a module's name with `*`."""
    return _NUMBER.sub("*", name)


def kinds(module: Any) -> set[str]:
    """Return the names of a module's class and its bases; versions of vLLM move classes between files."""
    return {base.__name__ for base in type(module).__mro__}


class _Stub(types.ModuleType):
    """A package that is absent here: preprocessing of images and sound, which building a class only imports."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)


class _StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in _STUBS:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


@dataclass
class Reading:
    """Facts about one class, by starred names."""

    quantized: set[str] = field(default_factory=set)
    unquantized: set[str] = field(default_factory=set)
    absorbed: set[str] = field(default_factory=set)
    experts: set[str] = field(default_factory=set)
    renames: list[list[str | None]] = field(default_factory=list)
    packed: dict[str, list[str]] = field(default_factory=dict)
    loads: dict[str, str] = field(default_factory=dict)  # module on disk: module of vLLM
    mapped: dict[str, str | None] = field(default_factory=dict)  # module on disk: its name after the renames
    shards: dict[str, str] = field(default_factory=dict)  # module on disk: its shard of a fused module
    misnamed: dict[str, str] = field(default_factory=dict)  # module: the name by which it asks
    drafter: str | None = None


class Builder:
    """Builds classes of vLLM without weights, as on an MI355X; one for a process."""

    def __init__(self) -> None:
        import torch

        torch.set_num_threads(1)
        _stub_kernels()
        _pretend_rocm()
        from vllm.config import VllmConfig, set_current_vllm_config
        from vllm.distributed import init_distributed_environment, initialize_model_parallel
        from vllm.model_executor.models import registry

        sys.meta_path.append(_StubFinder())  # after transformers has seen what is absent
        _stub_processors()
        registry._run_in_subprocess = lambda function: function()  # saves an import of vLLM for each class
        with suppress(ImportError):
            from vllm.v1.worker.workspace import init_workspace_manager

            init_workspace_manager(torch.device("meta"))
        with tempfile.TemporaryDirectory() as folder, set_current_vllm_config(VllmConfig()):
            init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
            initialize_model_parallel(1, 1)

    def build(self, folder: Path) -> tuple[Any, Any, Any]:
        """Return the model of a folder on the meta device, its recorder, and its VllmConfig."""
        from vllm.config import DeviceConfig, ModelConfig, VllmConfig

        model_config = ModelConfig(
            model=str(folder),
            tokenizer=str(folder),
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=64,
            enforce_eager=True,
        )
        config = VllmConfig(model_config=model_config, device_config=DeviceConfig("cpu"))
        return (*self._initialize(config, None), config)

    def drafter(self, config: Any) -> tuple[Any, Any] | None:
        """Return the class that serves a model's layers for multi-token prediction, and its recorder."""
        from vllm.config import DeviceConfig, ParallelConfig, SpeculativeConfig, VllmConfig

        speculative = SpeculativeConfig(
            method="mtp",
            num_speculative_tokens=1,
            target_model_config=config.model_config,
            target_parallel_config=ParallelConfig(),
        )
        drafting = VllmConfig(
            model_config=config.model_config, device_config=DeviceConfig("cpu"), speculative_config=speculative
        )
        return self._initialize(drafting, speculative.draft_model_config)

    def _initialize(self, config: Any, model_config: Any) -> tuple[Any, Any]:
        from vllm.model_executor.model_loader.utils import initialize_model

        for device in ("meta", "cpu"):  # some compute with their weights when they are built
            config.compilation_config.static_forward_context.clear()
            recorder = config.quant_config = _recorder()
            try:
                with _on(device):
                    return initialize_model(config, model_config=model_config), recorder
            except (NotImplementedError, RuntimeError) as error:
                if device == "cpu" or "meta" not in str(error):
                    raise
        raise AssertionError


@contextmanager
def _on(device: str) -> Iterator[None]:
    """Create bfloat16 tensors on ``device``, also where vLLM names another."""
    import torch
    from torch.overrides import TorchFunctionMode
    from vllm.utils.torch_utils import set_default_torch_dtype

    class Redirect(TorchFunctionMode):
        def __torch_function__(self, function: Any, _: Any, positional: Any = (), named: Any = None) -> Any:
            named = dict(named or {})
            if named.get("device") is not None:
                named["device"] = torch.device(device)
            return function(*positional, **named)

    with torch.device(device), Redirect(), set_default_torch_dtype(torch.bfloat16):
        yield


def _pretend_rocm() -> None:
    """Let vLLM see an Instinct GPU: it builds some classes otherwise there. No kernel is run."""
    import torch

    torch.cuda.get_device_properties = lambda *_: MagicMock(
        gcnArchName="gfx950", multi_processor_count=256, total_memory=2**38, name="AMD Instinct MI355X"
    )
    torch.cuda.get_device_capability = lambda *_: (9, 5)
    torch.cuda.get_device_name = lambda *_: "AMD Instinct MI355X"
    torch.cuda.device_count = lambda: 1
    torch.cuda.is_available = lambda: True
    torch.cuda.current_device = lambda: 0
    torch.cuda.set_device = lambda *_: None
    torch.cuda.Event = torch.cuda.Stream = MagicMock
    torch.accelerator.empty_cache = lambda: None
    # The passes of vLLM's compiler name kernels of the GPU builds when they are imported.
    sys.modules["vllm.compilation.passes.pass_manager"] = _Stub("vllm.compilation.passes.pass_manager")
    import vllm.platforms
    from vllm.platforms.rocm import RocmPlatform

    RocmPlatform.get_mla_prefill_backend_cls = classmethod(lambda *_: MagicMock())
    vllm.platforms._current_platform = RocmPlatform()
    import vllm.v1.attention.backends.fa_utils as flash_attention
    from vllm.triton_utils import tl, triton

    flash_attention.is_flash_attn_varlen_func_available = lambda: True

    for module in (tl, triton):
        module.__dict__["__getattr__"] = lambda name: MagicMock(name=name)


def _stub_kernels() -> None:
    """Stand in for the kernels of vLLM's ROCm build, which classes look up when they are built."""
    import torch

    find, register = torch._ops._OpNamespace.__getattr__, torch.library.register_fake

    def kernel(namespace: Any, name: str) -> Any:
        try:
            return find(namespace, name)
        except AttributeError:
            if name.startswith("__") or not str(namespace.name).startswith(("_C", "_rocm_C", "_moe_C")):
                raise
            return MagicMock(name=name)

    def register_fake(operator: Any, function: Any = None, /, **options: Any) -> Any:
        if function is None:
            return lambda function: register_fake(operator, function, **options)
        with suppress(RuntimeError):  # of an operator that does not exist
            register(operator, function, **options)
        return function

    torch._ops._OpNamespace.__getattr__, torch.library.register_fake = kernel, register_fake


def _stub_processors() -> None:
    """Let classes that load a processor of images or sound when they are built go without one."""
    import transformers

    def from_pretrained(*_: Any, **__: Any) -> Any:
        processor = MagicMock()
        processor.__class__ = transformers.ProcessorMixin
        return processor

    for name in ("AutoImageProcessor", "AutoFeatureExtractor", "AutoProcessor", "AutoVideoProcessor"):
        getattr(transformers, name).from_pretrained = from_pretrained


def _recorder() -> Any:
    """Return a quantization that records the modules that ask it for a method, and quantizes none."""
    import torch
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

    class Recorder(QuantizationConfig):
        def __init__(self) -> None:
            super().__init__()
            self.prefixes: dict[int, str] = {}
            self.layers: list[Any] = []
            self.mappers: list[Any] = []

        def get_name(self) -> Any:
            return "compressed-tensors"

        def get_supported_act_dtypes(self) -> list[Any]:
            return [torch.bfloat16]

        @classmethod
        def get_min_capability(cls) -> int:
            return 0

        @staticmethod
        def get_config_filenames() -> list[str]:
            return []

        @classmethod
        def from_config(cls, config: dict[str, Any]) -> Any:
            return cls()

        def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
            self.mappers.append(hf_to_vllm_mapper)

        def get_quant_method(self, layer: Any, prefix: str) -> Any:
            self.prefixes[id(layer)] = prefix
            self.layers.append(layer)  # an id is only unique among living objects
            return UnquantizedLinearMethod() if "LinearBase" in kinds(layer) else None

    return Recorder()


def _modules(model: Any) -> list[tuple[str, Any]]:
    """Return each module of a model with the shortest of its paths: a router is its layer's, and its experts' too."""
    paths: dict[int, tuple[str, Any]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        known = paths.get(id(module))
        if known is None or path.count(".") < known[0].count("."):
            paths[id(module)] = (path, module)
    return list(paths.values())


def _module_name(path: str, classes: set[str]) -> str:
    """Return the name by which a quantization knows a module: vLLM leaves out the last part of a container of experts."""
    return starred(path.removesuffix(".routed_experts") if not classes.isdisjoint(_EXPERTS) else path)


def read_modules(model: Any, recorder: Any) -> tuple[Reading, dict[int, str]]:
    """Sort a built model's modules; also return the name of the module that owns each parameter, by the parameter's id."""
    reading, owners = Reading(), {}
    reading.packed = {name: list(parts) for name, parts in recorder.packed_modules_mapping.items()}
    names: dict[int, str] = {}
    for path, module in _modules(model):
        classes = kinds(module)
        asks = id(module) in recorder.prefixes and not classes.isdisjoint(("LinearBase", *_EXPERTS))
        name = names[id(module)] = _module_name(path, classes)
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), name)
        if not any(parameter.ndim >= 2 for parameter in module.parameters(recurse=False)):
            continue
        (reading.quantized if asks else reading.unquantized).add(name)
        if asks and starred(recorder.prefixes[id(module)]) != name:
            reading.misnamed[name] = starred(recorder.prefixes[id(module)])
        if not classes.isdisjoint(_EXPERTS):
            reading.experts.add(name)
    for module in model.modules():
        if "MLAAttention" in kinds(module) and getattr(module, "kv_b_proj", None) is not None:
            reading.absorbed.add(names[id(module.kv_b_proj)])
    reading.quantized -= reading.unquantized
    return reading, owners


def trace(model: Any, owners: Mapping[int, str], tensors: Mapping[str, tuple[int, ...]], reading: Reading) -> None:
    """Give each tensor to the model's `load_weights`, and note which module it reaches."""
    import torch

    hits: list[tuple[int, str]] = []

    def recorder(identity: int) -> Callable[..., bool]:
        def load(*positional: Any, **named: Any) -> bool:
            shard = named.get("shard_id", named.get("loaded_shard_id", positional[2] if len(positional) == 3 else ""))
            hits.append((identity, str(shard)))
            return True

        return load

    for parameter in model.parameters():
        parameter.weight_loader = recorder(id(parameter))
    for name, shape in tensors.items():
        module = name.removesuffix(".weight")
        hits.clear()
        error = None
        try:
            model.load_weights(iter([(name, torch.empty(shape, dtype=torch.bfloat16, device="meta"))]))
        except Exception as caught:  # most want the whole checkpoint, and complain after this tensor has been loaded
            error = caught
        targets = {owners[identity]: shard for identity, shard in hits if identity in owners}
        if len(targets) > 1:
            sys.stderr.write(f"    {name}: reaches {sorted(targets)}\n")
        if not targets and VERBOSE:
            sys.stderr.write(f"    {name}: reaches no parameter{f' ({error!r:.200})' if error else ''}\n")
        for target, shard in list(targets.items())[:1]:
            reading.loads[starred(module)] = target
            reading.shards[starred(module)] = shard
        if not targets:
            reading.loads.setdefault(starred(module), "")


# ---------------------------------------------------------------------------------------------------------- renames

_TABLES = (("regex", "regex"), ("text", "substr"), ("prefix", "prefix"), ("suffix", "suffix"))


def read_renames(model: Any) -> list[tuple[str, Any]]:
    """Return the mappers of a model and of its parts: the path of the part, and the mapper of names below it."""
    mappers: list[tuple[str, Any]] = []
    for path, module in model.named_modules():
        mapper = getattr(module, "hf_to_vllm_mapper", None)
        if mapper is not None and _rows(mapper, "") and all(_rows(mapper, "") != _rows(m, "") for _, m in mappers):
            mappers.append((path, mapper))
    return mappers


def _rows(mapper: Any, path: str) -> list[list[str | None]]:
    rows: list[list[str | None]] = []
    for kind, attribute in _TABLES:
        for source, target in getattr(mapper, f"orig_to_new_{attribute}", {}).items():
            rows.append([kind, getattr(source, "pattern", source), target, *([starred(path)] if path else [])])
    return rows


def rename(name: str, rows: Iterable[list[str | None]]) -> str | None:
    """Apply the table's renames to the name of a module on disk, as the table's reader does; None where one drops it."""
    current = f"{name}.weight"
    for kind, source, target, *within in rows:
        opening = re.match(re.escape(f"{within[0]}.").replace(r"\*", r"\d+"), current) if within else None
        if within and not opening:
            continue
        start = opening[0] if opening else ""
        rest = current[len(start) :]
        hit = {
            "regex": lambda s=source, r=rest: re.search(s, r),
            "text": lambda s=source, r=rest: s in r,
            "prefix": lambda s=source, r=rest: r.startswith(s),
            "suffix": lambda s=source, r=rest: r.endswith(s),
        }[str(kind)]()
        if hit and target is None:
            return None
        if hit and kind == "regex":
            rest = re.sub(source, target, rest)
        elif hit and kind == "suffix":
            rest = rest.removesuffix(source) + target
        elif hit:
            rest = rest.replace(source, target, 1)
        current = start + rest
    return current.removesuffix(".weight")


# ---------------------------------------------------------------------------------------------------------- entries


def parent(name: str) -> str:
    return name.rpartition(".")[0]


def last(name: str) -> str:
    return name.rpartition(".")[2]


def entry(reading: Reading) -> dict[str, Any]:
    """Return a class's row of the table."""
    groups: dict[str, list[str]] = defaultdict(list)
    for module, target in sorted(reading.loads.items()):
        if target:
            groups[target].append(module)
    experts, fused, unlisted = {}, {}, set()
    for target, modules in groups.items():
        single = [module for module in modules if numbered(module, target)]
        if target in reading.experts and single:
            experts[target] = sorted({last(module) for module in single})
        elif target in reading.experts:
            fused[target] = sorted(modules)
        elif len(modules) > 1:
            listed = reading.packed.get(last(target), [])
            modules.sort(key=lambda module: (_position(listed, last(module)), reading.shards[module], module))
            same = len({parent(module) for module in modules}) == 1
            fused[target] = [last(module) for module in modules] if same else modules
            if sorted(listed) != sorted(last(module) for module in modules):
                unlisted.add(target)
    moves = _moves(reading, fused)
    row = {
        "quantized": sorted(reading.quantized),
        "unquantized": sorted(reading.unquantized),
        "absorbed": sorted(reading.absorbed),
        "experts": {target: experts.get(target, []) for target in sorted(reading.experts)},
        "fused": _shortened(fused),
        "unlisted": sorted(unlisted),
        "renames": reading.renames,
        "moves": dict(sorted(moves.items())),
        "misnamed": dict(sorted(reading.misnamed.items())),
        "skipped": sorted(module for module, target in reading.loads.items() if not target),
        "drafter": reading.drafter,
    }
    return {key: value for key, value in row.items() if value}


def numbered(module: str, target: str) -> bool:
    """Whether a module on disk is one expert of the container ``target``, and not a stack of them."""
    return module.count("*") > target.count("*") and parent(module).endswith(".*")


def _position(items: list[str], item: str) -> int:
    return items.index(item) if item in items else len(items)


def _shortened(fused: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """Name fused modules by their last part where that says enough."""
    choices: dict[str, set[tuple[str, ...]]] = defaultdict(set)
    for target, parts in fused.items():
        choices[last(target)].add(tuple(parts))
    return {
        (last(target) if len(choices[last(target)]) == 1 else target): parts for target, parts in sorted(fused.items())
    }


def _moves(reading: Reading, fused: Mapping[str, list[str]]) -> dict[str, str]:
    """Return what the renames leave to do, as the shortest prefixes of module names that lead to the traced modules."""
    moves: dict[str, str] = {}
    exact: dict[str, str] = {}
    for module, target in sorted(reading.loads.items()):
        name = reading.mapped[module]
        if not target or name is None:
            continue
        if target in reading.experts and numbered(name, target):
            source, goal = parent(parent(name)), target
        elif target in fused and all("." not in part for part in fused[target]):
            source, goal = parent(name), parent(target)
        else:
            source, goal = name, target
        exact[source] = goal
        if source == goal:
            continue
        before, after = source.split("."), goal.split(".")
        while before and after and before[-1] == after[-1]:
            before.pop()
            after.pop()
        if before and before.count("*") == after.count("*"):
            moves.setdefault(".".join(before), ".".join(after))
        else:
            moves[source] = goal
    for source, goal in exact.items():
        if apply_moves(source, moves) != goal:
            moves[source] = goal
    return moves


def apply_moves(name: str, moves: Mapping[str, str]) -> str:
    """Replace the longest prefix of a starred name that is among the moves."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        prefix = ".".join(parts[:count])
        if prefix in moves:
            return ".".join(filter(None, (moves[prefix], *parts[count:])))
    return name


def stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return name and shape of the matrices of a checkpoint, and of the single experts that its stacks hold."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            for name, info in json.loads(file.read(length)).items():
                if name != "__metadata__" and len(info["shape"]) >= 2:
                    shapes[name] = tuple(info["shape"])
    for name, shape in list(shapes.items()):
        stack = name.removesuffix(".weight")
        if len(shape) == 3 and last(stack) in _STACKS:
            for part in _STACKS[last(stack)]:
                shapes[f"{parent(stack)}.0.{part}.weight"] = (shape[1], shape[2])
    return {name: shape for name, shape in shapes.items() if name.endswith(".weight")}


def read(builder: Builder, folder: Path) -> Iterator[tuple[str, Reading]]:
    """Build the class that a folder's config.json names, and its drafter; yield each with its facts."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    architecture = config["architectures"][0]
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "config.json").write_text(json.dumps(_with(config, _FIELDS.get(architecture, {}))), encoding="utf-8")
        model, recorder, config = builder.build(Path(scratch))
    reading, owners = read_modules(model, recorder)
    shapes = stored_shapes(folder)
    trace(model, owners, shapes, reading)
    _rename(model, reading, shapes)
    yield architecture, reading


def _with(config: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(config)
    for key, value in fields.items():
        result[key] = _with(result.get(key, {}), value) if isinstance(value, dict) else value
    return {key: value for key, value in result.items() if fields.get(key, 0) is not None}


def _rename(model: Any, reading: Reading, shapes: Iterable[str]) -> None:
    """Choose the renames that lead the names on disk nearest to their modules: the model's own, or its parts' too."""
    mappers = read_renames(model)
    names = [name.removesuffix(".weight") for name in shapes]
    everything = [row for path, mapper in mappers for row in _rows(mapper, path)]
    outer = [row for path, mapper in mappers if not path for row in _rows(mapper, path)]
    modules = reading.quantized | reading.unquantized
    parents = {parent(module) for module in modules}

    def agreement(rows: list[list[str | None]]) -> int:
        renamed = (starred(rename(name, rows) or "") for name in names)
        return sum((name in modules) + (parent(name) in parents) for name in renamed)

    reading.renames = max((outer, everything, []), key=agreement)
    for name in names:
        mapped = rename(name, reading.renames)
        reading.mapped[starred(name)] = None if mapped is None else starred(mapped)


# ------------------------------------------------------------------------------------------------------------- table


def merged(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one row for a class that was built from several configurations."""
    result: dict[str, Any] = {}
    for row in rows:
        for key, value in row.items():
            if isinstance(value, dict):
                result[key] = {**result.get(key, {}), **value}
            elif isinstance(value, list):
                result[key] = [*result.get(key, []), *(item for item in value if item not in result.get(key, []))]
                if key != "renames":
                    result[key].sort()
            else:
                result[key] = value
    return result


def table_text(version: str, rows: Mapping[str, dict[str, Any]], failures: Mapping[str, str]) -> str:
    """Return the table as YAML."""
    table = {"vllm": version, "architectures": dict(sorted(rows.items())), "failed": dict(sorted(failures.items()))}
    body = yaml.safe_dump(table, default_flow_style=None, sort_keys=False, width=120)
    return HEADER.format(version=version) + body


VERBOSE = bool(os.environ.get("VERBOSE"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, help="folders with a config.json and safetensors files")
    parser.add_argument("--output", type=Path, help="file to write (default: the table of this version)")
    parser.add_argument("--trace", type=Path, help="also write the module that each module on disk reaches, as JSON")
    arguments = parser.parse_args()
    builder = Builder()
    import vllm

    version = vllm.__version__.partition("+")[0]
    rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
    failures: dict[str, str] = {}
    traces: dict[str, dict[str, str]] = {}
    for folder in arguments.folders:
        start = time.perf_counter()
        try:
            for architecture, reading in read(builder, folder):
                rows[architecture].append(entry(reading))
                traces.setdefault(architecture, {}).update(reading.loads)
            sys.stderr.write(f"{folder.name}: {time.perf_counter() - start:.1f} s\n")
        except Exception as error:
            if VERBOSE:
                import traceback

                traceback.print_exc()
            reason = " ".join(str(error).split())[:200] or repr(error)
            failures[json.loads((folder / "config.json").read_text(encoding="utf-8"))["architectures"][0]] = reason
            sys.stderr.write(f"{folder.name}: FAILED {type(error).__name__}: {reason}\n")
    text = table_text(version, {name: merged(found) for name, found in rows.items()}, failures)
    output = arguments.output or LOADERS / f"vllm-{'.'.join(version.split('.')[:2])}.yaml"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(text, encoding="utf-8")
    if arguments.trace:
        arguments.trace.write_text(json.dumps(traces, indent=1, sort_keys=True), encoding="utf-8")


if __name__ == "__main__":
    main()
