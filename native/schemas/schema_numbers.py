"""GBNF expressions for the JSON numbers between two bounds."""

from __future__ import annotations

from decimal import Decimal, localcontext

# Digits of a number without a bound, as in llama.cpp's grammars: double precision has 15 to 17.
_DIGITS = 16
_PLACES = 9  # decimal places of a number with a bound


def integers(least: int | None, most: int | None) -> str | None:
    """Return the expression for the integers of a range; None if it is empty."""
    parts = []
    if most is None or most >= 0:
        parts.append(_naturals(max(least or 0, 0), most))
    if least is None or least < 0:
        negative = _naturals(
            1 if most is None else max(-most, 1), None if least is None else -least
        )
        parts.append(negative and f'"-" ({negative})')
    return _any_of(parts)


def numbers(low: Decimal | None, high: Decimal | None) -> str | None:
    """Return the expression for the decimal numbers from low to high, both included."""
    zero, parts = Decimal(0), []
    if high is None or high >= 0:
        parts.append(_magnitudes(max(low or zero, zero), high))
    if low is None or low < 0:
        least = zero if high is None else max(high.copy_negate(), zero)
        negative = _magnitudes(least, None if low is None else low.copy_negate())
        parts.append(negative and f'"-" ({negative})')
    return _any_of(parts)


def beyond(bound: Decimal, direction: int) -> Decimal:
    """Return a number that is a little larger (direction 1) or smaller (-1) than the bound."""
    places = max(_PLACES, 1 - int(bound.as_tuple().exponent))
    with localcontext() as context:
        context.prec = len(bound.as_tuple().digits) + abs(bound.adjusted()) + places + 2
        return bound + direction * Decimal(10) ** -places


def _any_of(parts: list[str | None]) -> str | None:
    return " | ".join(part for part in parts if part) or None


def _naturals(low: int, high: int | None) -> str | None:
    """The expression for the integers from low (0 or more) to high."""
    if high is None:
        high = 10 ** max(_DIGITS, len(str(low)) + 1) - 1
    if low > high:
        return None
    parts = []
    if low == 0:
        parts.append('"0"')
        low = 1
    whole = []  # numbers of digits of which every number is in the range
    for length in range(len(str(low)), len(str(high)) + 1):
        least, most = max(low, 10 ** (length - 1)), min(high, 10**length - 1)
        if (least, most) == (10 ** (length - 1), 10**length - 1):
            whole.append(length)
        elif least <= most:
            parts.append(_same_length(str(least), str(most)))
    if whole:
        parts.append(f"[1-9] [0-9]{{{whole[0] - 1},{whole[-1] - 1}}}")
    return " | ".join(parts)


def _same_length(low: str, high: str) -> str:
    """The expression for the digit strings from low to high, which have the same length."""
    if low == high:
        return f'"{low}"'
    rest = len(low) - 1
    zeros, nines = "0" * rest, "9" * rest
    if low[0] == high[0]:
        return f'"{low[0]}" ({_same_length(low[1:], high[1:])})'
    first, last = int(low[0]), int(high[0])
    parts = []
    if low[1:] != zeros:
        parts.append(f'"{first}" ({_same_length(low[1:], nines)})')
        first += 1
    if high[1:] != nines:
        parts.append(f'"{last}" ({_same_length(zeros, high[1:])})')
        last -= 1
    if first <= last:
        parts.append(f"[{first}-{last}]" + (f" [0-9]{{{rest}}}" if rest else ""))
    return " | ".join(parts)


def _magnitudes(low: Decimal, high: Decimal | None) -> str | None:
    """The expression for the decimal numbers from low (0 or more) to high."""
    least, above = _split(low)
    most, below = (None, "") if high is None else _split(high)
    if most is not None and (least, above) > (most, below):
        return None
    if least == most:
        return f'"{least}" {_fraction(above, below)}'
    parts = []
    if above:
        parts.append(f'"{least}" {_fraction(above, None)}')
        least += 1
    if most is not None:
        parts.append(f'"{most}" {_fraction("", below)}')
        most -= 1
    if between := _naturals(least, most):
        parts.append(f"({between}) {_fraction('', None)}")
    return " | ".join(parts)


def _split(number: Decimal) -> tuple[int, str]:
    """The whole part of a number, and its decimal places without zeros at the end."""
    whole, _, places = f"{number:f}".partition(".")
    return int(whole), places.rstrip("0")


def _fraction(low: str, high: str | None) -> str:
    """The expression for a point and decimal places; nothing may stand for zeros.

    low, high: decimal places without zeros at the end, high None for any.
    """
    return f'("." ({_places(low, high)}))' + ("" if low else "?")


def _places(low: str, high: str | None) -> str:
    """The expression for one decimal place or more from low to high, as in `_fraction`."""
    if high is None and not low:
        return f"[0-9]{{1,{_PLACES}}}"
    if not high and high is not None:
        return f'"0"{{1,{_PLACES}}}'
    first = int(low[0]) if low else 0
    last = 9 if high is None else int(high[0])
    if first == last:
        return f'"{first}" {_more_places(low[1:], None if high is None else high[1:])}'
    parts = []
    if low:
        parts.append(f'"{first}" {_more_places(low[1:], None)}')
        first += 1
    if high is not None:
        parts.append(f'"{last}" {_more_places("", high[1:])}')
        last -= 1
    if first <= last:
        parts.append(f"[{first}-{last}] {_more_places('', None)}")
    return " | ".join(parts)


def _more_places(low: str, high: str | None) -> str:
    return f"({_places(low, high)})" + ("" if low else "?")
