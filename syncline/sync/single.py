"""single: one worker on the whole batch. Nothing is sent."""

from __future__ import annotations

from torch import nn

from syncline.sync.base import GradientSync


class Single(GradientSync):
    def attach(self, model: nn.Module) -> nn.Module:
        return model

    def finish(self) -> None:
        pass

    def finish_without_gradients(self) -> None:
        pass
