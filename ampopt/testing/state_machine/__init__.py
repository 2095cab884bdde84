"""A state machine that makes any sequence of calls, beside a reference training.

``machine`` records calls and repeats them. ``records`` makes the optimizer and knows what to
expect; ``steps`` and ``changes`` are the calls. ``sequence`` explains a sequence that fails.
"""
