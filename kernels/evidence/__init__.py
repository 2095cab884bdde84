"""Programs that measure and check ampopt for its authors, in the repository and not in the wheel.

Run each from the root of a checkout, with ``PYTHONPATH=.:kernels``:

- ``python -m evidence.first_hour DIR``: what to test and measure first on a new GPU machine.
- ``python -m evidence.aot``: compile every kernel for GPUs that the machine need not have.
- ``python -m evidence.matrix FILE``: which optimizer works in which setting, as a page.
- ``python -m evidence.fidelity STEPS``: how far steps with small states are from float32's.
- ``python -m evidence.on_ranks N``: sharded optimizers, against torch's.
- ``python -m evidence.host``: the host's time of a step on a GPU, in Triton's interpreter.
- ``python -m evidence.autocast``: the host's time that ``ampopt.autocast`` adds to an operator.

What users measure is in ``ampopt.bench``; ``kernels/RESULTS.md`` has the results of both.
"""
