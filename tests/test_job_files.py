"""`syncline cluster file`: files that their schedulers' own schemas accept, whose commands really train; refusals."""

from __future__ import annotations

import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from conftest import SYNCLINE, Cli, cli_environment
from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob
from test_cli import assert_refused

from syncline.launcher.emulation import EmulatedCluster
from syncline.launcher.job_files import TEMPLATES, Job, job_file

pytestmark = pytest.mark.timeout(120)

TOKEN = "0123456789abcdef"
SMALL = 'model = "mlp"\ndata = "synthetic"\nsteps = 2\nglobal_batch = 16\nevaluate = false\n'
PLANS = {
    "plain": f"# my plan\n{SMALL}workers = 4",
    "empty": "",
    "indented": f'  workers = 4\n\t{SMALL}[optimizer]\n\tlearning_rate = 0.5\n\n\n# "quoted": {{x}} $HOME `id`\n',
    "strange": f"{SMALL}# a line that YAML would break here: \u2028 and the end:\n# END_OF_PLAN\n",
}
OF_KUBERNETES = ["kubernetes", "kubeflow"]


@pytest.fixture(params=PLANS)
def plan(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "plan.toml"
    path.write_text(PLANS[request.param])
    return path


def documents(kind: str, path: Path, **about: Any) -> dict[str, Any]:
    """The parts of a file by kind."""
    text = job_file(kind, path, Job(token=TOKEN, **about))
    return {document["kind"]: document for document in yaml.safe_load_all(text)}


@pytest.mark.parametrize("kind", TEMPLATES)
def test_file_is_the_same_each_time_but_for_its_token(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path("plan.toml")
    path.write_text(SMALL)
    files = [job_file(kind, path, Job()) for _ in range(2)]
    secret = re.compile(r'token: "([0-9a-f]{32})"')
    assert secret.sub("", files[0]) == secret.sub("", files[1])
    assert (files[0] != files[1]) == (kind in OF_KUBERNETES)
    assert [line for line in files[0].splitlines() if len(line) > 80] == []


@pytest.mark.parametrize(("name", "volume"), [("syncline", None), ("on", "shared")])
@pytest.mark.parametrize("kind", OF_KUBERNETES)
def test_parts_of_kubernetes_hold_against_its_schemas(kind: str, plan: Path, name: str, volume: str | None) -> None:
    parts = documents(kind, plan, nodes=4, name=name, volume=volume, workers_per_host=2)
    job = parts.pop("TrainJob", None)
    for part in parts.values():
        for version in ("1.29", "1.37"):
            kubernetes_validate.validate(part, version, strict=True)
    assert tomllib.loads(parts["ConfigMap"]["data"]["plan.toml"]) == tomllib.loads(plan.read_text())
    assert parts["Secret"]["stringData"] == {"token": TOKEN}
    assert {part["metadata"]["name"] for part in parts.values()} <= {name, f"{name}-plan", f"{name}-token"}
    if kind == "kubeflow":
        checked = TrainerV1alpha1TrainJob.from_dict(job)
        assert checked is not None
        assert checked.to_dict() == job, "what the models do not know, they drop without a word"
        assert "numProcPerNode" not in str(job)
    assert ("shared" in str(parts | {"job": job})) == (volume is not None)


def test_strict_validation_refuses_an_unknown_key(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(SMALL)
    job = documents("kubernetes", tmp_path / "plan.toml")["Job"]
    job["spec"]["template"]["spec"]["hostname_"] = "x"
    with pytest.raises(kubernetes_validate.ValidationError, match="hostname_"):
        kubernetes_validate.validate(job, "1.37", strict=True)


@pytest.mark.parametrize(("restarts", "volume", "limit"), [(0, "runs", 0), (3, "runs", 3), (3, None, 0)])
def test_pods_are_replaced_only_where_their_checkpoints_stay(
    tmp_path: Path, restarts: int, volume: str | None, limit: int
) -> None:
    (tmp_path / "plan.toml").write_text(f"{SMALL}max_restarts = {restarts}\n")
    spec = documents("kubernetes", tmp_path / "plan.toml", volume=volume)["Job"]["spec"]
    assert spec["backoffLimit"] == limit
    assert (spec["completions"], spec["parallelism"], spec["completionMode"]) == (2, 2, "Indexed")


def test_task_holds_against_the_schema_of_skypilot(plan: Path) -> None:
    schemas = pytest.importorskip("sky.utils.schemas", reason="skypilot is not installed")
    import jsonschema

    task = yaml.safe_load(job_file("skypilot", plan, Job(image="registry.example/syncline:1")))
    jsonschema.validate(task, schemas.get_task_schema())
    jsonschema.validate(task["resources"], schemas.get_resources_schema())


@pytest.fixture(scope="module")
def hosts() -> Iterator[EmulatedCluster]:
    with EmulatedCluster(2, [1e9, 1e9]) as two:
        yield two


def command_of(kind: str, path: Path, folder: Path) -> tuple[str, dict[str, str]]:
    """What a node of the file runs, and what its scheduler would tell node {node}; names are those of the hosts."""
    if kind == "skypilot":
        task = yaml.safe_load(job_file(kind, path, Job(workers_per_host=1)))
        addresses = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_NODES": "2"}
        return task["run"], {**addresses, "SKYPILOT_NODE_RANK": "{node}", "SYNCLINE_TOKEN": TOKEN}
    parts = documents(kind, path, workers_per_host=1)
    told = {"SYNCLINE_TOKEN": parts["Secret"]["stringData"]["token"]}
    if kind == "kubeflow":
        (script,) = parts["TrainJob"]["spec"]["trainer"]["args"]
        told |= {"SYNCLINE_PLAN": parts["ConfigMap"]["data"]["plan.toml"], "PET_NODE_RANK": "{node}"}
        return script.replace("/work", str(folder)), {**told, "PET_MASTER_ADDR": "host0", "PET_MASTER_PORT": "29400"}
    (container,) = parts["Job"]["spec"]["template"]["spec"]["containers"]
    script = container["args"][0].replace("syncline-0.syncline", "host0").replace("/plan/plan.toml", str(path))
    return script, {**told, "JOB_COMPLETION_INDEX": "{node}"}


@pytest.mark.parametrize("kind", [*OF_KUBERNETES, "skypilot"])
def test_commands_of_a_file_train_on_two_hosts(kind: str, hosts: EmulatedCluster, tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(PLANS["strange"])
    nodes = []
    for node in range(2):
        folder = tmp_path / f"node{node}"  # nothing is shared between them
        folder.mkdir()
        script, told = command_of(kind, tmp_path / "plan.toml", folder)
        told = {name: text.replace("{node}", str(node)) for name, text in told.items()}
        path = f"{SYNCLINE.parent}:/usr/bin:/bin"
        with (folder / "output").open("wb") as output:
            streams = {"stdout": output, "stderr": subprocess.STDOUT}
            environment = cli_environment(PATH=path, **told)
            nodes.append(hosts.popen(node, ["sh", "-c", script], cwd=folder, env=environment, **streams))
    codes = [node.wait(90) for node in nodes]
    said = (tmp_path / "node0" / "output").read_text()
    assert codes == [0, 0], said
    assert "2 nodes have joined" in said
    assert "mlp, ddp, 2 x 1 thread" in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["slurn"], ["'slurn'", "Did you mean 'slurm'?", *TEMPLATES]),
        (["slurm", "--plan", "nowhere.toml"], ["nowhere.toml", "No such file"]),
        (["slurm", "--nodes", "0"], ["--nodes 0"]),
        (["slurm", "--nodes", "3"], ["workers 2", "hosts 3"]),
        (["slurm", "--hours", "0"], ["--hours 0", "time limit"]),
        (["slurm", "--hours", "nan"], ["--hours nan"]),
        (["slurm", "--image", "x"], ["--image", "kubernetes, kubeflow, skypilot"]),
        (["skypilot", "--volume", "x"], ["--volume", "kubernetes, kubeflow"]),
        (["kubernetes", "--name", "My_job"], ["--name 'My_job'", "small letters"]),
        (["kubernetes", "--image", "a b"], ["--image 'a b'", "registry/name:tag"]),
        (["kubernetes", "--nodes", "2", "--workers-per-host", "9"], ["global_batch 16", "workers 18"]),
    ],
)
def test_bad_input_gets_one_line(cli: Cli, tmp_path: Path, arguments: list[str], words: list[str]) -> None:
    (tmp_path / "work" / "plan.toml").write_text(f"{SMALL}workers = 2\n")
    done = cli("cluster", "file", *arguments)
    assert_refused(done, *words)
    assert done.stdout == ""
