"""What is submitted in the tests: recipes with options, and the place that each is for."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pipeline.recipe.load import load_recipe
from pipeline.serving.render.comments import dump
from pipeline.submit import job, ray, sbatch
from pipeline.submit.mounts import Mount, Needs
from pipeline.submit.pod import Claim, Reference
from pipeline.submit.pod_template import read_template
from pipeline.submit.task import Task, task_for

FOLDER = Path("/shared/models")
LOGS = FOLDER / "store/logs/slurm"
VENV = "/shared/quantmint env"
TEMPLATE = Path(__file__).parent / "templates/pod.yaml"
IMAGE = "registry.example/quantmint@sha256:" + "5" * 64


def task(recipe: str, **options: Any) -> Task:
    return task_for(load_recipe(recipe).recipe, recipe, **{"store": "store", **options})


def script(of: Task, **options: Any) -> str:
    return sbatch.script(of, sbatch.Options(**options), folder=FOLDER, logs=LOGS)


def _manifest(of: Task, **options: Any) -> str:
    return dump(job.manifest(of, job.Options(**{"image": IMAGE, "claims": (Claim("shared"),), **options})))


def _entry(of: Task, **options: Any) -> str:
    return json.dumps(ray.description(of, ray.Options(folder=FOLDER, venv=VENV, **options)), indent=1) + "\n"


GOLDEN: Mapping[str, Callable[[], str]] = MappingProxyType(
    {
        "cpu.sh": lambda: script(task("tiny-ptpc-fp8kv", arguments=("--until", "inspect")), venv=VENV),
        "node.sh": lambda: script(
            task("llama70b-fp8kv", cpus=64, memory_gb=900, seconds=8 * 3600.0),
            venv=VENV,
            partition="mi300x",
            account="models",
            qos="normal",
            constraint="xgmi&nvme",
            sbatch={"mail-type": "END", "comment": "it's ours; $(really)"},
            setup=("module load rocm/6.4", "source '/opt/my env/activate'", "echo $(whoami)"),
        ),
        "several.sh": lambda: script(task("llama405b-fp8kv", gpus=16, store="/big/store"), venv=VENV, gres=None),
        "pyxis.sh": lambda: script(
            task("llama70b-fp8kv", store="/big/store"), container=IMAGE, gres="gpu:mi300x:8", setup=()
        ),
        "apptainer.sh": lambda: script(task("llama70b-ptpc", gpus=1), container="/images/quantmint.sif"),
        "mounts.sh": lambda: script(
            task("llama70b-fp8kv"),
            container=IMAGE,
            mounts=(Mount("/nvme", "/shared/models/scratch"),),
            needs=Needs((Path("/data/llama"),), (Path("/out"), Path("/hf")), {"HF_HOME": "/hf"}),
        ),
        "cpu.yaml": lambda: _manifest(task("tiny-ptpc-fp8kv", cpus=8, memory_gb=16)),
        "node.yaml": lambda: _manifest(
            task("llama70b-fp8kv", seconds=8 * 3600.0),
            claims=(Claim("shared", "/models"), Claim("cache", "/cache")),
            folder="/models/team",
            secrets=(Reference("HF_TOKEN", "hub", "token"),),
            variables={"HF_HOME": "/cache/hf", "NOTE": "$(HOME) stays"},
            selector={"amd.com/gpu.product-name": "MI300X"},
        ),
        "tag.yaml": lambda: _manifest(task("llama70b-ptpc", gpus=0), image="quantmint:latest"),
        "template.yaml": lambda: _manifest(task("llama70b-fp8kv"), template=read_template(TEMPLATE)),
        "node.json": lambda: _entry(task("llama70b-fp8kv", cpus=32, memory_gb=200), variables={"HF_HOME": "/cache"}),
        "several.json": lambda: _entry(task("llama405b-fp8kv", gpus=16)),
    }
)

if __name__ == "__main__":  # writes the files that the tests hold it against
    for name, text in GOLDEN.items():
        (Path(__file__).parent / "golden" / name).write_text(text(), encoding="utf-8")
