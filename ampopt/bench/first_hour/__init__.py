"""``python -m ampopt.bench --first-hour DIR``: what to find out first on a machine with a GPU.

To read in this order: ``parts`` says what is run, ``hour`` runs each part in a process of its own
under a timeout and sums up, ``record`` is how a part reports. All others are parts.
"""
