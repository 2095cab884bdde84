"""``python -m evidence.first_hour DIR``: what to test and measure first on a new GPU machine.

Reading order: ``parts`` lists the parts, ``hour`` runs each part in its own process with a timeout
and writes the summary, ``record`` is how a part reports results. Other modules are parts.
"""
