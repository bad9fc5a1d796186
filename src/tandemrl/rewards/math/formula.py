r"""Formulas as trees: LaTeX or plain text, read in bounded time without ``eval``.

A letter before brackets is a product where the brackets hold a sum, as in ``n(n-1)``, and a function where they hold a
number or a lone letter, or where its name is that of a function: ``I(0)`` is not zero, nor is ``f(x+1)`` f times x+1.
"""

import functools
import re
from collections.abc import Iterator
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple

MAX_TOKENS = 400
MAX_DEPTH = 40
MAX_DIGITS = 1000
MAX_EXPONENT = 2500
"""Powers of ten in a number such as 1e2500; larger ones are refused."""


class Formula(NamedTuple):
    """A formula that can be computed.

    ``decimal`` says whether it contains a decimal number. ``vague`` says whether it can be read in several ways
    (``log`` without a base, letters in a row), so that a difference proves nothing.
    """

    tree: "Node"
    variables: frozenset[str]
    decimal: bool
    vague: bool


class Node(NamedTuple):
    """A node of a formula. ``what`` is an operation, "number" or "variable"; ``of`` is its operands, value or name."""

    what: str
    of: tuple[Any, ...]


class Unreadable(Exception):
    """A text is not a formula that this module computes."""


@lru_cache(1024)
def read(text: str) -> Formula | None:
    r"""The formula that a text stands for, or None if it is not a formula.

    Examples:
        >>> read(r"\frac{x}{2}") is not None, read("so x = 2") is None
        (True, True)
    """
    try:
        return _Reader(text).formula()
    except (Unreadable, RecursionError):
        return None


def constant(node: Node) -> Fraction | None:
    """The value of a tree of numbers, signs and quotients such as 1/3."""
    if node.what == "number":
        return Fraction(node.of[0])
    parts = [constant(operand) for operand in node.of if isinstance(operand, Node)]
    if None in parts or not parts:
        return None
    if node.what == "-" and len(parts) == 1:
        return -parts[0]  # type: ignore[operator]  # no part is None
    if node.what == "/" and parts[1] != 0:
        return parts[0] / parts[1]  # type: ignore[operator]  # likewise
    return None


# --------------------------------------------------------------------------------------------------------------------

FUNCTIONS = {
    *("sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "asin", "acos", "atan"),
    *("sinh", "cosh", "tanh", "exp", "ln", "log", "lg"),
}
GREEK = {
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
    text = re.sub(r"√ ?([0-9]+)", r"\\sqrt{\1}", text)
    for symbol, written in _SYMBOLS.items():
        text = text.replace(symbol, written)
    text, position, count = text.strip(), 0, 0
    while position < len(text):
        token = _TOKEN.match(text, position)
        count += 1
        if token is None or count > MAX_TOKENS:
            raise Unreadable
        kind, content = str(token.lastgroup), token[str(token.lastgroup)]
        position = token.end()
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
        self._exponent_end = 0
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
            if previous in ("number", "repeating") or self._at != self._exponent_end:
                raise Unreadable  # 1 2, or what may be meant as more digits of an argument: \frac123, \sqrt23, x2
            return True
        if kind == "sign":
            if content == "{" and self._between_numbers():
                raise Unreadable  # 4{5} looks like 45
            return content in "([{"
        return kind in ("command", "word")

    def _between_numbers(self) -> bool:
        """Whether the token here has a number on either side."""
        around = self._tokens[self._at - 1 : self._at + 2 : 2]
        return [kind for kind, _ in around] == ["number", "number"]

    def _power(self) -> Node:
        tree = self._atom()
        while True:
            if self._take("!"):
                tree = Node("!", (tree,))
            elif self._peek() == ("sign", "^"):
                self._next()
                tree = Node("degrees", (tree,)) if self._degrees() else Node("^", (tree, self._tower()))
                self._exponent_end = self._at
                if tree.of[0].what == "variable" and self._applied(tree.of[0].of[0]).what == "call":
                    raise Unreadable  # f^{-1}(0)
            else:
                return tree

    def _tower(self) -> Node:
        """An exponent. In ``2^3^4``, which LaTeX does not allow, it is all that follows the first ``^``."""
        exponent = self._exponent()
        if self._take("^"):
            self._vague = True
            return Node("^", (exponent, self._tower()))
        return exponent

    def _degrees(self) -> bool:
        """Take ``\\circ`` or ``{\\circ}`` if it follows, and return whether it did."""
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
        if kind == "word" and content not in FUNCTIONS | {"sqrt", "pi"}:
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
            if parts[0].of[0] >= parts[1].of[0]:
                raise Unreadable  # 2\frac{5}{3} may be a product
            return Node("+", (number, Node("/", parts)))
        self._at, self._tokens = before
        return number

    def _number(self, content: str) -> Node:
        self._decimal |= not content.isdigit()
        mantissa, _, exponent = content.lower().partition("e")
        if abs(int(exponent or 0)) > MAX_EXPONENT:
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
        if kind == "command" and (content == "pi" or content in GREEK):
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
        factors.append(self._applied(word[-1] + self._subscript()))
        return functools.reduce(lambda a, b: Node("*", (a, b)), factors)

    def _applied(self, name: str) -> Node:
        """A variable, or the value of the function of this name where an argument follows."""
        start = self._at
        if self._take("("):
            argument = self._sum()
            self._expect(")")
            if _is_argument(argument, name):
                self._variables.add(name)
                return Node("call", (name, argument))
            self._at = start
        return self._variable(name)

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
        if name in GREEK:
            return self._applied(name + self._subscript())
        if name in FUNCTIONS:
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
            if constant(power) is None or (constant(power) or 0) < 1:  # sin^{-1} is an inverse, not a power
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
        """Whether a letter, constant or fraction follows, which continues an argument without brackets."""
        kind, content = self._peek()
        if kind == "command":
            return content in GREEK or content in ("pi", "frac")
        return kind == "word" and content not in FUNCTIONS


def _is_argument(tree: Node, name: str) -> bool:
    """Whether ``tree``, in brackets after the letter ``name``, is its argument rather than another factor."""
    inside = tree.of[0] if tree.what == "-" and len(tree.of) == 1 else tree
    if name[0] == "f" or inside.what in ("+", "-"):
        return name[0] == "f"
    names = _names(inside)
    return not names or name[0] in "ghFGH" or (inside.what == "variable" and names != {name})


def _names(tree: Node) -> set[str]:
    """The variables and functions in a tree."""
    operands = (_names(operand) for operand in tree.of if isinstance(operand, Node))
    return {*(name for name in tree.of if isinstance(name, str))}.union(*operands)


def _repeating(content: str) -> Node:
    r"""The number that a repeating decimal stands for: ``0.1\overline{6}`` is 1/6."""
    plain, digits = re.fullmatch(r"([0-9.]*)\\overline\s*\{([0-9]+)\}", content).groups()  # type: ignore[union-attr]  # the caller matched
    if len(content) > 100:
        raise Unreadable
    places = len(plain.partition(".")[2])
    start = Fraction(plain + "0" if plain.endswith(".") else plain) if plain != "." else Fraction(0)
    return Node("number", (start + Fraction(int(digits), (10 ** len(digits) - 1) * 10**places),))
