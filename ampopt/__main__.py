"""``python -m ampopt``: what is here, and what it makes ampopt do; to begin a bug report with."""

from ampopt.environment import report

if __name__ == "__main__":
    print(report())
