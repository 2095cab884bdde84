"""Skip steps with an unusual gradient norm or loss, as steps that overflow are skipped."""

from ampopt.skipping.when import skip_when

__all__ = ["skip_when"]
