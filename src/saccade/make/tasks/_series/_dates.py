"""Dates of the rows of a table: read, checked for even steps, and continued.

Steps are named as pandas does: "h", "15min", "D", "MS" for months by their first day.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from pandas import DatetimeIndex

_PART = 12  # dates from which a step can be told where some are missing: a year of months, a fortnight of work days
_SHORT = {4: "%Y", 7: "%Y-%m", 8: "%Y%m%d", 10: "%Y-%m-%d"}  # by the length of a text: dates without a time
_UNITS = {
    "s": "seconds", "min": "minutes", "h": "hours", "D": "days", "B": "work days", "W": "weeks", "MS": "months",
    "ME": "months", "QS": "quarters", "QE": "quarters", "YS": "years", "YE": "years",
}  # fmt: skip
_OFFSET = re.compile(r"(:\d\d(?:\.\d+)?|T\d\d(?:\d\d)*)(?:Z|[+-]\d\d(?::?\d\d)?)$")
_MINUTES = 16  # the length of one that ends with minutes


def read_dates(texts: Sequence[str], places: Sequence[str]) -> DatetimeIndex:
    """Dates in ISO 8601, each after the one before.

    Where offsets differ, as before and after a change to summer time, the dates are UTC if these have even steps, else
    what the clocks show, if that has: midnights are days apart, though one comes after 23 hours.

    Args:
        places: of the rows, for messages: `power.csv: line 7`.

    Raises:
        ValueError: a text that is no such date, dates in another order, dates with and without a time zone.
    """
    import pandas as pd

    try:
        dates = pd.DatetimeIndex(pd.to_datetime(list(texts), format="ISO8601", errors="coerce"))
    except ValueError as error:
        offsets = [bool(_OFFSET.search(text)) for text in texts]
        odd = offsets.index(2 * sum(offsets) < len(offsets)) if len(set(offsets)) > 1 else None
        if odd is not None:
            told = "has an offset from UTC and others have none" if offsets[odd] else "has no offset from UTC"
            raise ValueError(f"{places[odd]}: dates have mixed time zones, {texts[odd]} {told}") from None
        dates = _of_offsets(texts, places, error)
    unreadable = np.flatnonzero(dates.isna())
    if len(unreadable):
        n = unreadable[0]
        raise ValueError(f"{places[n]}: expected a date such as 2024-01-31 or 2024-01-31 13:00, got {texts[n]!r:.40}")
    back = np.flatnonzero(np.diff(dates.asi8) <= 0)
    if len(back):
        n = back[0] + 1
        raise ValueError(
            f"{places[n]}: {texts[n]} does not come after {texts[n - 1]} in the row before; expected rows in the order "
            "of their dates, each date once"
        )
    return dates


def _of_offsets(texts: Sequence[str], places: Sequence[str], error: ValueError) -> DatetimeIndex:
    """Dates with different UTC offsets, as `read_dates` returns them."""
    import pandas as pd

    try:
        dates = pd.DatetimeIndex(pd.to_datetime(list(texts), format="ISO8601", utc=True))
        clocks = pd.DatetimeIndex(pd.to_datetime([_OFFSET.sub(r"\1", text) for text in texts], format="ISO8601"))
    except ValueError:
        raise ValueError(f"{places[0]} and later: dates have mixed time zones ({error})") from None
    return clocks if not _is_even(dates) and _is_even(clocks) else dates


def _is_even(dates: DatetimeIndex) -> bool:
    import pandas as pd

    step = _inferred(dates) if len(dates) > 2 else None
    return step is not None and bool((pd.date_range(dates[0], periods=len(dates), freq=step) == dates).all())


def even_step(dates: DatetimeIndex, places: Sequence[str]) -> str:
    """The step from each of three or more dates to the next, of which some may be missing. ValueError if there is
    none."""
    step = _inferred(dates)
    if step is not None:
        return step
    parts = (_inferred(dates[n : n + _PART]) for n in range(0, max(len(dates) - _PART, 1), _PART))
    known = Counter(part for part in parts if part is not None)
    if known:
        return known.most_common(1)[0][0]
    from pandas.tseries.frequencies import to_offset

    steps = dates[1:] - dates[:-1]
    usual, count = Counter(steps).most_common(1)[0]
    if 2 * count > len(steps) and not any(gap % usual for gap in steps):
        return str(to_offset(usual).freqstr)
    n = int(np.argmax(steps != steps[0]))
    raise ValueError(
        f"{places[n + 1]}: {dates[n + 1]} is {steps[n]} after the previous row, but the first step is {steps[0]}; "
        "expected evenly spaced dates"
    )


def steps_between(dates: DatetimeIndex, step: str, places: Sequence[str]) -> DatetimeIndex:
    """All dates one `step` apart from the first of `dates` to the last. ValueError if these do not include all of
    `dates`, or if most of them are missing in `dates`: then the step is wrong."""
    import pandas as pd

    first = pd.date_range(dates[0], periods=2, freq=step)
    span, usual = dates[-1] - dates[0], first[1] - first[0]
    grid = pd.date_range(dates[0], dates[-1], freq=step) if span <= 4 * len(dates) * usual else first
    odd = np.flatnonzero(~dates.isin(grid))
    if not len(odd) and len(grid) <= 2 * len(dates):
        return grid
    other = np.flatnonzero(pd.date_range(dates[0], periods=len(dates), freq=step) != dates)
    n = int(other[0] if len(grid) > 2 * len(dates) or len(grid) == 2 < len(dates) else odd[0])
    expected = pd.date_range(dates[max(n - 1, 0)], periods=2, freq=step)[min(n, 1)]
    midnight = all(date == date.normalize() for date in (expected, dates[n]))
    wanted, found = (str(date.date() if midnight else date) for date in (expected, dates[n]))
    raise ValueError(f"{places[n]}: expected {wanted} at even steps of {_in_words(step)}, got {found}")


def continued(last: str, step: str, count: int) -> list[str]:
    """The `count` dates after the date `last`, written as it is."""
    import pandas as pd

    dates = pd.date_range(pd.to_datetime(last, format="ISO8601"), periods=count + 1, freq=step)[1:]
    if len(last) in _SHORT:
        return [date.strftime(_SHORT[len(last)]) for date in dates]
    minutes = len(last) == _MINUTES and not any(date.second for date in dates)
    precision = "minutes" if minutes else "auto"
    return [date.isoformat(sep="T" if "T" in last else " ", timespec=precision) for date in dates]


def _in_words(step: str) -> str:
    """`15 minutes` for "15min"; a step of another kind as pandas names it."""
    found = re.fullmatch(r"(\d*)([A-Za-z]+)(-\w+)?", step)
    unit = None if found is None else _UNITS.get(found[2])
    return repr(step) if found is None or unit is None else f"{found[1]} {unit}".lstrip()


def _inferred(dates: DatetimeIndex) -> str | None:
    import pandas as pd

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # later versions of pandas will give an offset instead of its name
        step = pd.infer_freq(dates)
    return None if step is None else str(getattr(step, "freqstr", step))
