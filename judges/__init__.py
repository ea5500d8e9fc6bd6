"""Who decides whether an answer is right: string comparison today, model judges behind the same `Verdict`."""

from judges.base import CORRECT, INCORRECT, LABELS, Verdict
from judges.match import any_exact_match, exact_match, normalise

__all__ = ["CORRECT", "INCORRECT", "LABELS", "Verdict", "any_exact_match", "exact_match", "normalise"]
