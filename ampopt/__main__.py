"""``python -m ampopt`` prints versions, devices and their backends, to begin a bug report with."""

from ampopt.environment import report

if __name__ == "__main__":
    print(report())
