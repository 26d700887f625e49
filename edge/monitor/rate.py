"""How many inferences a second a temperature allows: a PI controller that comes to rest. Pure: numbers in, one out.

The box behind a junction answers within seconds (die), within a minute (module) and within an hour (case), and how
strongly is not known. What follows from that:

- PI, with the temperature expected some seconds ahead in the proportional part, so that it acts before the set point.
- The integral stands still where the limit cannot act, and is pulled back where the limit is cut (back-calculation).
- Down is fast, up is slow: heat is quick, and nobody misses a frame that comes a minute later.
- Once the temperature has come to rest just under the set point, the rate is held until the temperature leaves a band
  that is wider than noise. An integral that never rests would swing for ever between two rates.
"""

from __future__ import annotations

import math

__all__ = ["RateController"]

_GAIN_PER_K = 0.08
"""Share of the demand that one kelvin too much takes away."""
_RESET_S = 60.0
"""Integral time: about the time constant of module and heat spreader."""
_UP = 0.5
"""The integral rises at this share of the speed at which it falls."""
_URGENCY = 6.0
"""How much faster the integral falls for each kelvin of the excess beyond noise: far too hot is not for long."""
_LEAD_S = 10.0
"""How far ahead the proportional part looks, by the slope."""
_RISE_PER_S = 0.01
"""Share of the demand by which the limit may rise in a second."""
_TARGET_C = -0.1
"""Where to rest, from the set point."""
_REST_S = 30.0
"""How long the slow temperature must be at the target before the rate is held."""
_TRIM_S = 300.0
"""How often a held rate is trimmed, by the mean temperature over about as long ..."""
_TRIM_C = 0.08
"""... where that is farther than this from the target ..."""
_TRIM_K = 60.0
"""... as if the whole demand warmed the junction by this much: more than any box does, so that no trim is too large."""
_WARM_C = 10.0
"""So near the set point a demand that grows is admitted no faster than the limit may rise."""
_ALARM_C = 0.9
_ALARM_NOISE = 4.5
"""A held rate is given up at once when the temperature ahead is so far above the set point, or so many sigmas."""
_START_C = 25.0
"""So near the set point, work begins at a quarter of the demand."""
_START = 0.25
_RISE_PER_READING = 0.05
"""Nor by more than this from one reading to the next: what comes rarely has to be waited for."""
_SPARE = 1.15
"""Growth of the demand that is admitted at once even then: it is mostly noise of its measurement."""
_STEP = 0.004
"""Smaller changes, as a share of the demand, are not worth an order."""


class RateController:
    """Turns temperatures into a budget of inferences a second for all models together."""

    def __init__(self) -> None:
        self.budget_fps = math.inf
        """What is allowed now; infinite where nothing is limited."""
        self._sensor = _Sensor()
        self._output = self._integral = math.inf
        self._started = False
        self._held = True
        self._resting_s = 0.0
        self._calm_fps = 0.0
        self._mean_c = 0.0
        self._trimmed_s = 0.0

    @property
    def temperature_c(self) -> float:
        """The temperature without its noise, some seconds old."""
        return self._sensor.fast_c

    @property
    def mean_c(self) -> float:
        """The temperature over about the last half minute."""
        return self._sensor.slow_c

    def observe(self, at_s: float, temperature_c: float) -> None:
        """Take a temperature while nothing runs that could be slowed down."""
        self._sensor.observe(at_s, temperature_c)

    def restart(self, budget_fps: float) -> None:
        """Go on from another budget, such as the lowest one after a pause."""
        self.budget_fps = self._output = self._integral = self._calm_fps = budget_fps
        self._held = False
        self._resting_s = 0.0

    def resume(self, demand_fps: float, set_point_c: float) -> None:
        """Go on after a pause that had nothing to do with heat: with care where it is warm."""
        if self._sensor.fast_c > set_point_c - _START_C:
            self.restart(_START * demand_fps)
        else:
            self.budget_fps, self._held = math.inf, True

    def step(
        self, at_s: float, temperature_c: float, *, set_point_c: float, demand_fps: float, floor_fps: float
    ) -> float:
        """Take one temperature.

        Args:
            at_s: when it was read; readings may come at any pace.
            temperature_c: as the sensor gives it.
            set_point_c: to stay under.
            demand_fps: inferences a second if nothing held the models back; above 0.
            floor_fps: the least that makes sense, at most the demand.

        Returns:
            The budget, at least ``floor_fps``; the demand or more means that nothing is limited.
        """
        passed_s = self._sensor.observe(at_s, temperature_c)
        if not self._started:
            self._started = True
            self.resume(demand_fps, set_point_c)
        above_c = self._sensor.slow_c - set_point_c
        if above_c < -_WARM_C - 2 and self.budget_fps >= demand_fps and self._held:
            self.budget_fps, self._held = math.inf, True
        if math.isinf(self.budget_fps):
            if above_c < -_WARM_C and self._sensor.ahead_c < set_point_c:
                return self.budget_fps
            self.budget_fps = _SPARE * demand_fps
        self.budget_fps = max(self.budget_fps, floor_fps)
        if self._held:
            self._hold(passed_s, set_point_c, demand_fps, floor_fps)
        if not self._held:
            self._act(passed_s, set_point_c, demand_fps, floor_fps)
        return self.budget_fps

    def _hold(self, passed_s: float, set_point_c: float, demand_fps: float, floor_fps: float) -> None:
        """Let a rate be that fits, and notice when it fits no longer."""
        sensor, target_c = self._sensor, set_point_c + _TARGET_C
        full = self.budget_fps >= demand_fps
        band_c = 0.5 + 0.4 * sensor.noise_c
        too_hot = sensor.slow_c > target_c + band_c or sensor.ahead_c > set_point_c + max(
            _ALARM_C, _ALARM_NOISE * sensor.noise_c
        )
        if too_hot or (not full and sensor.slow_c < target_c - band_c):
            self._held, self._resting_s = False, 0.0
            self.budget_fps = self._output = min(self.budget_fps, demand_fps)
            # Bumpless: from where it is, whatever the proportional part says of the distance so far.
            self._integral = self.budget_fps + self._gain(passed_s, demand_fps) * (sensor.slow_c - target_c)
            self._calm_fps = self.budget_fps
        elif full:
            # What was inferred a moment ago is known to be bearable; that fades.
            goal = _SPARE * demand_fps
            self.budget_fps = goal + max(self.budget_fps - goal, 0.0) * math.exp(-passed_s / _TRIM_S)
        else:
            self._trim(passed_s, target_c, demand_fps, floor_fps)

    def _trim(self, passed_s: float, target_c: float, demand_fps: float, floor_fps: float) -> None:
        """Follow the case, which takes an hour to warm up, in steps too small to swing."""
        self._mean_c += (1 - math.exp(-passed_s / (_TRIM_S / 2))) * (self._sensor.slow_c - self._mean_c)
        self._trimmed_s += passed_s
        error_c = self._mean_c - target_c
        if self._trimmed_s >= _TRIM_S and abs(error_c) > _TRIM_C:
            self._trimmed_s = 0.0
            self.budget_fps = max(self.budget_fps - demand_fps * error_c / _TRIM_K, floor_fps)

    def _act(self, passed_s: float, set_point_c: float, demand_fps: float, floor_fps: float) -> None:
        """Bring the temperature to the target."""
        sensor, target_c = self._sensor, set_point_c + _TARGET_C
        gain = self._gain(passed_s, demand_fps)
        hot = sensor.slow_c > target_c
        speed = gain / max(_RESET_S, 3 * passed_s) * (1.0 if hot else _UP)
        error_c = sensor.fast_c - target_c
        urgency = 1.0 + _URGENCY * max(error_c - 0.3 - sensor.noise_c / 2, 0.0)
        self._integral -= speed * error_c * urgency * passed_s
        wanted = self._integral - gain * (sensor.ahead_c - target_c)
        highest = demand_fps
        if sensor.slow_c < target_c - 1.0:
            highest = min(highest, self._output + min(_RISE_PER_S * passed_s, _RISE_PER_READING) * demand_fps)
        self._output = max(min(wanted, highest), floor_fps)
        self._integral += (self._output - wanted) * min(1.0, passed_s / 20)
        if abs(self._output - self.budget_fps) > _STEP * demand_fps or self._output in {floor_fps, demand_fps}:
            self.budget_fps = self._output
        self._calm_fps += _share(passed_s, _REST_S) * (self._output - self._calm_fps)
        at_ease = abs(sensor.slow_c - target_c) < 0.15 + 0.3 * sensor.noise_c
        if at_ease or (self._output >= demand_fps and not hot):
            self._resting_s += passed_s
        else:
            self._resting_s = 0.0
        if self._resting_s >= max(_REST_S, 2 * passed_s):
            self._held = True
            # Not the last value, which is as noisy as the last reading.
            self.budget_fps = demand_fps if self._output >= demand_fps else max(self._calm_fps, floor_fps)
            self._mean_c, self._trimmed_s = sensor.slow_c, 0.0

    @staticmethod
    def _gain(passed_s: float, demand_fps: float) -> float:
        """Inferences a second for each kelvin."""
        # Readings that come rarely see the junction's whole answer in one step: less gain, or it would swing.
        return _GAIN_PER_K * demand_fps / (1 + passed_s / 10)


class _Sensor:
    """A noisy temperature, its noise, and where it will be."""

    def __init__(self) -> None:
        self.fast_c = self.slow_c = 0.0
        self.noise_c = 0.1
        """Standard deviation of one reading."""
        self._slope = 0.0
        self._at_s: float | None = None
        self._last_c = 0.0

    @property
    def ahead_c(self) -> float:
        return self.fast_c + _LEAD_S * self._slope

    def observe(self, at_s: float, temperature_c: float) -> float:
        """Take a reading; gives the seconds since the one before, 0 for the first."""
        if self._at_s is None:
            self._at_s, self._last_c = at_s, temperature_c
            self.fast_c = self.slow_c = temperature_c
            return 0.0
        passed_s = min(max(at_s - self._at_s, 0.0), 60.0)
        if passed_s == 0.0:
            return 0.0
        # Neighbours differ by their noise (mean |difference| of two normal values: 2 / sqrt(pi) sigma) and the slope.
        step_c = abs(temperature_c - self._last_c - self._slope * passed_s)
        self.noise_c += 0.02 * (min(step_c, 3.0) * math.sqrt(math.pi) / 2 - self.noise_c)
        self._at_s, self._last_c = at_s, temperature_c
        before_c = self.fast_c
        # Readings that are rare or noisy have to be averaged for longer.
        share = _share(passed_s, max(2.5 + 10 * self.noise_c, passed_s))
        self.fast_c += share * (temperature_c - self.fast_c)
        self._slope += share * ((self.fast_c - before_c) / passed_s - self._slope)
        self.slow_c += _share(passed_s, max(20.0, 6 * passed_s if passed_s < 10 else passed_s)) * (
            temperature_c - self.slow_c
        )
        return passed_s


def _share(passed_s: float, constant_s: float) -> float:
    """Of a new value in an exponential average."""
    return 1 - math.exp(-passed_s / constant_s)
