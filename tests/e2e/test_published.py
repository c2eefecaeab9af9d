"""What went to the Hub is what others serve: published, fetched as a vLLM by the repository's name does, and asked."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("huggingface_hub")

from quantmint.pipeline.base.progress import PlainReporter
from quantmint.pipeline.publish.hub.destination import HubDestination
from quantmint.pipeline.serving.environment import find_vllm
from tests.hub.standin import HubStandIn
from tests.publish import conftest as publishing
from tests.publish.conftest import MakeRelease
from tests.serving.served.cases import PUBLISHED
from tests.serving.served.proof import prove

# The one real vLLM of the fast tests.
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900), pytest.mark.usefixtures("kernels")]

make_release = publishing.make_release
REPO = "my-org/tiny-ptpc-fp8kv"
CARD = b"---\nlicense: apache-2.0\nlibrary_name: vllm\n---\n# tiny\n"
# The client of vLLM's environment, which need not be ours: it fetches what `vllm serve my-org/name` would.
FETCH = "import sys, huggingface_hub; print(huggingface_hub.snapshot_download(sys.argv[1], revision=sys.argv[2]))"


@pytest.mark.slow
def test_it_answers_as_the_bytes_mean_that_were_published(
    vllm: Path, hub: HubStandIn, make_release: MakeRelease, tmp_path: Path
) -> None:
    hub.part = 2**20  # so that a tiny shard goes up in parts, as a large one does

    def by_way_of_the_hub(checkpoint: Path) -> Path:
        made = {path.name: path.read_bytes() for path in checkpoint.iterdir() if path.is_file()}
        release = make_release("tiny", files={**made, "README.md": CARD})
        published = HubDestination(REPO).publish(release, candidate=False, progress=PlainReporter())
        assert hub.sent("PUT", "/storage-part/"), "the shard did not go up in parts"
        fetched = Path(_fetch(vllm, published.tag))
        assert fetched.name == published.revision
        assert fetched.is_relative_to(os.environ["HF_HOME"])
        assert {name: (fetched / name).read_bytes() for name in made} == made
        return fetched

    found = prove(PUBLISHED, tmp_path, find_vllm(vllm), "cpu", carried=by_way_of_the_hub)
    if PUBLISHED.kv_cache == "fp8":  # nearer to its own scales than to scales of 1.0, to K's and V's exchanged, to none
        assert {"KV scales of 1.0", "KV scales exchanged", "the cache in 16 bit"} <= found.others.keys()


def _fetch(vllm: Path, tag: str) -> str:
    command = [vllm.parent / "python", "-c", FETCH, REPO, tag]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()
