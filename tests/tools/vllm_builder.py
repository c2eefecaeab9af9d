"""Build vLLM's classes of models without weights, as on an Instinct GPU, and record who asks for a quantization.

    model, recorder = Builder().build(builder.configure(folder))

Imported by `vllm_table` in vLLM's environment, where it lies beside the script; imports nothing of quantmint.
"""

from __future__ import annotations

import copy
import importlib.abc
import importlib.machinery
import sys
import tempfile
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import MagicMock


class _Stub(types.ModuleType):
    """A package that is not installed here, and of which building a class needs the names alone."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)


class _StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds stubs of packages that prepare images."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] != "torchvision":
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class Builder:
    """Builds classes of vLLM without weights, as on an MI355X. One for a process."""

    def __init__(self) -> None:
        import torch

        torch.set_num_threads(1)
        _stub_kernels()
        _pretend_rocm()
        import vllm.model_executor.layers.attention.mla_attention as latent_attention
        from vllm.config import VllmConfig, set_current_vllm_config
        from vllm.distributed import init_distributed_environment, initialize_model_parallel
        from vllm.model_executor.models import registry

        latent_attention.flash_attn_varlen_func = MagicMock(name="flash_attn_varlen_func")  # vLLM 0.19 looks for it
        sys.meta_path.append(_StubFinder())  # after transformers has noted what is absent
        _stub_processors()
        registry._run_in_subprocess = lambda function: function()  # saves an import of vLLM for each class
        with suppress(ImportError):
            from vllm.v1.worker.workspace import init_workspace_manager

            init_workspace_manager(torch.device("meta"))
        with tempfile.TemporaryDirectory() as folder, set_current_vllm_config(VllmConfig()):
            init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
            initialize_model_parallel(1, 1)

    def configure(self, folder: Path) -> Any:
        """Return the VllmConfig for a folder's config.json."""
        from vllm.config import DeviceConfig, ModelConfig, VllmConfig

        model = ModelConfig(
            model=str(folder),
            tokenizer=str(folder),
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=64,
            enforce_eager=True,
        )
        return VllmConfig(model_config=model, device_config=DeviceConfig("cpu"))

    def build(self, config: Any, layout: str = "compressed-tensors") -> tuple[Any, Any]:
        """Return the model of a VllmConfig on the meta device, and its recorder, which passes for one of ``layout``."""
        return self._initialize(config, None, {}, layout)

    def build_drafter(self, config: Any, packed: Mapping[str, list[str]]) -> tuple[str, Any, Any] | None:
        """Return name, model and recorder of the class for multi-token prediction; None where a model has none."""
        from vllm.config import DeviceConfig, ParallelConfig, SpeculativeConfig, VllmConfig

        target = config.model_config
        override = SpeculativeConfig.hf_config_override(copy.deepcopy(target.hf_config))
        if override.architectures == target.hf_config.architectures:
            return None
        speculative = SpeculativeConfig(
            method="mtp", num_speculative_tokens=1, target_model_config=target, target_parallel_config=ParallelConfig()
        )
        drafting = VllmConfig(model_config=target, device_config=DeviceConfig("cpu"), speculative_config=speculative)
        draft = speculative.draft_model_config
        return (draft.hf_config.architectures[0], *self._initialize(drafting, draft, packed, "compressed-tensors"))

    def _initialize(
        self, config: Any, model_config: Any, packed: Mapping[str, list[str]], layout: str
    ) -> tuple[Any, Any]:
        from vllm.model_executor.model_loader.utils import initialize_model

        for device in ("meta", "cpu"):  # some compute with their weights while they are built
            config.compilation_config.static_forward_context.clear()
            recorder = config.quant_config = _recorder(layout)
            recorder.packed_modules_mapping.update(packed)  # a drafter shares its target's quantization
            try:
                with tensors_on(device):
                    return initialize_model(config, model_config=model_config), recorder
            except (NotImplementedError, RuntimeError) as error:
                if device == "cpu" or "meta" not in str(error):
                    raise
        raise AssertionError("unreachable")


@contextmanager
def tensors_on(device: str) -> Iterator[None]:
    """Create tensors in bfloat16 on ``device``, also where vLLM names another."""
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
    """Let vLLM find an Instinct GPU: it has classes of its own for AMD."""
    import torch

    torch.cuda.get_device_properties = lambda *_: MagicMock(
        gcnArchName="gfx950", multi_processor_count=256, total_memory=2**38
    )
    torch.cuda.get_device_capability = lambda *_: (9, 5)
    torch.cuda.get_device_name = lambda *_: "AMD Instinct MI355X"
    torch.cuda.device_count = lambda: 1
    torch.cuda.is_available = lambda: True
    torch.cuda.current_device = lambda: 0
    torch.cuda.set_device = lambda *_: None
    torch.cuda.Event = torch.cuda.Stream = MagicMock
    torch.accelerator.empty_cache = lambda: None
    # The platform imports the kernels of the CPU build that is for AVX-512, which ends a process on other processors.
    sys.modules["vllm._C"] = _Stub("vllm._C")
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
    """Stand in for the kernels of vLLM's ROCm build, which classes look up while they are built."""
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
        with suppress(RuntimeError):  # the operator does not exist here
            register(operator, function, **options)
        return function

    torch._ops._OpNamespace.__getattr__, torch.library.register_fake = kernel, register_fake


def _stub_processors() -> None:
    """Build classes without the processor of images or sound that some of them load."""
    import transformers
    from transformers.models.pixtral import modeling_pixtral

    def from_pretrained(*_: Any, **__: Any) -> Any:
        processor = MagicMock()
        processor.__class__ = transformers.ProcessorMixin
        return processor

    for name in ("AutoImageProcessor", "AutoFeatureExtractor", "AutoProcessor", "AutoVideoProcessor"):
        getattr(transformers, name).from_pretrained = from_pretrained
    for name in ("PixtralRotaryEmbedding", "position_ids_in_meshgrid"):  # vLLM 0.19 imports them
        if not hasattr(modeling_pixtral, name):
            setattr(modeling_pixtral, name, MagicMock(name=name))


def _recorder(layout: str) -> Any:
    """Return a quantization that records which modules ask it for a method, and quantizes none.

    To `isinstance` it is that of a layout: some classes leave their tower in 16 bit, or rename it, for one of them.
    """
    import torch
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.quantization import get_quantization_config
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

    kind = get_quantization_config(layout)

    class Recorder(QuantizationConfig):
        __class__ = property(lambda self: kind)

        def __init__(self) -> None:
            QuantizationConfig.__init__(self)
            self.quant_config = {"exclude": [], "global_quant_config": {}}
            self.prefixes: dict[int, str] = {}
            self.layers: list[Any] = []  # an id is unique among living objects alone
            self.mappers: list[Any] = []

        def get_name(self) -> Any:
            return layout

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

        def get_scheme_dict(self, *_: Any, **__: Any) -> None:
            return None

        def get_layer_quant_config_from_name(self, name: str) -> None:
            return None

        def _is_w_ocp_mx_a_x(self, *_: Any) -> bool:
            return False

        def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
            self.mappers.append(hf_to_vllm_mapper)

        def get_quant_method(self, layer: Any, prefix: str) -> Any:
            self.prefixes[id(layer)] = prefix
            self.layers.append(layer)
            linear = any(base.__name__ == "LinearBase" for base in type(layer).__mro__)  # versions move the class
            return UnquantizedLinearMethod() if linear else None

    return Recorder()
