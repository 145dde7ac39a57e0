"""The files of examples/cluster: checked, and started as on two hosts, on this one. `make lint` reads the scripts."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from run_folder import read_metrics
from tests.examples.conftest import EXAMPLES
from tests.helpers.free_port import free_port

CLUSTER = EXAMPLES / "cluster"
TINY = ["--steps", "4", "--batch", "8", "--seq", "16", "--layers", "2", "--save-every", "2", "--eval-every", "4"]


def test_kubernetes_accepts_the_job() -> None:
    pytest.importorskip("kubernetes_validate")
    import kubernetes_validate
    import yaml

    kinds: dict[str, Any] = {}
    for each in yaml.safe_load_all((CLUSTER / "kubernetes.yaml").read_text()):
        kubernetes_validate.validate(each, "1.30", strict=True)
        kinds[each["kind"]] = each
    job, service = kinds["Job"]["spec"], kinds["Service"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    variables = {each["name"]: each["value"] for each in container["env"]}
    # The address of the first pod, as many pods as hosts, as many GPUs as processes, and scripts that exist.
    assert service["spec"]["selector"] == {"job-name": kinds["Job"]["metadata"]["name"]}
    assert pod["subdomain"] == service["metadata"]["name"]
    assert variables["HEAD"] == f"{kinds['Job']['metadata']['name']}-0.{service['metadata']['name']}"
    assert int(variables["HOSTS"]) == job["completions"] == job["parallelism"]
    assert int(variables["GPUS"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    assert all((EXAMPLES.parent / path).is_file() for path in container["command"][:2])


def start(run: Path, *arguments: str, port: int) -> None:
    """Start the script as two hosts would, with two processes each, and wait for both."""
    settings = {"HEAD": "127.0.0.1", "HOSTS": "2", "GPUS": "2", "PORT": str(port), "RUN": str(run)}
    environment = {**os.environ, **settings, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    command = [str(CLUSTER / "torchrun.sh"), str(EXAMPLES / "train.py"), *TINY, *arguments]
    hosts = [subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    for host in hosts:
        _, errors = host.communicate(timeout=240)
        assert host.returncode == 0, errors


@pytest.mark.slow
def test_two_hosts_train_and_go_on(tmp_path: Path) -> None:
    run = tmp_path / "run"
    start(run, port=free_port())
    assert [each["step"] for each in read_metrics(run, "train")][-1] == 4
    start(run, "--steps", "6", port=free_port())
    assert (run / "checkpoints" / "step_000006").is_dir()
