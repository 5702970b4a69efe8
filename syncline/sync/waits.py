"""Who waits where: the modules at whose call a forward needs a parameter, found by watching one forward.

A parameter waits at every module that owns it. Some owners are never called (`MultiheadAttention.out_proj`, weights
that are used functionally): then also at the nearest module above them that is; at the latest at the root.

Calls are seen by a hook for all modules of the process, so that nothing is put on the model, and a copy of it carries
nothing along.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

_watched: weakref.WeakKeyDictionary[nn.Module, Callable[[nn.Module], None]] = weakref.WeakKeyDictionary()
_hook: list[RemovableHandle] = []
_lock = threading.RLock()
"""Ranks may be threads, and garbage may be found anywhere: a hook must not go while another model is added."""


def watch_calls(model: nn.Module, on_call: Callable[[nn.Module], None]) -> None:
    """Call `on_call(module)` before each forward of the model and of every module in it, until `forget_calls`."""
    with _lock:
        _watched.update(dict.fromkeys(model.modules(), on_call))
        if not _hook:
            _hook.append(register_module_forward_pre_hook(_before_forward))


def forget_calls(model: nn.Module) -> None:
    with _lock:
        for module in model.modules():
            _watched.pop(module, None)
        if not _watched and _hook:
            _hook.pop().remove()


def _before_forward(module: nn.Module, _inputs: Any) -> None:
    on_call = _watched.get(module)
    if on_call is not None:
        on_call(module)


def waiting_places(
    model: nn.Module, called: Collection[nn.Module], numbers: Mapping[int, int]
) -> dict[nn.Module, list[int]]:
    """By module, the parameters that a call of it waits for. `numbers` has the parameters' numbers by id."""
    places: dict[nn.Module, list[int]] = {}
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, module in modules.items():
        for parameter in module._parameters.values():
            if parameter is None or id(parameter) not in numbers:
                continue
            for place in {module, _nearest_called(name, modules, called, model)}:
                own = places.setdefault(place, [])
                if numbers[id(parameter)] not in own:
                    own.append(numbers[id(parameter)])
    return places


def _nearest_called(
    name: str, modules: Mapping[str, nn.Module], called: Collection[nn.Module], model: nn.Module
) -> nn.Module:
    while name:
        if modules[name] in called:
            return modules[name]
        name = name.rpartition(".")[0]
    return model
