"""The transformers of a model, and where each of them is."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from chitu_diffusion.config.schema import ModelConfig
from services.common.placement import move_module
from services.dit.models import Transformer


def component_names(model: ModelConfig) -> list[str]:
    """Names of a model's transformers, in order."""
    return ["transformer"] if model.boundary_ratio is None else ["transformer", "transformer_2"]


class Experts:
    """One transformer, or the high-noise and the low-noise one.

    Each has a home, where it lives between slices: the device, or host memory. One that lives in
    host memory is on the device only while it is used. Not for several threads at once, save
    `where`.
    """

    def __init__(
        self,
        models: Sequence[Transformer],
        device: torch.device,
        home: torch.device | None = None,
    ) -> None:
        """Take models that are at `home`; by default that is the device."""
        self._models = list(models)
        self.device = device
        """Where they compute."""
        self._homes = [home or device for _ in models]
        self.where = list(self._homes)
        """Where each is now."""

    def __len__(self) -> int:
        return len(self._models)

    def __getitem__(self, index: int) -> Transformer:
        """A transformer, wherever it is."""
        return self._models[index]

    def use(self, index: int) -> Transformer:
        """A transformer on the device; those that do not live there have gone home.

        Raises:
            OutOfMemoryError: it does not fit; it is where it was.
        """
        for other in range(len(self._models)):
            if other != index:
                self._bring(other, self._homes[other])
        self._bring(index, self.device)
        return self._models[index]

    def rest(self) -> None:
        """Send every transformer home."""
        for index, home in enumerate(self._homes):
            self._bring(index, home)

    def settle(self, index: int, target: str) -> None:
        """Give a transformer another home, "cpu" or "device", and take it there.

        Raises:
            OutOfMemoryError: it does not fit; it stays where it was.
        """
        home = self.device if target == "device" else torch.device("cpu")
        self._bring(index, home)
        self._homes[index] = home

    def _bring(self, index: int, device: torch.device) -> None:
        if self.where[index] != device:
            move_module(self._models[index], device)
            self.where[index] = device
