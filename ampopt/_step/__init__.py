"""How a step is taken, or left out: nothing in here is for users.

A control point of ``ampopt.Optimizer`` asks the optimizer's ``_ampopt``, a
``stepping.StepStrategy``. To follow one ``unscale_and_step`` of a rule, such as that of ``AdamW``,
read in this order:

1. ``ampopt.optimizer.unscale_and_step``: whether it may be called now, under which scale
   (``ampopt.loss_scale.arguments``), and the scale to go on with.
2. ``by_rule.RuleStep.attempt``: the hooks, if there are any, around ``RuleRunner.step``, which
takes
   the plan of the step before, or makes another (``rule_rows``, ``checks``).
3. ``plan.Plan.revalidate``: whether anything has changed but gradients and hyperparameters, in the
   groups (``settings``) or in memory. ``run``: the step, with other ranks where there are some
   (``ranks``).
4. ``ampopt_kernels.step.run``: *detect*, *control* and *update*, by the backend of each device.
5. ``ampopt_kernels.cpu.backend``: those of the CPU, on small tensors in bundles
   (``cpu.bundles``), by loops of C++ where they have been compiled (``cpu.compiled``). The line
   that skips a step is in ``Cpu.update``; the decision is ``Eager.control``.

A ``step()`` that is no rule goes by ``ordinary.OrdinaryStep.attempt`` instead: gradients are
unscaled and judged first (``masters``, ``overflow``), and then it is called, left out, or taken
back (``transaction``).
"""
