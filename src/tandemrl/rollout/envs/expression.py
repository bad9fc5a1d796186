r"""Whether two formulas have the same value: LaTeX or plain text, no ``eval``, bounded time and memory.

`read` turns a formula into a tree, or refuses it. `same` computes both trees at fixed points: exactly, in fractions,
where the formula allows it, else with 40 digits. Two different rational functions agree at a point of a large set with
a tiny probability (Schwartz–Zippel), and the points are not known to the model that writes the answer.

Left to others (`read` or `same` say None): relations, text, unknown functions, numbers beyond 10^3000, ambiguous
notation such as ``1/2x``, and identities that hold for positive variables only.
"""

import functools
import math
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from functools import cache, lru_cache
from typing import Any, NamedTuple

MAX_TOKENS = 400
MAX_DEPTH = 40
MAX_DIGITS = 1000
MAX_BITS = 10_000
"""Magnitude of every intermediate result, as a power of two; larger ones are refused before they are computed."""
DECIMAL_TOLERANCE = Fraction(1, 10**6)
"""Relative difference allowed where a formula contains a decimal number."""
_ROUNDING = Fraction(1, 10**25)
_POSITIVE_POINTS, _MIXED_POINTS = 3, 3


class Formula(NamedTuple):
    """A formula that can be computed. ``decimal``: it contains a decimal number. ``vague``: it can be read in several
    ways (``log`` without base, letters in a row), so that a difference proves nothing."""

    tree: "Node"
    variables: frozenset[str]
    decimal: bool
    vague: bool


class Node(NamedTuple):
    """``what``: an operation, "number" or "variable". ``of``: its operands, or the value or name."""

    what: str
    of: tuple[Any, ...]


class Unreadable(Exception):
    """Not a formula that this module computes."""


class _Enormous(Unreadable):
    """A result of more than `MAX_BITS` bits."""


class _Undefined(ArithmeticError):
    """No value at this point, such as 1/0."""


@lru_cache(1024)
def read(text: str) -> Formula | None:
    r"""The formula that a text is, None if it is none.

    Example:
        >>> read(r"\frac{x}{2}") is not None, read("so x = 2") is None
        (True, True)
    """
    try:
        return _Reader(text).formula()
    except (Unreadable, RecursionError):
        return None


def same(a: Formula, b: Formula, *, tolerance: Fraction | None = None) -> bool | None:
    r"""Whether two formulas are equal wherever both are defined; None if that is not clear.

    Args:
        tolerance: relative difference allowed; None = that of `near` if one contains a decimal number, else none.

    Example:
        >>> same(read(r"\sqrt{8}"), read(r"2\sqrt2")), same(read("(x+1)^2"), read("x^2+1"))
        (True, False)
    """
    if tolerance is None and not (a.decimal or b.decimal):
        tolerance = Fraction(0)
    variables = a.variables | b.variables
    agree = 0
    for number in range(_POSITIVE_POINTS + _MIXED_POINTS if variables else 1):
        point = _point(variables, number)
        try:
            x, y = (_value(side, point) for side in (a, b))
        except _Undefined:
            continue
        except (Unreadable, RecursionError):
            return None
        if x is None or y is None:
            return None if x is y else False
        if not near(x, y, tolerance):
            return None if number >= _POSITIVE_POINTS or a.vague or b.vague else False
        agree += 1
        if number == _POSITIVE_POINTS - 1 and agree < 2:
            return None
    return True if agree else None


def near(a: Any, b: Any, tolerance: Fraction | None = None) -> bool:
    """Whether two values, fractions or numbers of `mpmath`, are equal within a relative tolerance.

    Args:
        tolerance: None = two whole numbers have to be equal, a whole and another one to differ by at most 1e-6, others
            by a relative 1e-6. 0 = equal, for numbers that are no fractions within rounding errors.
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
    rounding = _float(_ROUNDING)
    return bool(abs(a - b) <= max(_float(tolerance), rounding) * max(size, rounding))


# ---- reading -------------------------------------------------------------------------------------------------------

_FUNCTIONS = {
    *("sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "asin", "acos", "atan"),
    *("sinh", "cosh", "tanh", "exp", "ln", "log", "lg"),
}
_GREEK = {
    *("alpha", "beta", "gamma", "delta", "epsilon", "varepsilon", "zeta", "eta", "theta", "vartheta", "iota", "kappa"),
    *("lambda", "mu", "nu", "xi", "rho", "sigma", "tau", "upsilon", "phi", "varphi", "chi", "psi", "omega"),
    *("Gamma", "Delta", "Theta", "Lambda", "Xi", "Sigma", "Phi", "Psi", "Omega"),
}
_SYMBOLS = {
    "×": r"\times ",
    "⋅": r"\cdot ",
    "·": r"\cdot ",
    "÷": r"\div ",
    "−": "-",
    "–": "-",
    "π": r"\pi ",
    "√": r"\sqrt ",
    "∞": r"\infty ",
    "°": r"^\circ ",
    "²": "^2",
    "³": "^3",
    "½": r"\frac{1}{2}",
}
_TOKEN = re.compile(
    r"""\s*(?:
        (?P<repeating> [0-9]*\.[0-9]*\\overline\s*\{[0-9]+\} )
      | (?P<number> (?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+) (?:[eE][-+]?[0-9]+(?![0-9A-Za-z.]))? )
      | \\(?P<command> [A-Za-z]+ )
      | (?P<word> [A-Za-z]+ )
      | (?P<sign> \*\*|[-+*/^_(){}\[\]|!] )
    )""",
    re.VERBOSE,
)
_PRODUCT_SIGNS = {("sign", "*"), ("command", "times"), ("command", "cdot"), ("command", "ast")}
_QUOTIENT_SIGNS = {("sign", "/"), ("command", "div")}
_SPACES = frozenset({"displaystyle", "quad", "qquad", "limits"})
_CLOSING = {"(": ")", "[": "]", "{": "}"}

Token = tuple[str, str]


def _tokens(text: str) -> Iterator[Token]:
    for symbol, written in _SYMBOLS.items():
        text = text.replace(symbol, written)
    text, position, count = text.strip(), 0, 0
    while position < len(text):
        found = _TOKEN.match(text, position)
        count += 1
        if found is None or count > MAX_TOKENS:
            raise Unreadable
        kind, content = str(found.lastgroup), found[str(found.lastgroup)]
        position = found.end()
        if kind == "command" and content in _SPACES:
            continue
        if kind == "number" and len(content) > MAX_DIGITS:
            raise Unreadable
        yield ("sign", "^") if content == "**" else (kind, content)


class _Reader:
    """Recursive descent: sum > product > signed > power > atom. A product without sign binds like one with it."""

    def __init__(self, text: str) -> None:
        self._tokens = list(_tokens(text))
        self._at = 0
        self._depth = 0
        self._variables: set[str] = set()
        self._decimal = False
        self._vague = False

    def formula(self) -> Formula:
        tree = self._sum()
        if self._at < len(self._tokens):
            raise Unreadable
        infinity = Node("variable", ("infty",))
        if "infty" in self._variables and tree not in (infinity, Node("-", (infinity,))):
            raise Unreadable  # infinity minus infinity
        return Formula(tree, frozenset(self._variables), self._decimal, self._vague)

    # -- tokens

    def _peek(self) -> Token:
        return self._tokens[self._at] if self._at < len(self._tokens) else ("end", "")

    def _next(self) -> Token:
        token = self._peek()
        self._at += 1
        return token

    def _take(self, sign: str) -> bool:
        taken = self._peek() == ("sign", sign)
        self._at += taken
        return taken

    def _expect(self, sign: str) -> None:
        if not self._take(sign):
            raise Unreadable

    # -- grammar

    def _sum(self) -> Node:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise Unreadable
        tree = self._product()
        while self._peek() in (("sign", "+"), ("sign", "-")):
            sign = self._next()[1]
            tree = Node(sign, (tree, self._product()))
        self._depth -= 1
        return tree

    def _product(self) -> Node:
        tree = self._signed()
        after_slash = False
        while True:
            token = self._peek()
            if token in _PRODUCT_SIGNS:
                self._next()
                tree, after_slash = Node("*", (tree, self._signed())), False
            elif token in _QUOTIENT_SIGNS:
                self._next()
                if self._peek()[0] == "word" and 1 < len(self._peek()[1]) < 4:  # a/bc
                    raise Unreadable
                tree, after_slash = Node("/", (tree, self._signed())), True
            elif self._begins_atom(token):
                if after_slash:  # 1/2x
                    raise Unreadable
                tree = Node("*", (tree, self._power()))
            else:
                return tree

    def _signed(self) -> Node:
        negative = False
        while self._peek() in (("sign", "+"), ("sign", "-")):
            negative ^= self._next()[1] == "-"
        tree = self._power()
        return Node("-", (tree,)) if negative else tree

    def _begins_atom(self, token: Token) -> bool:
        kind, content = token
        if kind in ("number", "repeating"):
            previous = self._tokens[self._at - 1][0]
            if previous in ("number", "repeating"):  # 1 2
                raise Unreadable
            return True
        if kind == "sign":
            return content in "([{"
        return kind in ("command", "word")

    def _power(self) -> Node:
        tree = self._atom()
        while True:
            if self._take("!"):
                tree = Node("!", (tree,))
            elif self._peek() == ("sign", "^"):
                self._next()
                tree = Node("degrees", (tree,)) if self._degrees() else Node("^", (tree, self._tower()))
            else:
                return tree

    def _tower(self) -> Node:
        """An exponent; in ``2^3^4``, which LaTeX does not allow, all that follows."""
        exponent = self._exponent()
        if self._take("^"):
            self._vague = True
            return Node("^", (exponent, self._tower()))
        return exponent

    def _degrees(self) -> bool:
        """Whether ``\\circ`` or ``{\\circ}`` follows, which is then taken."""
        for pattern in ([("command", "circ")], [("sign", "{"), ("command", "circ"), ("sign", "}")]):
            if self._tokens[self._at : self._at + len(pattern)] == pattern:
                self._at += len(pattern)
                return True
        return False

    def _exponent(self) -> Node:
        if self._take("-"):
            return Node("-", (self._exponent(),))
        if self._peek() in (("sign", "{"), ("sign", "(")):
            return self._group()
        kind, content = self._peek()
        if kind == "number":
            self._vague |= len(content) > 1  # to LaTeX, 2^10 is 2^{1}0
            return self._number(self._next()[1])
        return self._atom() if kind == "command" and content in ("frac", "sqrt") else self._single()

    def _atom(self) -> Node:
        kind, content = self._next()
        if kind == "number":
            return self._mixed(content)
        if kind == "repeating":
            return _repeating(content)
        if kind == "sign":
            return self._bracket(content)
        if kind == "word" and content not in _FUNCTIONS | {"sqrt", "pi"}:
            return self._variable("infty") if content in ("oo", "inf") else self._letters(content)
        if kind in ("command", "word"):
            return self._command(content)
        raise Unreadable

    def _mixed(self, content: str) -> Node:
        r"""A number; ``1\frac{2}{3}`` with whole numbers in it is 1 + 2/3."""
        number = self._number(content)
        if not content.isdigit() or self._peek() != ("command", "frac"):
            return number
        before = self._at, list(self._tokens)
        self._next()
        parts = self._argument(), self._argument()
        if all(part.what == "number" and part.of[0].denominator == 1 for part in parts):
            return Node("+", (number, Node("/", parts)))
        self._at, self._tokens = before
        return number

    def _number(self, content: str) -> Node:
        self._decimal |= not content.isdigit()
        mantissa, _, exponent = content.lower().partition("e")
        if abs(int(exponent or 0)) > MAX_BITS // 4:
            raise Unreadable
        return Node("number", (Fraction(mantissa) * Fraction(10) ** int(exponent or 0),))

    def _bracket(self, opening: str) -> Node:
        if opening == "|":
            tree = self._sum()
            self._expect("|")
            return Node("abs", (tree,))
        if opening not in _CLOSING:
            raise Unreadable
        tree = self._sum()
        self._expect(_CLOSING[opening])
        return tree

    def _group(self) -> Node:
        return self._bracket(self._next()[1])

    def _single(self) -> Node:
        r"""What a command takes without braces: a digit of a number, a letter of a word, or a command."""
        kind, content = self._next()
        if (kind == "number" and content.isdigit()) or kind == "word":
            if len(content) > 1:
                self._at -= 1
                self._tokens[self._at] = (kind, content[1:])
            return Node("number", (Fraction(content[0]),)) if kind == "number" else self._letters(content[0])
        if kind == "command" and (content == "pi" or content in _GREEK):
            return self._command(content)
        raise Unreadable

    def _argument(self) -> Node:
        return self._group() if self._peek() == ("sign", "{") else self._single()

    def _letters(self, word: str) -> Node:
        """Letters in a row are a product; the last one takes a subscript."""
        if len(word) > 3:
            raise Unreadable
        self._vague |= len(word) > 1
        factors = [self._variable(letter) for letter in word[:-1]]
        factors.append(self._variable(word[-1] + self._subscript()))
        return functools.reduce(lambda a, b: Node("*", (a, b)), factors)

    def _variable(self, name: str) -> Node:
        if name in ("e", "i"):
            return Node(name, ())
        self._variables.add(name)
        return Node("variable", (name,))

    def _subscript(self) -> str:
        if not self._take("_"):
            return ""
        if not self._take("{"):
            kind, content = self._next()
            if kind not in ("number", "word", "command") or (len(content) > 1 and kind != "command"):
                raise Unreadable
            return f"_{content}"
        inside = []
        while not self._take("}"):
            kind, content = self._next()
            if kind == "end" or content == "{":
                raise Unreadable
            inside.append(content)
        return "_" + "".join(inside)

    def _command(self, name: str) -> Node:
        if name in ("frac", "tfrac", "dfrac", "cfrac"):
            return Node("/", (self._argument(), self._argument()))
        if name in ("binom", "dbinom", "tbinom"):
            return Node("binomial", (self._argument(), self._argument()))
        if name == "sqrt":
            return self._root()
        if name == "pi":
            return Node("pi", ())
        if name == "infty":
            return self._variable("infty")
        if name in _GREEK:
            return self._variable(name + self._subscript())
        if name in _FUNCTIONS:
            return self._function(name)
        if name in ("lvert", "vert"):
            tree = self._sum()
            if self._next() not in (("command", "rvert"), ("command", "vert")):
                raise Unreadable
            return Node("abs", (tree,))
        raise Unreadable

    def _root(self) -> Node:
        index = Node("number", (Fraction(2),))
        if self._take("["):
            index = self._sum()
            self._expect("]")
        radicand = self._group() if self._peek() in (("sign", "{"), ("sign", "(")) else self._single()
        return Node("^", (radicand, Node("/", (Node("number", (Fraction(1),)), index))))

    def _function(self, name: str) -> Node:
        base = None
        if self._take("_"):
            base = self._argument()
            if name != "log":
                raise Unreadable
        power = None
        if self._take("^"):
            power = self._exponent()
            if _as_fraction(power) is None or (_as_fraction(power) or 0) < 1:  # sin^{-1} is an inverse, not a power
                raise Unreadable
        if self._peek() in (("sign", "("), ("sign", "{")):
            argument = self._group()
        else:  # sin 2x
            argument = self._power()
            while self._begins_factor():
                argument = Node("*", (argument, self._power()))
        if name == "log" and base is None:
            self._vague = True
        tree = Node("log", (argument, base)) if base is not None else Node(name, (argument,))
        return tree if power is None else Node("^", (tree, power))

    def _begins_factor(self) -> bool:
        """Whether an argument without brackets goes on: numbers, letters, constants and fractions, no function."""
        kind, content = self._peek()
        if kind == "command":
            return content in _GREEK or content in ("pi", "frac")
        return kind == "word" and content not in _FUNCTIONS


def _repeating(content: str) -> Node:
    r"""``0.1\overline{6}`` is 1/6."""
    plain, digits = re.fullmatch(r"([0-9.]*)\\overline\s*\{([0-9]+)\}", content).groups()  # type: ignore[union-attr]
    if len(content) > 100:
        raise Unreadable
    places = len(plain.partition(".")[2])
    start = Fraction(plain + "0" if plain.endswith(".") else plain) if plain != "." else Fraction(0)
    return Node("number", (start + Fraction(int(digits), (10 ** len(digits) - 1) * 10**places),))


# ---- computing -----------------------------------------------------------------------------------------------------


@cache
def _mp() -> Any:
    """Arithmetic with 40 digits, apart from mpmath's global precision."""
    import mpmath

    context = mpmath.MPContext()
    context.dps = 40
    return context


def _point(variables: frozenset[str], number: int) -> dict[str, Fraction]:
    """Values between 1/2 and 4 for the variables; negative for about half of them in the later points."""
    point = {}
    for name in variables:
        noise = zlib.crc32(f"{number}:{name}".encode())
        size = Fraction(503 + noise % 3491, 997)
        negative = number >= _POSITIVE_POINTS and (number == _POSITIVE_POINTS or noise & 1)
        point[name] = -size if negative and name != "infty" else size
    return point


def _value(formula: Formula, point: Mapping[str, Fraction]) -> Any:
    """The value at a point; None if it is enormous and nothing in the formula could make it small again."""
    try:
        return _compute(formula.tree, point)
    except _Enormous:
        if _only_grows(formula.tree):
            return None
        raise


def _only_grows(node: Node) -> bool:
    if node.what in ("number", "variable", *_CONSTANTS):
        return True
    grows = node.what in ("+", "*", "^", "!") or (node.what == "-" and len(node.of) == 1)
    return grows and all(_only_grows(operand) for operand in node.of)


def _compute(node: Node, point: Mapping[str, Fraction]) -> Any:
    what, of = node
    if what == "number":
        return of[0]
    if what == "variable":
        return point[of[0]]
    if what in _CONSTANTS:
        return _CONSTANTS[what](_mp())
    operands = [_compute(operand, point) for operand in of]
    if what == "^":
        return _bounded(_raise(operands[0], operands[1], _as_fraction(of[1])))
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


def _as_fraction(node: Node) -> Fraction | None:
    """The value of a tree of numbers, signs and quotients such as 1/3."""
    if node.what == "number":
        return Fraction(node.of[0])
    parts = [_as_fraction(operand) for operand in node.of if isinstance(operand, Node)]
    if None in parts or not parts:
        return None
    if node.what == "-" and len(parts) == 1:
        return -parts[0]  # type: ignore[operator]
    if node.what == "/" and parts[1] != 0:
        return parts[0] / parts[1]  # type: ignore[operator]
    return None


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
