"""The environment of a server: little of ours, the plan's variables, no secret.

A variable that leaks in from a shell (``VLLM_...``, ``OMP_NUM_THREADS``) would change a measurement without changing
its fingerprint. So only names that locate things pass; what tunes comes from the plan. The model is a local folder:
the server needs no token, and is told not to look at the network.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

#: Who and where we are; libraries; which devices are ours; where compiled kernels are kept; which network to use.
_PASSED = re.compile(
    r"""
    PATH | HOME | USER | LOGNAME | LANG | LANGUAGE | LC_\w+ | TZ | TMPDIR | LD_LIBRARY_PATH | PYTHONPATH
    | ROCM_PATH | ROCM_HOME | HIP_PATH | CUDA_HOME | CUDA_PATH | PYTORCH_ROCM_ARCH
    | (CUDA|HIP|ROCR|NVIDIA)_VISIBLE_DEVICES | NVIDIA_DRIVER_CAPABILITIES
    | XDG_CACHE_HOME | VLLM_CACHE_ROOT | TORCHINDUCTOR_CACHE_DIR | TRITON_CACHE_DIR | AITER_JIT_DIR
    | MIOPEN_USER_DB_PATH | HF_HOME | HF_MODULES_CACHE | NCCL_SOCKET_IFNAME | GLOO_SOCKET_IFNAME
    """,
    re.VERBOSE,
)
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
"""What keeps a server from looking at the network, and from telling others."""
#: A last guard, on the plan's variables as well: a server of a local folder has no use for any of these.
SECRET = re.compile(r"TOKEN(?!IZER)|SECRET|PASSW|CREDENTIAL|API_?KEY|ACCESS_?KEY", re.IGNORECASE)


def child_environment(ours: Mapping[str, str], planned: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the server's process: those of ``ours`` that locate things, then ``planned``."""
    passed = {name: value for name, value in ours.items() if _PASSED.fullmatch(name)}
    return {name: value for name, value in (passed | dict(planned) | OFFLINE).items() if not SECRET.search(name)}
