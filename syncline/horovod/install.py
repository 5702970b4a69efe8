"""python -m syncline.horovod.install: the name `horovod` and the command `horovodrun` for this environment.

It installs a distribution called horovod, so that pip knows of it, replaces it and never mixes it with a real one.
The wheel is written here from the folder compat/, which comes with Syncline: nothing is downloaded or built.
"""

from __future__ import annotations

import base64
import hashlib
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from syncline.cli import told
from syncline.errors import SynclineError, UsageError

COMPAT = Path(__file__).with_name("compat")
_OURS = "+syncline"


def install() -> str:
    """Returns what was done, in a sentence."""
    _refuse_where_horovod_is()
    if find_spec("pip") is None:
        raise UsageError("this environment has no pip.", action="Add it with python -m ensurepip, and try again.")
    with tempfile.TemporaryDirectory(prefix="syncline-") as folder:
        wheel = make_wheel(Path(folder))
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        done = subprocess.run([*command, "--no-index", "--no-deps", "--force-reinstall", str(wheel)], check=False)
    if done.returncode:
        raise SynclineError(f"pip could not install {wheel.name}.", action="What it said is above.")
    return (
        f"horovod {_project()['version']} is in {sys.prefix}: `import horovod.torch` and `horovodrun` are Syncline's "
        "now. To remove it: pip uninstall horovod"
    )


def make_wheel(folder: Path) -> Path:
    """The distribution as a wheel in that folder."""
    project = _project()
    info = f"{project['name']}-{project['version']}.dist-info"
    scripts = "".join(f"{name} = {target}\n" for name, target in project["scripts"].items())
    needs = "".join(f"Requires-Dist: {name}\n" for name in project["dependencies"])
    files = {path.relative_to(COMPAT).as_posix(): path.read_text() for path in COMPAT.glob("*/*.py")}
    files |= {
        f"{info}/METADATA": (
            f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
            f"Summary: {project['description']}\nRequires-Python: {project['requires-python']}\n{needs}"
        ),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: syncline\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[console_scripts]\n{scripts}",
    }
    record = f"{info}/RECORD"
    files[record] = "".join(f"{name},{_digest(text)},{len(text.encode())}\n" for name, text in files.items())
    files[record] += f"{record},,\n"
    wheel = folder / f"{project['name']}-{project['version']}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return wheel


def _refuse_where_horovod_is() -> None:
    """A package without a distribution counts too: a folder called horovod on the path hides ours, or is hidden."""
    action = "Remove it first (pip uninstall horovod), or use import syncline.horovod.torch as hvd."
    try:
        version = metadata.version("horovod")
    except metadata.PackageNotFoundError:
        found = find_spec("horovod")
        if found is not None:
            where = found.origin or str(found.submodule_search_locations)
            raise UsageError(f"there is a horovod already, at {where}.", action=action) from None
        return
    if not version.endswith(_OURS):
        raise UsageError(f"Horovod {version} is installed in {sys.prefix}.", action=action)


def _project() -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((COMPAT / "pyproject.toml").read_text())["project"]
    return project


def _digest(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256={base64.urlsafe_b64encode(digest).decode().rstrip('=')}"


if __name__ == "__main__":
    told(lambda: print(f"syncline: {install()}"))
