"""What is submitted in the tests: recipes with options, and the place that each is for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

from quantmint.pipeline.clusters.submit import slurm as slurm_script
from quantmint.pipeline.clusters.submit.job import JobRequest, request_job
from quantmint.pipeline.clusters.submit.pod import Pod, SecretVariable, VolumeClaim, job_manifest, read_template
from quantmint.pipeline.recipe.load import load_recipe
from quantmint.pipeline.serving.render.manifest import dump

FOLDER = Path("/shared/models")
LOGS = FOLDER / "store/logs/slurm"
VENV = "/shared/quantmint env"
TEMPLATE = Path(__file__).parent / "templates/pod.yaml"
IMAGE = "registry.example/quantmint@sha256:" + "5" * 64


def task(recipe: str, **options: Any) -> JobRequest:
    return request_job(load_recipe(recipe).recipe, recipe, **{"store": "store", **options})


def script(of: JobRequest, **options: Any) -> str:
    with patch("sys.executable", f"{VENV}/bin/python"):
        return slurm_script.script(of, slurm_script.SlurmOptions(**options), folder=FOLDER, logs=LOGS)


def _manifest(of: JobRequest, **options: Any) -> str:
    return dump(job_manifest(of, Pod(**{"image": IMAGE, "claims": (VolumeClaim("shared"),), **options})))


GOLDEN: Mapping[str, Callable[[], str]] = MappingProxyType(
    {
        "node.sh": lambda: script(
            task("llama70b-fp8kv", cpus=64, memory_gb=900, seconds=8 * 3600.0),
            partition="mi300x",
            sbatch={"account": "models", "constraint": "xgmi&nvme", "comment": "it's ours; $(really)"},
            setup=("module load rocm/6.4", "source '/opt/my env/activate'", "echo $(whoami)"),
        ),
        "several.sh": lambda: script(task("llama405b-fp8kv", gpus=16, store="/big/store")),
        "pyxis.sh": lambda: script(
            task("llama70b-fp8kv", store="/big/store"), container=IMAGE, sbatch={"gres": "gpu:mi300x:8"}, setup=()
        ),
        "apptainer.sh": lambda: script(
            task("llama70b-ptpc", gpus=1),
            container="/images/quantmint.sif",
            mounts=("/nvme:/shared/models/scratch",),
            hub=Path("/hf"),
        ),
        "template.yaml": lambda: _manifest(
            task("llama70b-fp8kv", seconds=8 * 3600.0),
            claims=(VolumeClaim("shared", "/work"), VolumeClaim("more", "/more")),
            folder="/work/team",
            secrets=(SecretVariable("HF_TOKEN", "hub", "token"),),
            variables={"NOTE": "$(HOME) stays"},
            template=read_template(TEMPLATE),
        ),
    }
)

if __name__ == "__main__":  # writes the files that the tests hold it against
    for name, text in GOLDEN.items():
        (Path(__file__).parent / "golden" / name).write_text(text(), encoding="utf-8")
