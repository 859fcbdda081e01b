"""What a whole run costs, as plain data."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .view import register_view

SECONDS_PER_HOUR = 3600.0
Range = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCost:
    """Steps, hours, dollars and kilowatt-hours of a run of many alike steps; `Profile.cost_of` makes it. None is
    unknown; ranges are as wide as that of a step, and None where that is.

    >>> cost = RunCost(steps=7200, devices=8, step_seconds=0.5, price=2.0, watts=700.0)
    >>> cost.hours, cost.device_hours, cost.dollars, round(cost.kwh, 3), cost.hours_range
    (1.0, 8.0, 16.0, 5.6, None)
    """

    steps: int | None
    devices: int
    tokens: int | None = None                #: of the run
    samples: int | None = None
    step_seconds: float | None = None
    step_seconds_range: Range | None = None
    price: float | None = None               #: dollars for one device for one hour
    watts: float | None = None               #: of one device
    assumptions: tuple[str, ...] = ()        #: what the figures rest on

    @property
    def hours(self) -> float | None:
        """From the first step to the last."""
        return self._hours(self.step_seconds)

    @property
    def device_hours(self) -> float | None:
        """Hours of all devices together."""
        return self._scale(1.0)(self.hours)

    @property
    def dollars(self) -> float | None:
        """What the device-hours cost."""
        return self._scale(self.price)(self.hours)

    @property
    def kwh(self) -> float | None:
        """Kilowatt-hours of the devices."""
        return self._scale(None if self.watts is None else self.watts / 1e3)(self.hours)

    @property
    def hours_range(self) -> Range | None:
        """Low and high of `hours`."""
        return self._range(lambda hours: hours)

    @property
    def device_hours_range(self) -> Range | None:
        """Low and high of `device_hours`."""
        return self._range(self._scale(1.0))

    @property
    def dollars_range(self) -> Range | None:
        """Low and high of `dollars`."""
        return self._range(self._scale(self.price))

    @property
    def kwh_range(self) -> Range | None:
        """Low and high of `kwh`."""
        return self._range(self._scale(None if self.watts is None else self.watts / 1e3))

    def _hours(self, seconds: float | None) -> float | None:
        return None if self.steps is None or seconds is None else self.steps * seconds / SECONDS_PER_HOUR

    def _scale(self, rate: float | None) -> Callable[[float | None], float | None]:
        """A function of hours: ``rate`` for each hour of each device."""
        return lambda hours: None if hours is None or rate is None else hours * self.devices * rate

    def _range(self, amount: Callable[[float | None], float | None]) -> Range | None:
        ends = [amount(self._hours(seconds)) for seconds in self.step_seconds_range or ()]
        known = [end for end in ends if end is not None]
        return (known[0], known[1]) if len(known) == 2 else None

    def __str__(self) -> str:
        return str(register_view.look_up("run_cost", "RunCost")(self))
