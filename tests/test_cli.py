"""The command line: its words, what it refuses and how, and what it prints for programs."""

from __future__ import annotations

import json
import pickle
import re
import socket
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Cli

from syncline.jobs import SENDING
from syncline.methods import METHODS
from syncline.plan import parse_plan

PLACE = (
    "--hosts",
    "--workers-per-host",
    "--link",
    "--nodes",
    "--node-rank",
    "--rendezvous",
    "--token-file",
    "--join-timeout",
)
ENGINE = ("--engine", "--address", "--master")
VERBS = {
    "train": [
        *("--model", "--data", "--data-dir", "--method", "--workers", "--threads", "--global-batch", "--steps"),
        *("--epochs", "--recipe", "--optimizer", "--clip-norm", "--precision", "--seed", "--compute", "--set"),
        *("--eval-per-rank", "--profile", "--run-dir"),
        *("--resume", "--max-restarts", *PLACE, "--port", *ENGINE, "--print-plan", "--json", "--help"),
    ],
    "compare": [
        *("--methods", "--model", "--data", "--data-dir", "--workers", "--threads", "--global-batch", "--steps"),
        *("--warmup", "--optimizer", "--clip-norm", "--precision", "--seed", "--compute", "--set", "--run-dir"),
        *(*PLACE, "--port", *ENGINE, "--when-busy", "--json", "--help"),
    ],
    "verify": [
        *(
            "--workers",
            "--methods",
            "--models",
            "--transfer-dtype",
            "--batch-norm",
            "--precision",
            "--threads",
            "--seed",
        ),
        *("--hosts", "--link", "--port", *ENGINE, "--json", "--help"),
    ],
    "explain": ["--step", "--method", "--probe", "--json", "--help"],
    "probe": [
        *("--workers", "--backend", "--sizes", "--repeats", "--threads", "--run-dir", *PLACE, "--port"),
        *(*ENGINE, "--json", "--help"),
    ],
    "trace": ["--output", "--method", "--steps", "--help"],
    "lab": [
        *("--quick", "--hosts", "--link", "--loopback", "--no-answers", "--out", "--fresh", "--set", *ENGINE),
        *("--when-busy", "--print", "--check", "--sheet", "--grade", "--reference", "--help"),
    ],
    "scale": [
        *("--method", "--workers", "--strong", "--model", "--data", "--batch", "--threads", "--steps", "--hosts"),
        *("--link", "--set", "--out", "--when-busy", "--help"),
    ],
    "report": ["--out", "--no-answers", "--help"],
    "launch": ["--workers", "--threads", "--log-dir", "--all-ranks", "--port", "--help"],
    "methods": ["--json", "--help"],
    "models": ["--json", "--help"],
    "schedule": ["--workers", "--output", "--help"],
    "runs": ["--root", "--json", "--help"],
    "data": ["--data-dir", "--help"],
    "doctor": [
        *("--rendezvous", "--nodes", "--node-rank", "--token-file", "--wait", "--when-busy", "--folder", "--json"),
        "--help",
    ],
    "cluster": ["--help"],
}
SMALL = ("--model", "mlp", "--data", "synthetic", "--set", "evaluate=false")


def listed(text: str, heading: str) -> list[str]:
    """The name of each entry under a heading of a help text, the long one where there are two."""
    section = text.partition(f"{heading}:\n")[2].partition("\n\n")[0]
    return re.findall(r"^  (?:-\w, )?(\S+)", section, re.MULTILINE)


def test_program_help_names_the_verbs(cli: Cli) -> None:
    done = cli("--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert listed(done.stdout, "Commands") == list(VERBS)
    assert listed(done.stdout, "Options") == ["--version", "--help"]


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_each_verb_names_its_options(verb: str, cli: Cli) -> None:
    done = cli(verb, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert listed(done.stdout, "Options") == VERBS[verb]


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["methods"], ["train", "--method", "x"]])
def test_quick_answers_load_neither_torch_nor_frames(arguments: list[str], tmp_path: Path) -> None:
    code = (
        f"import sys; sys.argv = ['syncline', *{arguments}]; from syncline.cli import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\nsys.exit(bool({'torch', 'polars'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_help_of_cluster_names_its_verbs_and_those_of_file_its_options(cli: Cli) -> None:
    assert listed(cli("cluster", "--help").stdout, "Commands") == ["run", "file"]
    done = cli("cluster", "file", "--help")
    options = ("--plan", "--nodes", "--workers-per-host", "--cpus", "--hours", "--name", "--image", "--volume")
    assert (done.returncode, listed(done.stdout, "Options")) == (0, [*options, "--help"])


def test_methods_are_listed_for_people_and_programs(cli: Cli) -> None:
    assert [line.split()[0] for line in cli("methods").stdout.splitlines()] == list(METHODS)
    assert json.loads(cli("methods", "--json").stdout) == {name: row.about for name, row in METHODS.items()}


def assert_refused(done: subprocess.CompletedProcess[str], *words: str) -> None:
    """Exit code 2 and one line on stderr, which holds all the words."""
    assert done.returncode == 2, done.stderr
    told = re.sub(r"^Warning: load [^\n]+\n", "", done.stderr)  # the machine may be busy
    assert re.fullmatch(r"syncline: [^\n]+\n", told), done.stderr
    assert [word for word in words if word not in done.stderr] == [], done.stderr


def assert_nothing_written(folder: Path) -> None:
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--set", "modle=cnn"], ["'modle'", "Did you mean 'model'?", "Choose one of"]),
        (["--set", "optimizer.learning_rat=1"], ["'optimizer.learning_rat'", "'optimizer.learning_rate'"]),
        (["--set", "seed"], ["--set", "KEY=VALUE"]),
        (["--set", "optimizer.learning_rate=fast"], ["optimizer.learning_rate", "'fast'"]),
        (["--method", "dpp"], ["'dpp'", "Did you mean 'ddp'?", *METHODS]),
        (["--model", "vg11"], ["'vg11'", "Did you mean 'vgg11'?", "cnn", "mlp", "module:callable"]),
        (["--data", "imagenet"], ["'imagenet'", "cifar10"]),
        (["--workers", "0"], ["workers", "0"]),
        (["--workers", "4", "--global-batch", "3"], ["global_batch 3", "workers 4"]),
        (["--steps", "3", "--epochs", "1"], ["steps", "epochs", "contradict"]),
        (["--method", "single", "--workers", "2"], ["single", "workers"]),
        (["missing.toml"], ["missing.toml", "No such file"]),
        (["--resume"], ["no train run"]),
        (["--resume", "missing"], ["missing", "not a run folder", "syncline runs"]),
    ],
)
def test_wrong_words_are_refused(arguments: list[str], words: list[str], cli: Cli, tmp_path: Path) -> None:
    assert_refused(cli("train", *arguments), *words)
    assert_nothing_written(tmp_path / "work")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("modle = 'cnn'", ["'modle'", "Did you mean 'model'?"]),
        ("[optimizer]\nlr = 1", ["'optimizer.lr'", "optimizer.learning_rate"]),
        ("model =\n", ["plan.toml", "TOML", "line 1"]),
        ("steps = 1\nepochs = 1", ["contradict"]),
    ],
)
def test_wrong_plan_file_is_refused(content: str, words: list[str], cli: Cli, tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text(content)
    assert_refused(cli("train", plan), *words)
    assert_nothing_written(tmp_path / "work")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["verify", "--workers", "two"], ["'two'", "2,4"]),
        (["verify", "--workers", "2,0"], ["workers", "0"]),
        (["verify", "--methods", "single"], ["single", "nothing to certify"]),
        (["verify", "--models", "vg11"], ["Did you mean 'vgg11'?"]),
        (["trace", "--steps", "a:b"], ["'a:b'", "10:20"]),
        (["trace", "--steps", "5:2"], ["'5:2'", "ends before"]),
        (["trace"], ["no run"]),
        (["probe", "--backend", "glue"], ["'glue'", "gloo, shared-memory, mpi"]),
        (["probe", "--backend", ","], ["no backend"]),
        (["probe", "--sizes", "1kB,big"], ["'big'", "64kB"]),
        (["probe", "--sizes", "3"], ["3", "multiple of 4"]),
        (["probe", "--sizes", ","], ["--sizes is empty"]),
        (["probe", "--workers", "1"], ["at least 2 workers"]),
        (["probe", "--repeats", "0"], ["--repeats 0"]),
        (["compare", "--methods", "dpp,ddp"], ["Did you mean 'ddp'?"]),
        (["compare", "--methods", ","], ["no method"]),
        (["compare", "--steps", "0"], ["steps", "0"]),
        (["data", "imagenet"], ["'imagenet'"]),
        (["doctor", "--nodes", "2"], ["--nodes and --node-rank belong together"]),
        (["doctor", "--nodes", "2", "--node-rank", "2", "--rendezvous", "localhost:1"], ["out of range for 2 nodes"]),
        (["doctor", "--rendezvous", "nowhere"], ["'nowhere'", "HOST:PORT"]),
        (["cluster", "run", "--link", "fast", "--", "true"], ["'fast' is not a rate", "1gbit"]),
        (["cluster", "run", "--hosts", "3", "--link", "1gbit,1gbit", "--", "true"], ["2 rates for 3 hosts"]),
        (["cluster", "run", "--", "no-such-program"], ["no-such-program", "python my_script.py"]),
    ],
)
def test_other_verbs_refuse_the_same_way(arguments: list[str], words: list[str], cli: Cli, tmp_path: Path) -> None:
    assert_refused(cli(*arguments), *words)
    assert_nothing_written(tmp_path / "work")


def no_folder(_: Path) -> None:
    pass


def empty_folder(folder: Path) -> None:
    folder.mkdir()


def made_up_batches(folder: Path) -> None:
    folder.mkdir()
    batch = {"data": np.zeros((10, 3072), np.uint8), "labels": [0] * 10}
    for name in ("data_batch_1", "test_batch"):
        (folder / name).write_bytes(pickle.dumps(batch, protocol=2))


def truncated_batch(folder: Path) -> None:
    made_up_batches(folder)
    whole = (folder / "data_batch_1").read_bytes()
    (folder / "data_batch_1").write_bytes(whole[: len(whole) // 2])


def hostile_batch(folder: Path) -> None:
    made_up_batches(folder)
    (folder / "data_batch_1").write_bytes(b"cos\nsystem\n(S'touch broken-in'\ntR.")


@pytest.mark.parametrize("data", ["cifar10", "auto"])
@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (no_folder, ["no such folder", "--data-dir"]),
        (empty_folder, ["the folder holds none", "--data-dir"]),
        (made_up_batches, ["data_batch_1", "differs from the official CIFAR-10"]),
        (truncated_batch, ["data_batch_1", "truncated"]),
        (hostile_batch, ["data_batch_1", "refused", "os.system"]),
    ],
)
def test_wrong_data_is_refused(
    prepare: Callable[[Path], None], words: list[str], data: str, cli: Cli, tmp_path: Path
) -> None:
    prepare(tmp_path / "data")
    assert_refused(cli("train", "--data", data, "--data-dir", tmp_path / "data"), *words)
    assert_nothing_written(tmp_path / "work")


@pytest.mark.parametrize("verb", ["train", "compare"])
def test_port_in_use_is_refused_and_the_run_folder_taken_back(verb: str, cli: Cli, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert_refused(cli(verb, *SMALL, "--run-dir", "deep/run", "--port", port), f"Port {port} is in use")
    assert_nothing_written(tmp_path / "work")


def test_port_that_cannot_be_is_refused(cli: Cli, tmp_path: Path) -> None:
    assert_refused(cli("train", *SMALL, "--port", 65536), "Port 65536")
    assert_nothing_written(tmp_path / "work")


@pytest.mark.parametrize("model", ["nowhere:Net", "math:pi"])
def test_user_model_that_cannot_be_had_is_refused(model: str, cli: Cli, tmp_path: Path) -> None:
    assert_refused(cli("train", "--data", "synthetic", "--model", model), repr(model))
    assert_nothing_written(tmp_path / "work")


@pytest.mark.parametrize(
    ("run_dir", "words"),
    [
        ("file/run", ["cannot write", "a file is in the way"]),
        ("file", ["cannot write", "a file is in the way"]),
        ("full", ["is not empty", "--run-dir"]),
    ],
)
def test_run_folder_that_cannot_be_written_is_refused(
    run_dir: str, words: list[str], cli: Cli, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    assert_refused(cli("train", *SMALL, "--run-dir", tmp_path / run_dir), *words)
    assert_nothing_written(tmp_path / "work")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "full", "mine", "work"]


def one_document(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_printed_plan_is_whole_and_gives_the_same_weights(cli: Cli, tmp_path: Path) -> None:
    """A plan file and flags on top; the printed plan; the stored plan: the same run each time."""
    (tmp_path / "plan.toml").write_text("model = 'mlp'\nworkers = 3\nepochs = 2\n[optimizer]\nmomentum = 0.5\n")
    flags = ("--data", "synthetic", "--workers", 2, "--steps", 5, "--global-batch", 10, "--set", "evaluate=false")
    printed = cli("train", tmp_path / "plan.toml", *flags, "--print-plan")
    assert printed.returncode == 0, printed.stderr
    assert_nothing_written(tmp_path / "work")
    plan = parse_plan(tomllib.loads(printed.stdout))
    assert (plan.workers, plan.steps, plan.epochs, plan.threads) == (2, 5, None, 1)
    assert plan.optimizer.momentum == 0.5
    assert tomllib.loads(plan.to_toml()) == tomllib.loads(printed.stdout)

    (tmp_path / "printed.toml").write_text(printed.stdout)
    first = one_document(cli("train", tmp_path / "plan.toml", *flags, "--run-dir", "first", "--json"))
    second = one_document(cli("train", tmp_path / "printed.toml", "--run-dir", "second", "--json"))
    assert first["weights_sha256"] == second["weights_sha256"]
    stored = tmp_path / "work" / "first" / "plan.toml"
    assert stored.read_text() == printed.stdout
    assert_refused(cli("train", "--resume", "first"), "first is finished")
    assert_refused(cli("train", "--resume", "first", "--steps", 9), "--resume", "no other")


def test_runs_and_last_run(cli: Cli) -> None:
    assert "no runs in" in cli("runs").stdout
    trained = cli("train", *SMALL, "--steps", 2, "--method", "single", "--run-dir", "runs/mine")
    assert trained.returncode == 0, trained.stderr
    assert "run folder runs/mine; next: syncline " in trained.stdout
    compared = cli("compare", *SMALL, "--steps", 2, "--workers", 2, "--methods", "single,gather-scatter,ddp")
    assert compared.returncode == 0, compared.stderr
    for words in ("single, all cores", "gather-scatter", "ddp", "speed-up", "next: syncline verify"):
        assert words in compared.stdout
    last = compared.stdout.rpartition("run folder ")[2].partition(";")[0]
    lines = cli("runs").stdout.splitlines()
    assert [line.split()[:2] for line in lines[:-1]] == [["runs/mine", "finished"], [last, "finished"]]
    assert lines[-1].startswith(f"last run {last}; next: syncline ")
    listing = json.loads(cli("runs", "--json").stdout)
    assert [(run["kind"], run["status"]) for run in listing] == [("train", "finished"), ("compare", "finished")]
    assert_refused(cli("train", "--resume"), "runs/mine is finished")
    assert_refused(cli("train", "--resume", last), "is a compare run")


def test_compare_times_every_method_and_their_losses_agree(cli: Cli) -> None:
    arguments = ("--model", "cnn", "--data", "synthetic", "--workers", 2, "--global-batch", 16, "--steps", 3)
    names = [name for name, row in METHODS.items() if row.takes_turns]
    document = one_document(cli("compare", *arguments, "--methods", ",".join(names), "--json"))
    rows = {row["label"]: row for row in document["rows"]}
    assert [label for label in rows if label != "single, all cores"] == names
    for label, row in rows.items():
        assert row["step"]["counted"] == 3
        assert row["images_per_s"] > 0
        assert row["speedup"]["median"] > 0, label
        assert row["ratio_to_ddp"]["median"] > 0, label
        assert row["loss"] == pytest.approx(rows["ddp"]["loss"], rel=1e-3), label
    assert rows["ddp"]["ratio_to_ddp"]["median"] == rows["single"]["speedup"]["median"] == 1


def test_compared_methods_draw_the_same_dropout_masks(cli: Cli, user_folder: Path) -> None:
    arguments = ("--model", "user_model:Net", "--data", "synthetic", "--global-batch", 16, "--steps", 3)
    command = ("compare", *arguments, "--methods", "ddp,bucketed,shared-memory", "--json")
    ddp, *others = (row["loss"] for row in one_document(cli(*command, cwd=user_folder))["rows"])
    assert others == pytest.approx([ddp, ddp], rel=1e-5)


def test_verify_certifies_every_method(cli: Cli) -> None:
    document = one_document(cli("verify", "--workers", 2, "--models", "cnn", "--json"))
    assert document["passed"] is True
    certified = {row["method"]: row["sequential"]["status"] for row in document["certificates"]}
    assert tuple(certified) == SENDING
    assert certified["gather-scatter"] == certified["point-to-point"] == "bitwise"


def test_probe_keeps_times_and_fits(cli: Cli, tmp_path: Path) -> None:
    arguments = ("--workers", 2, "--sizes", "4kB,64kB,1MB", "--repeats", 2, "--run-dir", "probed")
    document = one_document(cli("probe", *arguments, "--json"))
    measured = {(row["backend"], row["operation"]): row for row in document["rows"]}
    messages = ["all_reduce", "send_receive", "broadcast", "gather", "scatter"]
    assert list(measured) == [*(("gloo", operation) for operation in messages), ("shared-memory", "all_reduce")]
    for row in measured.values():
        assert [point["bytes"] for point in row["points"]] == [4000, 64_000, 1_000_000]
        assert row["fit"]["alpha_interval_s"][0] <= row["fit"]["alpha_s"] <= row["fit"]["alpha_interval_s"][1]
    rate = measured["gloo", "send_receive"]["fit"]["bytes_per_s"]
    # A busy machine may show no rate at all with so few sizes.
    assert document["links"].get("gloo", {}).get("bytes_per_s") == rate
    stored = tmp_path / "work" / "probed"
    assert json.loads((stored / "summary.json").read_text()) == {k: v for k, v in document.items() if k != "run"}
    assert json.loads((stored / "run.json").read_text())["kind"] == "probe"
    assert_refused(cli("train", "--resume", "probed"), "is a probe run")
