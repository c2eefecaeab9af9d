"""The layout's endpoint with a real vLLM on the CPU: tensor parallelism of two, sound and with a transposed shard.

A CPU is planned with one process, so the launch of two is the plan's with two arguments more.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

from quantmint.eval.layout import LayoutPolicy, compare, judge
from quantmint.eval.verdict import Verdict
from quantmint.pipeline.base.progress import PlainReporter
from quantmint.pipeline.recipe.load import recipe_of
from quantmint.pipeline.recipe.sections import LayoutGate
from quantmint.pipeline.runs.session import open_setting
from quantmint.pipeline.serving.environment import VllmEnvironment
from quantmint.pipeline.serving.plan import LaunchPlan, ParallelLayout
from quantmint.pipeline.serving.running.launchers import LocalLauncher
from quantmint.pipeline.serving.running.server import RunningServer
from quantmint.pipeline.stages import layout as stage
from quantmint.pipeline.stages.canary import tokenized
from quantmint.pipeline.stages.serve import single_plan
from quantmint.pipeline.stages.setting import Setting
from quantmint.pipeline.stages.stage import Job
from quantmint.pipeline.store.tree import Store
from tests.trap.checkpoints import CALIBRATION, SOUND, Workshop
from tests.trap.shard import wrap

_TEXTS = 8
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""One thread for each process; automatic binding to NUMA nodes would refuse two of them."""
BASE = SOUND[0]
"""The checkpoint that is served."""


@dataclass(frozen=True)
class Layouts:
    """A checkpoint on one running server; `verdict` starts another one on two processes beside it."""

    setting: Setting
    checkpoint: Path
    single: RunningServer
    vllm: Path
    folder: Path

    def verdict(self, *, is_broken: bool) -> tuple[Verdict, str]:
        """Return the endpoint's verdict and reason; with ``is_broken`` a shard of rank 1 is transposed."""
        command = wrap(self.vllm, self.folder / "shard") if is_broken else self.vllm
        work = self.folder / ("broken" if is_broken else "sound")
        work.mkdir()
        plan = _doubled(single_plan(self.setting, self.checkpoint))
        with LocalLauncher(command).launch(plan, work / "tp2.log", startup_timeout=600) as server:

            @contextmanager
            def fresh(side: str, plan: LaunchPlan, log: Path) -> Iterator[RunningServer]:
                yield self.single

            servers = SimpleNamespace(get=lambda side, plan: server, fresh=fresh)
            inputs = {"model": SimpleNamespace(stage="quantize", path=self.folder)}
            job = Job(self.setting, work, inputs, PlainReporter(), servers)  # type: ignore[arg-type]
            with (
                patch.object(stage, "launch_plan", lambda *_: plan),
                patch.object(stage, "model_folder", lambda _: self.checkpoint),
                patch.object(stage, "tokenized", lambda *arguments: tokenized(*arguments)[:_TEXTS]),
            ):
                stage.LayoutStage().run(job)
        return judge(compare(stage.read_layout(work)), LayoutPolicy(LayoutGate().max))


@contextmanager
def layouts(workshop: Workshop, vllm: VllmEnvironment) -> Iterator[Layouts]:
    """Yield the sound checkpoint with one server that answers for it on a single process."""
    checkpoint, folder = workshop.checkpoint(BASE), workshop.folder / "layouts"
    folder.mkdir()
    sections = {
        "source": {"folder": str(workshop.source(BASE.source))},
        "quantization": {"scheme": BASE.scheme, "format": BASE.layout, "kv_cache": BASE.kv_cache},
        "calibration": CALIBRATION,
        "target": {"hardware": "cpu", "workload": "tiny", "max_model_len": 512},
        "evaluation": {"suite": "tiny"},
    }
    setting = open_setting(recipe_of(sections), store=Store(folder / "store"), vllm=str(vllm.executable))
    plan = single_plan(setting, checkpoint)
    plan = replace(plan, env={**plan.env, **_ENVIRONMENT})  # of all servers, so that they are forks of one process
    with LocalLauncher(vllm.executable).launch(plan, folder / "tp1.log", startup_timeout=600) as single:
        yield Layouts(setting, checkpoint, single, vllm.executable, folder)


def _doubled(plan: LaunchPlan) -> LaunchPlan:
    """Return the plan on two processes."""
    return replace(
        plan,
        env={**plan.env, **_ENVIRONMENT},
        argv=(*plan.argv, "--tensor-parallel-size", "2"),
        layout=ParallelLayout(2),
        tensor_parallel_size=2,
    )
