"""The name `horovod` for the modules of syncline.horovod.

Each module is one object under both names, so an exception that is raised under one is caught under the other.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

_OURS = "syncline.horovod"
_TORCH_ONLY = "Syncline has Horovod's torch API only"
REFUSED = {
    "tensorflow": f"horovod.tensorflow is not there: {_TORCH_ONLY}; use horovod.torch.",
    "keras": f"horovod.keras is not there: {_TORCH_ONLY}; Keras 3 trains on it with KERAS_BACKEND=torch.",
    "mxnet": f"horovod.mxnet is not there: {_TORCH_ONLY}; use horovod.torch.",
    "ray": "horovod.ray is not there: start ranks with horovod.run(func, num_proc=4) or horovodrun instead.",
    "spark": "horovod.spark is not there: start ranks with horovod.run(func, num_proc=4) or horovodrun instead.",
    "data": "horovod.data is not there: use torch's DataLoader, or syncline.loader.",
}


def under(name: str) -> ModuleType:
    """Give the package a second name, below which its modules are found too."""
    if not any(isinstance(finder, _Alias) and finder.name == name for finder in sys.meta_path):
        # In front of Python's own, which would load a second copy from the same folder.
        sys.meta_path.insert(0, _Alias(name))
    return import_module(_OURS)


class _Alias(MetaPathFinder, Loader):
    def __init__(self, name: str) -> None:
        self.name = name

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        top, _, rest = fullname.partition(".")
        if top != self.name or not rest:
            return None
        sentence = REFUSED.get(rest.partition(".")[0])
        if sentence:
            raise ImportError(sentence, name=fullname)
        found = find_spec(f"{_OURS}.{rest}")
        if found is None:
            return None
        is_package = found.submodule_search_locations is not None
        return ModuleSpec(fullname, self, origin=found.origin, is_package=is_package)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(f"{_OURS}.{spec.name.partition('.')[2]}")
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """It has been loaded already. Python has put the alias's spec in place of its own: put that back."""
        spec = module.__spec__
        assert spec is not None
        module.__spec__ = spec.loader_state
