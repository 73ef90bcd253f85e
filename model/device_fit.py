"""DeviceFit: whether a model's weights and sessions fit a device's memory. Needs no torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeviceFit:
    """Bytes. What a step needs for its rows comes on top: it depends on the batch, not on the model alone."""

    device: int
    weights: int
    session: int
    """One session: its slot and its whole pages."""
    sessions: int
    """How many there are to be."""

    @property
    def needed(self) -> int:
        return self.weights + self.sessions * self.session

    @property
    def weights_short_by(self) -> int:
        """What is missing for the weights alone, 0 when they fit."""
        return max(0, self.weights - self.device)

    @property
    def short_by(self) -> int:
        """What is missing for weights and sessions, 0 when all fits."""
        return max(0, self.needed - self.device)

    @property
    def sessions_that_fit(self) -> int:
        return max(0, self.device - self.weights) // self.session
