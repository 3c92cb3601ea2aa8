"""The transformers of a model, and where each of them is."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from chitu_diffusion.config.schema import Config
from services.common.placement import move_module
from services.dit.models import Transformer

_HOSTED = {"all": (0, 1), "high_noise": (0,), "low_noise": (1,)}


def hosted(config: Config) -> dict[str, int]:
    """Names and positions of the transformers that a pool hosts, of the one or two of its model."""
    if config.models.boundary_ratio is None:
        return {"transformer": 0}
    names = ("transformer", "transformer_2")
    return {names[position]: position for position in _HOSTED[config.services.dit.expert]}


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
        first: int = 0,
    ) -> None:
        """Take models that are at `home`; by default that is the device.

        `first` is the position of the first one: 1 when low noise is the only one here.
        """
        self._models = dict(enumerate(models, first))
        self.device = device
        """Where they compute."""
        self._homes = dict.fromkeys(self._models, home or device)
        self.where = dict(self._homes)
        """Where each is now, by position."""

    def __len__(self) -> int:
        return len(self._models)

    @property
    def in_channels(self) -> int:
        """Channels of the latents."""
        return next(iter(self._models.values())).config.in_channels

    def __getitem__(self, index: int) -> Transformer:
        """A transformer, wherever it is."""
        return self._models[index]

    def use(self, index: int) -> Transformer:
        """A transformer on the device; those that do not live there have gone home.

        Raises:
            OutOfMemoryError: it does not fit; it is where it was.
        """
        for other in self._models:
            if other != index:
                self._bring(other, self._homes[other])
        self._bring(index, self.device)
        return self._models[index]

    def rest(self) -> None:
        """Send every transformer home."""
        for index, home in self._homes.items():
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
