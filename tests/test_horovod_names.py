"""The name `horovod`: the same modules under both names, its installation, and horovodrun's flags."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import syncline
from syncline.horovod import alias, install
from syncline.horovod.runner import Settings, hosts, launch, run
from syncline.horovod.runner.ranks import call_of, output_files

SITE = Path(pytest.__file__).parents[1]
MODULES = (
    "torch", "torch.mpi_ops", "torch.compression", "torch.functions", "torch.elastic", "torch.elastic.state",
    "torch.elastic.sampler", "common", "common.exceptions", "common.util", "common.process_sets", "common.elastic",
    "runner", "runner.launch", "runner.util.threads",
)  # fmt: skip


@contextmanager
def forgotten_modules(name: str) -> Iterator[None]:
    """Inside, this package has not been imported yet; afterwards it is as it was."""
    found = [module for module in sys.modules if module == name or module.startswith(f"{name}.")]
    kept = {module: sys.modules.pop(module) for module in found}
    try:
        yield
    finally:
        for module in [module for module in sys.modules if module == name or module.startswith(f"{name}.")]:
            del sys.modules[module]
        sys.modules.update(kept)


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`import horovod` finds the files of the distribution, also where it is not installed."""
    monkeypatch.syspath_prepend(str(install.COMPAT))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    with forgotten_modules("horovod"):
        yield


@pytest.mark.usefixtures("named")
@pytest.mark.parametrize("name", MODULES)
def test_module_is_one_object_under_both_names(name: str) -> None:
    theirs, ours = (importlib.import_module(f"{top}.{name}") for top in ("horovod", "syncline.horovod"))
    assert theirs is ours
    assert ours.__spec__.name == ours.__name__ == f"syncline.horovod.{name}"


@pytest.mark.usefixtures("named")
def test_package_has_horovod_s_version_and_run() -> None:
    import horovod

    assert horovod.__version__ == "0.28.1+syncline"
    assert horovod.run is run
    assert install._project()["version"] == horovod.__version__
    from horovod.common.exceptions import HorovodInternalError

    import syncline.horovod.torch as hvd

    assert HorovodInternalError is hvd.HorovodInternalError
    with pytest.raises(ModuleNotFoundError, match=r"horovod\.nonsense"):
        importlib.import_module("horovod.nonsense")


@pytest.mark.usefixtures("named")
@pytest.mark.parametrize("name", ["tensorflow", "tensorflow.keras", "keras", "mxnet", "ray", "spark", "spark.torch"])
def test_other_frameworks_and_engines_are_refused_in_one_sentence(name: str) -> None:
    with pytest.raises(ImportError) as refused:
        importlib.import_module(f"horovod.{name}")
    assert str(refused.value) == alias.REFUSED[name.partition(".")[0]]
    assert name.partition(".")[0] in str(refused.value)


def test_repository_holds_the_distribution() -> None:
    assert Path(syncline.__file__).parents[1].joinpath("compat", "horovod").resolve() == install.COMPAT


def test_wheel_says_what_the_project_file_says(tmp_path: Path) -> None:
    wheel = install.make_wheel(tmp_path)
    assert wheel.name == "horovod-0.28.1+syncline-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        info = "horovod-0.28.1+syncline.dist-info"
        about = ("METADATA", "WHEEL", "entry_points.txt", "RECORD")
        assert names == ["horovod/__init__.py", *(f"{info}/{name}" for name in about)]
        record = archive.read(f"{info}/RECORD").decode().splitlines()
        assert [line.partition(",")[0] for line in record] == names


@pytest.mark.parametrize("version", ["0.28.1", "0.21.3"])
def test_real_horovod_is_left_alone(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install.metadata, "version", lambda name: version)
    with pytest.raises(install.UsageError, match=f"Horovod {version} is installed in .*pip uninstall horovod"):
        install.install()


def test_folder_called_horovod_is_left_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def missing(name: str) -> str:
        raise install.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(install.metadata, "version", missing)
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    refused = pytest.raises(install.UsageError, match=f"there is a horovod already, at {tmp_path}")
    with forgotten_modules("horovod"), refused:
        install.install()


def test_install_and_uninstall_in_an_environment_without_a_network(tmp_path: Path) -> None:
    """The environment borrows everything but horovod from this one."""
    venv.create(tmp_path, symlinks=True)
    (site,) = tmp_path.glob("lib/python*/site-packages")
    (site / "borrowed.pth").write_text(f"import site; site.addsitedir({str(SITE)!r})\n")
    environment = {**os.environ, "PIP_INDEX_URL": "http://127.0.0.1:1", "PIP_NO_CACHE_DIR": "1"}
    python = str(tmp_path / "bin" / "python")

    def done(*words: str) -> str:
        return subprocess.run(words, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True).stdout

    said = done(python, "-m", "syncline.horovod.install")
    assert said.startswith(f"syncline: horovod 0.28.1+syncline is in {tmp_path}: `import horovod.torch`")
    where = done(python, "-c", "import importlib.util as u; print(u.find_spec('horovod').origin)")
    assert Path(where.strip()) == site / "horovod" / "__init__.py"
    assert done(str(tmp_path / "bin" / "horovodrun"), "--version") == "0.28.1+syncline\n"
    done(python, "-m", "syncline.horovod.install")
    done(python, "-m", "pip", "uninstall", "--yes", "horovod")
    assert not (tmp_path / "bin" / "horovodrun").exists()
    assert not (site / "horovod").exists()


# horovodrun


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a refused command says; it must end with exit code 2."""
    with pytest.raises(SystemExit) as left:
        launch.run_commandline(arguments)
    assert left.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    return err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["python", "train.py"], "horovodrun needs -np"),
        (["-np", "2"], "horovodrun needs a command"),
        (["-np", "2", "python", "missing.py"], "there is no script missing.py"),
        (["-np", "2", "nonsense"], "there is no program nonsense"),
        (["-np", "2", "--bogus", "python", "x.py"], "unrecognized arguments: --bogus"),
        (["-np", "two", "python", "x.py"], "-np/--num-proc: invalid int value: 'two'"),
        (["-np", "0", "sh"], "Cannot run 0 workers"),
        (["-np", "3", "-H", "localhost:2", "sh"], "the hosts have 2 slots, and -np asks for 3 ranks"),
        (["-np", "2", "-H", "localhost:1,node7.invalid:1", "sh"], "host node7.invalid is not this machine"),
        (["-np", "2", "--hostfile", "missing", "sh"], "cannot read the host file missing"),
        (["-np", "2", "--jsrun", "sh"], "--jsrun is not supported"),
        (["-np", "2", "--config-file", "x.yaml", "sh"], "--config-file is not supported"),
        (["-np", "2", "--min-np", "3", "sh"], "--min-np 3, -np 2 and --max-np 2 contradict each other"),
        (["-np", "2", "--max-np", "1", "sh"], "--min-np 2, -np 2 and --max-np 1 contradict each other"),
        (["-np", "2", "--host-discovery-script", "./missing", "sh"], "the host discovery script ./missing failed"),
        (["-np", "2", "--mpi", "--min-np", "1", "sh"], "--mpi does not go with"),
    ],
)
def test_wrong_command_is_refused_in_one_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    err = said(capsys, *arguments)
    assert words in err
    assert re.fullmatch(r"syncline: .*\n", err)


def test_flags_without_effect_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    for name, values in launch.NO_EFFECT.items():
        given = launch.parse_args(["-np", "2", name, *["1"] * values, "python", "x.py", "--autotune"])
        assert given.command == ["python", "x.py", "--autotune"]
        assert capsys.readouterr().err == f"syncline: {name} has no effect.\n"


def test_check_build_tells_the_truth(capsys: pytest.CaptureFixture[str]) -> None:
    launch.run_commandline(["--check-build"])
    out = capsys.readouterr().out
    assert "[X] PyTorch" in out
    assert "[ ] TensorFlow" in out
    assert "[X] Gloo" in out
    assert f"[{'X' if syncline.horovod.torch.nccl_built() else ' '}] NCCL" in out


def test_hosts_are_this_machine(tmp_path: Path) -> None:
    assert hosts.slots_of("localhost:2,127.0.0.1:3,localhost") == 6
    file = tmp_path / "hosts"
    file.write_text("# ours\nlocalhost slots=4\n\n127.0.0.1  slots = 2 # more\n")
    assert hosts.slots_of_file(file) == 6
    with pytest.raises(hosts.UsageError, match="cannot read the host 'a b c'"):
        hosts.slots_of("a b c")


def test_python_scripts_run_in_the_rank_and_other_programs_in_its_place(tmp_path: Path) -> None:
    script = tmp_path / "x.py"
    script.touch()
    for python in ("python", "python3", sys.executable):
        assert call_of([python, "-u", str(script), "-u"])[1][:2] == (str(script), ["-u"])
    for command in (["python", "-m", "x"], ["sh", "-c", "true"], [sys.executable, "-W", "error", str(script)]):
        assert call_of(command)[1] == (command,)


def test_output_is_named_as_horovod_names_it() -> None:
    assert [str(path) for path in output_files("out", 3, 11)] == ["out/rank.03/stdout", "out/rank.03/stderr"]


def test_run_refuses_what_contradicts_itself_or_is_not_there() -> None:
    with pytest.raises(ValueError, match="hosts or hostfile"):
        run(print, hosts="localhost:1", hostfile="x")
    with pytest.raises(ValueError, match="use_gloo or use_mpi"):
        run(print, use_gloo=True, use_mpi=True)
    with pytest.raises(hosts.UsageError, match="executable are not supported"):
        run(print, executable="python")
    with pytest.warns(DeprecationWarning, match="np is deprecated, use num_proc"), pytest.raises(hosts.UsageError):
        run(print, np=0)


def test_elastic_flags_make_a_run_elastic() -> None:
    assert not Settings(2).is_elastic
    assert Settings(2, min_num_proc=1).is_elastic
    assert Settings(2, discovery_script="x").is_elastic
