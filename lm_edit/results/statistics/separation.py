"""How well a score separates two groups of facts: the area under the ROC curve, with its interval."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from lm_edit.results.statistics.intervals import QUANTILE, Interval, Values

BISECTIONS = 60  # halvings of [0, 1], past the precision of a float


def area_under_curve(first: Values, second: Values) -> float:
    """The probability that a score of the first group is above one of the second, ties counted half.

    It is the Mann-Whitney statistic divided by the number of pairs.

    Args:
        first, second: (facts,) finite scores; at least one each.
    """
    ordered = np.sort(second)
    below = np.searchsorted(ordered, first, side="left")
    up_to = np.searchsorted(ordered, first, side="right")
    return float((below + up_to).mean() / (2 * len(second)))


def area_interval(area: float, num_first: int, num_second: int) -> Interval:
    """The 95% interval of an area: method 5 of Newcombe (Statistics in Medicine 25, 2006, 559-573).

    As Wilson's interval of a share, it has the areas that a normal test at their own standard error does not reject, so
    it does not vanish where the groups separate completely. The standard error is that of Hanley and McNeil with both
    sizes replaced by their mean:

        var(t) = t (1 - t) [1 + N (1 - t) / (2 - t) + N t / (1 + t)] / (m n),   N = (m + n) / 2 - 1.
    """
    mean_size = (num_first + num_second) / 2 - 1

    def distance(t: float) -> float:
        """Of the area from t, in standard errors at t, minus the quantile; below 0 inside the interval."""
        spread = 1 + mean_size * (1 - t) / (2 - t) + mean_size * t / (1 + t)
        return abs(area - t) - QUANTILE * math.sqrt(t * (1 - t) * spread / (num_first * num_second))

    low = 0.0 if area == 0 else _root(distance, outside=0.0, inside=area)
    high = 1.0 if area == 1 else _root(distance, outside=1.0, inside=area)
    return Interval(low, high, "Newcombe")


def _root(distance: Callable[[float], float], outside: float, inside: float) -> float:
    """Where the distance changes its sign: it is positive outside and not inside."""
    for _ in range(BISECTIONS):
        middle = (outside + inside) / 2
        if distance(middle) > 0:
            outside = middle
        else:
            inside = middle
    return inside
