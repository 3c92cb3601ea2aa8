"""One line of progress now and then: step, loss, rate and time left."""

from __future__ import annotations

import time


class Progress:
    """Averages the values of the steps since the last line and prints them with rate and ETA."""

    def __init__(self, stage: str, total: int, every: int = 50) -> None:
        self.stage, self.total, self.every = stage, total, every
        self._sums: dict[str, float] = {}
        self._count = 0
        self._since = time.monotonic()

    def update(self, step: int, **values: float) -> None:
        """Count a finished step (0-based) and print a line where one is due."""
        for name, value in values.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
        self._count += 1
        done = step + 1
        if done % self.every and done != self.total:
            return
        rate = self._count / max(time.monotonic() - self._since, 1e-9)
        means = " ".join(f"{name} {total / self._count:.4f}" for name, total in self._sums.items())
        left = (self.total - done) / rate / 60
        line = f"{self.stage} {done}/{self.total} {means} {rate:.2f} steps/s eta {left:.1f} min"
        print(time.strftime("%H:%M:%S"), line, flush=True)
        self._sums, self._count, self._since = {}, 0, time.monotonic()
