"""Loss-scale schedules of other systems, in the variable names and order of their own code."""

from hypothesis import strategies as st

__all__ = ["FLOAT32_MAX", "FLOAT32_TINY", "SYSTEMS", "DeepSpeed", "histories"]

FLOAT32_MAX = (2.0 - 2.0**-23) * 2.0**127
FLOAT32_TINY = 2.0**-126

histories = st.lists(
    st.one_of(st.booleans().map(lambda x: [x]), st.integers(1, 12).map(lambda n: [False] * n)),
    max_size=20,
).map(lambda runs: [x for run in runs for x in run])
"""Strategy of runs: for each step, whether it overflowed."""


class Torch:
    def __init__(self, init, window, hysteresis):
        self.scale, self.growth_interval, self._growth_tracker = init, window, 0

    def update(self, found_inf):
        if found_inf:
            self.scale *= 0.5
            self._growth_tracker = 0
        else:
            successful = self._growth_tracker + 1
            if successful == self.growth_interval:
                if self.scale * 2.0 <= FLOAT32_MAX:
                    self.scale *= 2.0
                self._growth_tracker = 0
            else:
                self._growth_tracker = successful


class Apex:
    def __init__(self, init, window, hysteresis):
        self.scale, self._scale_seq_len, self._unskipped = init, window, 0

    def update(self, has_overflow):
        if has_overflow:
            self.scale /= 2.0
            self._unskipped = 0
        else:
            self._unskipped += 1
        if self._unskipped == self._scale_seq_len:
            self.scale = min(2.0**24, self.scale * 2.0)
            self._unskipped = 0


class DeepSpeed:
    consecutive_hysteresis = False

    def __init__(self, init, window, hysteresis):
        self.scale, self.scale_window = init, window
        self.delayed_shift = self.cur_hysteresis = hysteresis
        self.cur_iter, self.last_overflow_iter = 0, -1

    def update(self, overflow):
        if overflow:
            if self.delayed_shift == 1 or self.cur_hysteresis == 1:
                self.scale = max(self.scale / 2.0, 1)  # raises instead when it is 1 already
            else:
                self.cur_hysteresis -= 1
            self.last_overflow_iter = self.cur_iter
        else:
            if self.consecutive_hysteresis:
                self.cur_hysteresis = self.delayed_shift
            stable_interval = (self.cur_iter - self.last_overflow_iter) - 1
            if stable_interval > 0 and stable_interval % self.scale_window == 0:
                self.cur_hysteresis = self.delayed_shift
                self.scale *= 2.0
        self.cur_iter += 1


class Megatron:
    def __init__(self, init, window, hysteresis):
        self.scale, self.growth_interval, self.hysteresis = init, window, hysteresis
        self._growth_tracker, self._hysteresis_tracker = 0, hysteresis

    def update(self, found_inf):
        if found_inf:
            self._growth_tracker = 0
            self._hysteresis_tracker -= 1
            if self._hysteresis_tracker <= 0:
                self.scale = max(self.scale * 0.5, 1.0)
        else:
            self._growth_tracker += 1
            if self._growth_tracker == self.growth_interval:
                self._growth_tracker = 0
                self._hysteresis_tracker = self.hysteresis
                self.scale = self.scale * 2.0


class Paddle:
    decr_ratio, floor = 0.5, 0.0

    def __init__(self, init, window, hysteresis):
        self.scale, self._incr_every_n_steps = init, window
        self._decr_every_n_nan_or_inf = hysteresis
        self._incr_count = self._decr_count = 0

    def update(self, found_inf):
        if found_inf:
            self._incr_count = 0
            self._decr_count = self._decr_count + 1
            if self._decr_count == self._decr_every_n_nan_or_inf:
                self.scale = max(self.scale * self.decr_ratio, self.floor)
                self._decr_count = 0
        else:
            self._decr_count = 0
            self._incr_count = self._incr_count + 1
            if self._incr_count == self._incr_every_n_steps:
                self.scale = self.scale * 2.0
                self._incr_count = 0


class PaddleFleet(Paddle):
    decr_ratio, floor = 0.8, 1.0


class MindSpore:
    def __init__(self, init, window, hysteresis):
        self.scale, self.scale_window = init, window
        self.cur_iter, self.last_overflow_iter = 1, 0

    def update(self, overflow):
        if overflow:
            self.scale = max(self.scale * (1 / 2), 1)
            self.last_overflow_iter = self.cur_iter
        elif (self.cur_iter - self.last_overflow_iter) % self.scale_window == 0:
            self.scale *= 2
        self.cur_iter += 1


class NNabla:
    def __init__(self, init, window, hysteresis):
        self.scale, self.N, self._counter = init, window, 0

    def update(self, inf_or_nan):
        if inf_or_nan:
            self.scale /= 2.0
            self._counter = 0
            return  # where it calls itself again, on new data
        if self._counter > self.N:
            self.scale *= 2.0
            self._counter = 0
        self._counter += 1


class Keras:
    def __init__(self, init, window, hysteresis):
        self.scale, self.dynamic_growth_steps, self.step_counter = init, window, 0

    def update(self, nonfinite):
        if nonfinite:
            self.step_counter = 0
            self.scale = self.scale / 2.0
        elif self.step_counter == self.dynamic_growth_steps - 1:
            self.step_counter = 0
            self.scale = self.scale * 2.0
        else:
            self.step_counter += 1


class Jmp:
    def __init__(self, init, window, hysteresis):
        self.scale, self.period, self.counter = init, window, 0

    def update(self, nonfinite):
        grads_finite = not nonfinite
        if grads_finite:
            if self.counter == self.period - 1 and self.scale * 2 <= FLOAT32_MAX:
                self.scale = self.scale * 2
        else:
            self.scale = max(1.0, self.scale / 2)
        self.counter = ((self.counter + 1) % self.period) * grads_finite


class Flax:
    def __init__(self, init, window, hysteresis):
        self.scale, self.growth_interval, self.fin_steps = init, window, 0

    def update(self, nonfinite):
        finite = not nonfinite
        grow = self.fin_steps == self.growth_interval
        if finite:
            self.scale = min(self.scale * 2.0, FLOAT32_MAX) if grow else self.scale
        else:
            self.scale = max(self.scale * 0.5, FLOAT32_TINY)
        self.fin_steps = 0 if grow or not finite else self.fin_steps + 1


SYSTEMS = {
    "torch": Torch,
    "apex": Apex,
    "deepspeed": DeepSpeed,
    "megatron": Megatron,
    "paddle": Paddle,
    "paddle-fleet": PaddleFleet,
    "mindspore": MindSpore,
    "nnabla": NNabla,
    "keras": Keras,
    "jmp": Jmp,
    "flax": Flax,
}
