"""How a step is run or skipped. Nothing in this package is for users.

The methods of ``ampopt.Optimizer`` delegate to ``optimizer._ampopt``, a
``stepping.StepStrategy``. To follow one ``unscale_and_step`` of ``AdamW``, read in this order:

1. ``ampopt.optimizer.unscale_and_step`` checks whether the call is allowed now (``phase``), turns
   its argument into a loss scale (``ampopt.loss_scale.step_scale``), and returns the next scale.
2. ``rule_step.RuleStep.attempt`` runs the step hooks, if there are any, around ``RuleRunner.step``.
3. ``RuleRunner.step`` reuses the ``plan.Plan`` of the last step, if ``Plan.revalidate`` finds by
   its ``plan_guards`` that only gradients and hyperparameters have changed. Otherwise
   ``RuleRunner._new_plan`` makes a new plan: it checks parameters and states (``param_checks``,
   ``state_checks``), makes missing states (``rule_state``), and collects the tensors of each
   parameter (``param_rows``). What no rule does, such as sparse gradients, takes ``torch_step``.
4. ``plan.Plan.run`` runs the step. With several ranks, ``rank_agreement`` combines overflow flag
   and norm; ``sharding`` has what ``DTensor`` parameters need.
5. ``ampopt_kernels.step.run`` calls the passes of the backend of each device in order: *detect*,
   *control* and *update*; for some rules also *sum_lines* and *reduce*.
6. ``ampopt_kernels.cpu.compiled`` is the CPU backend: C++ made from the rule (``cpu.cpp``), called
   once for each pass, with a table that has a row of addresses for each parameter (``cpu.table``).
   The decision to skip is ``ampopt_kernels.step_decision``, which ``step.Backend.control`` calls;
   the line that skips a step is in ``Compiled.update``.

An optimizer with a hand-written ``step()`` has a ``handwritten_step.HandwrittenStep`` instead:
gradients are unscaled and tested first (``masters``, ``overflow``); then its step is called, not
called, or called and rolled back (``step_rollback``).
"""
