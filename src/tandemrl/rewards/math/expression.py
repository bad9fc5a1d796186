r"""Decides whether two formulas in LaTeX or plain text have the same value, without ``eval``, in bounded time and
memory.

`same` computes the trees that `formula.read` makes of both at fixed points: exactly, in fractions, where the formula
allows it, else with 40 digits. Two different rational functions agree at a point of a large set with a tiny probability
(Schwartz–Zippel), and the points are not known to the model that writes the answer. Of an unknown function such as
the f in ``f(0)`` all that counts is that equal arguments give equal values.

The module does not decide about relations, text, numbers beyond 10^3000, ambiguous notation such as ``1/2x``, and
identities that hold for positive variables only: `formula.read` or `same` returns None.
"""

import math
import threading
import zlib
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from tandemrl.rewards.math.formula import Formula, Node, Unreadable, constant

MAX_BITS = 10_000
"""Magnitude of every intermediate result, as a power of two; larger ones are refused before they are computed."""
DECIMAL_TOLERANCE = Fraction(1, 10**6)
"""Relative difference allowed where a formula contains a decimal number."""
DIGITS = 40
"""Digits of numbers that are not exact. Where they do not decide, more are used, as far as digits times operations are
at most `MAX_WORK`."""
MAX_WORK = 100_000
_GUARD_DIGITS = 15
"""Digits at the end of every result that rounding may have spoilt."""
_POSITIVE_POINTS, _MIXED_POINTS = 3, 3


class _Enormous(Unreadable):
    """A result of more than `MAX_BITS` bits."""


class _Undefined(ArithmeticError):
    """No value at this point, such as 1/0."""


def same(a: Formula, b: Formula, *, tolerance: Fraction | None = None) -> bool | None:
    r"""Whether two formulas are equal wherever both are defined, or None if that is not clear.

    Args:
        tolerance: the relative difference that is allowed. None means that of `near` if one of them contains a decimal
            number, else 0.

    Examples:
        >>> same(read(r"\sqrt{8}"), read(r"2\sqrt2")), same(read("(x+1)^2"), read("x^2+1"))
        (True, False)
    """
    if tolerance is None and not (a.decimal or b.decimal):
        tolerance = Fraction(0)
    variables = a.variables | b.variables
    agree: list[tuple[Any, Any]] = []
    for number in range(_POSITIVE_POINTS + _MIXED_POINTS if variables else 1):
        point = _point(variables, number)
        try:
            x, y, equal = _compared(a, b, point, tolerance)
        except _Undefined:
            continue
        except (Unreadable, RecursionError):
            return None
        if x is None or y is None:
            return None if x is y else False
        if not equal:
            return None if number >= _POSITIVE_POINTS or a.vague or b.vague else False
        if agree and tolerance != 0 and not _vary_alike(agree[-1], (x, y), tolerance):
            return False
        agree.append((x, y))
        if number == _POSITIVE_POINTS - 1 and len(agree) < 2:
            return None
    return True if agree else None


def _vary_alike(before: tuple[Any, Any], now: tuple[Any, Any], tolerance: Fraction | None) -> bool:
    """Whether two sides change alike from point to point: x + 70000 and 70000 are almost equal, and do not."""
    left, right = (_minus(new, old) for new, old in zip(now, before, strict=True))
    return near(left, right, 100 * (DECIMAL_TOLERANCE if tolerance is None else tolerance), Fraction(1, 10**30))


def near(a: Any, b: Any, tolerance: Fraction | None = None, noise: Any = Fraction(0)) -> bool:
    """Whether two values, fractions or numbers of `mpmath`, are equal within a relative tolerance.

    Args:
        tolerance: the relative difference that is allowed. None means that two whole numbers have to be equal, a whole
            number and another number may differ by at most 1e-6, and other numbers by a relative 1e-6.
        noise: by how much numbers of `mpmath` may differ on top of that, because of rounding errors.
    """
    exact = isinstance(a, Fraction) and isinstance(b, Fraction)
    whole = [isinstance(x, Fraction) and x.denominator == 1 for x in (a, b)]
    if not exact:
        a, b = _float(a), _float(b)
    size = max(abs(a), abs(b))
    if tolerance is None:
        tolerance = Fraction(0) if all(whole) else DECIMAL_TOLERANCE
        size = min(size, 1) if any(whole) else size
    if exact:
        return bool(abs(a - b) <= tolerance * size)
    return bool(abs(a - b) <= _float(tolerance) * size + _float(noise))


# ---- computing -----------------------------------------------------------------------------------------------------


_contexts = threading.local()


def _mp() -> Any:
    """Arithmetic with `DIGITS` digits, apart from mpmath's global precision; one context per thread."""
    import mpmath

    if not hasattr(_contexts, "context"):
        _contexts.context = mpmath.MPContext()
        _contexts.context.dps = DIGITS
    return _contexts.context


class _Range:
    """The magnitudes, as powers of two, of the largest and of the smallest number in a calculation."""

    def __init__(self) -> None:
        self.smallest, self.largest, self.count = MAX_BITS, -MAX_BITS, 0

    def add(self, number: Any) -> None:
        self.count += 1
        if number != 0:
            size = (
                number.numerator.bit_length() - number.denominator.bit_length()
                if isinstance(number, Fraction)
                else _mp().mag(number)
            )
            self.smallest, self.largest = min(self.smallest, size), max(self.largest, size)

    def digits(self) -> int:
        """How many digits tell the smallest number from the rounding errors of the largest one."""
        return DIGITS + max(0, math.ceil((self.largest - self.smallest) * math.log10(2)))


def _compared(
    a: Formula, b: Formula, point: Mapping[str, Fraction], tolerance: Fraction | None
) -> tuple[Any, Any, bool]:
    """The values of two formulas at a point, and whether they are equal.

    Rounding errors are relative to the largest number on the way, so a difference as small as they are may be real:
    sqrt(2) + 1e-30 is not sqrt(2), and e^-1000 is not 0. Then both are computed again with enough digits to see it.
    """
    seen = _Range()
    x, y = (_value(side, point, seen) for side in (a, b))
    if x is None or y is None:
        return x, y, False
    if isinstance(x, Fraction) and isinstance(y, Fraction):
        return x, y, near(x, y, tolerance)
    digits, equal = seen.digits(), near(x, y, tolerance, _noise(DIGITS, seen))
    if not equal or digits <= DIGITS + _GUARD_DIGITS or (tolerance != 0 and near(x, y, tolerance)):
        return x, y, equal
    if digits * seen.count > MAX_WORK:
        raise Unreadable
    with _mp().workdps(digits):
        x, y = (_value(side, point, seen) for side in (a, b))
        return x, y, near(x, y, tolerance, _noise(digits, seen))


def _noise(digits: int, seen: _Range) -> Any:
    return _mp().ldexp(1, seen.largest) / 10 ** (digits - _GUARD_DIGITS)


def _point(variables: frozenset[str], number: int) -> dict[str, Fraction]:
    """Values between 1/2 and 4 for the variables; negative for about half of them in the later points."""
    point = {}
    for name in variables:
        noise = zlib.crc32(f"{number}:{name}".encode())
        size = _between(noise)
        negative = number >= _POSITIVE_POINTS and (number == _POSITIVE_POINTS or noise & 1)
        point[name] = -size if negative and name != "infty" else size
    return point


def _between(noise: int) -> Fraction:
    """A value between 1/2 and 4."""
    return Fraction(503 + noise % 3491, 997)


def _any_value(*inputs: Any) -> Fraction:
    """A value of an unknown function: the same for the same inputs, up to rounding."""
    written = [str(each) if isinstance(each, Fraction | str) else _mp().nstr(each, 20) for each in inputs]
    return _between(zlib.crc32(":".join(written).encode()))


def _value(formula: Formula, point: Mapping[str, Fraction], seen: _Range) -> Any:
    """The value at a point; None if it is enormous and nothing in the formula could make it small again."""
    try:
        return _compute(formula.tree, point, seen)
    except _Enormous:
        if _only_grows(formula.tree):
            return None
        raise


def _only_grows(node: Node) -> bool:
    if node.what in ("number", "variable", *_CONSTANTS):
        return True
    grows = node.what in ("+", "*", "^", "!") or (node.what == "-" and len(node.of) == 1)
    return grows and all(_only_grows(operand) for operand in node.of)


def _compute(node: Node, point: Mapping[str, Fraction], seen: _Range) -> Any:
    number = _result(node, point, seen)
    seen.add(number)
    return number


def _result(node: Node, point: Mapping[str, Fraction], seen: _Range) -> Any:
    what, of = node
    if what == "number":
        return of[0]
    if what == "variable":
        return point[of[0]]
    if what in _CONSTANTS:
        return _CONSTANTS[what](_mp())
    if what == "call":
        return _any_value(of[0], point[of[0]], _compute(of[1], point, seen))
    operands = [_compute(operand, point, seen) for operand in of]
    if what == "^":
        return _bounded(_raise(operands[0], operands[1], constant(of[1])))
    try:
        return _bounded(_OPERATIONS[what](*operands))
    except (ZeroDivisionError, ValueError):
        raise _Undefined from None


def _bounded(number: Any) -> Any:
    """Refuses results that are not finite or so large that the next step could take for ever."""
    if isinstance(number, Fraction):
        if max(number.numerator.bit_length(), number.denominator.bit_length()) > 2 * MAX_BITS:
            raise _Enormous
        return number
    context = _mp()
    if not context.isfinite(number):
        raise _Undefined
    if number != 0 and abs(context.mag(number)) > MAX_BITS:
        raise _Enormous
    return number


def _raise(base: Any, exponent: Any, exact: Fraction | None) -> Any:
    """A power; roots of odd degree of negative numbers are real, as at school."""
    if base == 0:
        if _is_real(exponent) and _real(exponent) > 0:
            return Fraction(0)
        raise _Undefined
    size, bits = abs(exponent), abs(_log2(base))
    if size > MAX_BITS:
        raise _Enormous if bits > 1e-3 else Unreadable
    if bits * float(size) > MAX_BITS:
        raise _Enormous
    if isinstance(exponent, Fraction) and exponent.denominator == 1:
        return base ** int(exponent)
    context = _mp()
    if exact is not None and exact.denominator % 2 == 1 and _is_real(base) and _real(base) < 0:
        root = context.power(abs(_float(base)), _float(exact))
        return -root if exact.numerator % 2 else root
    if isinstance(base, Fraction) and isinstance(exponent, Fraction) and base > 0:
        root = _exact_root(base, exponent.denominator)
        if root is not None:
            return root**exponent.numerator
    return context.exp(_float(exponent) * context.log(_float(base)))


def _log2(number: Any) -> float:
    if isinstance(number, Fraction):
        return math.log2(abs(number.numerator)) - math.log2(number.denominator)
    return float(_mp().log(abs(number), 2))


def _exact_root(number: Fraction, degree: int) -> Fraction | None:
    """A root that is a fraction, such as that of 9/4."""
    if degree != 2 or max(number.numerator, number.denominator) > 10**40:
        return None
    over, under = math.isqrt(number.numerator), math.isqrt(number.denominator)
    return Fraction(over, under) if (over * over, under * under) == number.as_integer_ratio() else None


def _float(number: Any) -> Any:
    return _mp().mpf(number.numerator) / number.denominator if isinstance(number, Fraction) else number


def _is_real(number: Any) -> bool:
    return isinstance(number, Fraction) or number.imag == 0


def _real(number: Any) -> Any:
    return number if isinstance(number, Fraction) else number.real


def _binary(operation: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def apply(a: Any, b: Any) -> Any:
        exact = isinstance(a, Fraction) and isinstance(b, Fraction)
        return operation(a, b) if exact else operation(_float(a), _float(b))

    return apply


def _minus(a: Any, *b: Any) -> Any:
    return _binary(lambda x, y: x - y)(a, *b) if b else -a


def _analytic(name: str) -> Callable[[Any], Any]:
    def apply(x: Any) -> Any:
        x = _float(x)
        limit = MAX_BITS // 2
        if (abs(x.real) > limit and name in ("exp", "sinh", "cosh", "tanh")) or abs(x.imag) > limit:
            raise Unreadable
        return getattr(_mp(), name)(x)

    return apply


def _whole(x: Any) -> int:
    if not isinstance(x, Fraction) or x.denominator != 1 or x < 0:
        raise Unreadable
    if x > 1000:
        raise _Enormous
    return int(x)


def _log(x: Any, base: Any = None) -> Any:
    if x == 0 or base == 0:
        raise _Undefined
    context = _mp()
    return context.log(_float(x)) if base is None else context.log(_float(x)) / context.log(_float(base))


_CONSTANTS: dict[str, Callable[[Any], Any]] = {
    "pi": lambda context: +context.pi,
    "e": lambda context: +context.e,
    "i": lambda context: context.mpc(0, 1),
}
_OPERATIONS: dict[str, Callable[..., Any]] = {
    "+": _binary(lambda a, b: a + b),
    "-": _minus,
    "*": _binary(lambda a, b: a * b),
    "/": _binary(lambda a, b: a / b),
    "abs": abs,
    "!": lambda x: Fraction(math.factorial(_whole(x))),
    "binomial": lambda n, k: Fraction(math.comb(_whole(n), _whole(k))),
    "degrees": lambda x: _float(x) * _mp().pi / 180,
    "log": _log,
    "ln": _log,
    "lg": lambda x: _log(x, Fraction(10)),
    **{name: _analytic(name) for name in ("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh", "exp")},
    **{f"{arc}{name}": _analytic(f"a{name}") for name in ("sin", "cos", "tan") for arc in ("arc", "a")},
}
