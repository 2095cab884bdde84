"""The invariants of :class:`ampopt.testing.OptimizerContract`, each with why it matters.

``examples`` has what they are drawn from, ``training`` how they train and compare.
"""
