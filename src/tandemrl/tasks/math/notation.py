r"""One way of writing for mathematical answers: LaTeX without markup, currencies and shorthand that change nothing."""

import html
import re
import string
import unicodedata
from collections.abc import Callable

NUMBER_WORDS = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty"),
)
TEXT = re.compile(r"\\text ?\{(?P<text>[^{}]*)\}")


def clean(answer: str) -> str:
    r"""An answer in which Unicode is LaTeX, words stand in ``\text``, and single spaces are the only ones.

    Examples:
        >>> clean("½"), clean(r"\bf €1,234"), clean(r"7\ \mathrm{cm}²"), clean("7 3/4")
        ('\\frac{1}{2}', '1234', '7 \\text{cm}^{2}', '7\\frac{3}{4}')
    """
    if _PLAIN_NUMBER.fullmatch(answer):
        return answer
    answer = answer.translate(_UNSEEN)
    if "&" in answer:
        answer = _ENTITY.sub(lambda entity: html.unescape(entity[0]), answer)
    if not answer.isascii():
        answer = _in_latex(answer)
    for pattern, plain in _RULES:
        answer = pattern.sub(plain, answer)
    return answer


def hidden(text: str) -> bool:
    """Whether a text has characters that cannot be seen, such as one that turns the direction of the text."""
    return any(unicodedata.category(each) in _CONTROL for each in text if not each.isspace() and each not in _ASCII)


def without_thousands(text: str) -> str:
    """A text without the commas between thousands. No number begins with 0, and "1, 234" and "(1,234)" are lists.

    Examples:
        >>> without_thousands("1,234.5"), without_thousands("1,234, 5,678"), without_thousands("0,123")
        ('1234.5', '1234, 5678', '0,123')
    """
    return _THOUSANDS.sub(lambda number: number[0].replace(",", ""), text)


def split(answer: str, separators: str = ",;") -> tuple[str, ...]:
    """The parts of an answer between separators that are outside of brackets; ``]`` and ``)`` close either kind."""
    parts, depth, start = [], 0, 0
    for at, character in enumerate(answer):
        depth += (character in "([{") - (character in ")]}")
        if character in separators and depth == 0:
            parts.append(answer[start:at])
            start = at + 1
    return tuple(part.strip() for part in [*parts, answer[start:]])


# --------------------------------------------------------------------------------------------------------------------


def _in_latex(text: str) -> str:
    """x₁² as x_{1}^{2}, ⅓ as a fraction, θ as a macro, any digit as one of 0 to 9; no currencies."""
    text = _SCRIPT.sub(_script, text.translate(_LATEX))
    text = re.sub(r"([√∛∜]) ?(?:(\d+|[A-Za-z](?![A-Za-z]))|\(([^()]*)\))?", _root, text)
    return "".join(each if each.isascii() else _character(each) for each in text)


def _script(run: re.Match[str]) -> str:
    inside = unicodedata.normalize("NFKC", run[0]).replace("\N{MINUS SIGN}", "-")
    return f"{'^' if run[0][0] in _RAISED else '_'}{{{inside}}}"


def _root(root: re.Match[str]) -> str:
    inside = root[2] or root[3]
    return rf"\sqrt{('', '[3]', '[4]')['√∛∜'.index(root[1])]}" + (f"{{{inside}}}" if inside else "")


def _character(character: str) -> str:
    if (digit := unicodedata.decimal(character, None)) is not None:
        return str(digit)
    if unicodedata.category(character) == "Sc":
        return ""
    plain = unicodedata.normalize("NFKC", character)
    over, slash, under = plain.partition("\N{FRACTION SLASH}")
    if slash:
        return rf"\frac{{{over}}}{{{under}}}" if over and under else "/"
    if character in "ℝℤℚℕℂ":
        return rf"\mathbb{{{plain}}}"
    if "MATHEMATICAL" in unicodedata.name(character, "") and plain.isascii():
        return plain
    return _GREEK.get(plain, plain if plain.isascii() and not plain.isspace() else character)


_PLAIN_NUMBER = re.compile(r"-?[0-9]+(?:\.[0-9]+)?")
_ASCII = frozenset(string.printable)
_CONTROL = {"Cc", "Cf", "Co", "Cs", "Cn"}
_UNSEEN = {
    **dict.fromkeys(map(ord, "\u200b\u200c\u200d\u2060\ufeff\u00ad")),
    **{fullwidth: fullwidth - 0xFEE0 for fullwidth in range(0xFF01, 0xFF5F)},
}
_ENTITY = re.compile(r"&(?:#\d{1,6}|#x[0-9a-fA-F]{1,6}|[A-Za-z]{2,}\d*);")
_LATEX = {
    ord(character): latex
    for characters, latex in (
        *(("−–‐‑‒﹣➖", "-"), ("×✕✖", r"\times "), ("⋅·∙•", r"\cdot "), ("÷", r"\div "), ("∕⁄", "/"), ("∶", ":")),
        *(("∪⋃", r"\cup "), ("∩⋂", r"\cap "), ("∅⌀Ø", r"\emptyset "), ("∈", r"\in "), ("∖", r"\setminus ")),
        *(("∞", r"\infty "), ("±", r"\pm "), ("→", r"\to "), ("∠", r"\angle "), ("≈", r"\approx ")),
        *(
            ("≡", r"\equiv "),
            ("≠", r"\ne "),
            ("≤⩽≦", r"\le "),
            ("≥⩾≧", r"\ge "),
            ("⌊", r"\lfloor "),
            ("⌋", r"\rfloor "),
        ),
        *(("⌈", r"\lceil "), ("⌉", r"\rceil "), ("∣", "|"), ("′", "'"), ("°º˚", r"^\circ "), ("٫", "."), ("٬、", ",")),
        *(("。", "."), ("٪", "%"), ("\N{MICRO SIGN}", r"\mu "), ("“”", '"'), ("‘’", "'")),
    )
    for character in characters
}
_RAISED = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ⁿⁱˣʸᵃᵇᵏᵐᵗ"
_SCRIPT = re.compile(f"[{_RAISED}]+|[₀₁₂₃₄₅₆₇₈₉₊₋₌₍₎ₐₑₒₓₕₖₗₘₙₚₛₜᵢⱼ]+")
_GREEK = {
    letter: rf"\{name} "
    for letter, name in zip(
        "αβγδεζηθικλμνξπρςστυφχψωϑϕϵΓΔΘΛΞΠΣΥΦΨΩ",
        re.findall(
            "[A-Za-z]+",
            """
            alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi pi rho sigma sigma tau
            upsilon phi chi psi omega theta phi epsilon Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi
            Omega
            """,
        ),
        strict=True,
    )
}
_SCALES = {"dozen": "12", "hundred": "100", "thousand": "1000"} | {
    name: f"1{'0' * zeros}" for name, zeros in (("million", 6), ("billion", 9), ("trillion", 12))
}
_CODES = "USD|EUR|GBP|JPY|CNY|RMB|INR|CAD|AUD|CHF"
_THOUSANDS = re.compile(
    r"(?:(?<![\w.,(\[{])|(?<=[^\\]\{)|(?<=[(\[{])(?=[0-9,]+,[ ]))"
    r"[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9]|,[0-9])"
)
"""In brackets, "1,234" counts as a number only if a comma with a space follows, which then separates the entries."""


def _number_in_words(found: re.Match[str]) -> str:
    r"""7 for ``\text{seven}`` and "7 (seven)"; "7 (six)" stays."""
    digits = str(NUMBER_WORDS.index(found["word"].lower()))
    return digits if found["digits"] in (None, digits) else found[0]


_RULES: list[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]] = [
    (re.compile(pattern), plain)
    for pattern, plain in (
        # HTML and Markdown
        (r"~~(.+?)~~", r"\\sout{\1}"),
        (r"<sup>([^<>]*)</sup>", r"^{\1}"),
        (r"<sub>([^<>]*)</sub>", r"_{\1}"),
        (r"</?(?:b|i|em|strong|u|span|p|div|code|mark|font|answer)(?: [^<>]*)?>", ""),
        (r"(?<![\w)}])\*\*(?! )([^*]+)\*\*(?!\w)", r"\1"),
        (r"^([*_\"`]|__)([^*_\"`]+)\1$", r"\2"),
        # spaces, dollars, fonts and colours
        (r"\\\$|\$", ""),
        (r"(?<!\\)\\!", ""),
        (r"(?<!\\)\\[hm]space ?\{[^{}]*\}|(?<!\\)\\(?:q?quad|thinspace|enspace|medspace|thickspace)(?![A-Za-z])", " "),
        (r"~|(?<!\\)\\[ ,;:>]|\s", " "),
        (r" +", " "),
        (r"\\\\ ?\[-?[0-9.]+ ?(?:pt|ex|em|mm|cm)\]", r"\\\\"),
        (r"\\(?:text)?color ?(?:\[[^\[\]]*\])?\{[^{}]*\} ?", ""),
        (
            r"\\(?:bf|it|bfseries|boldmath|normalsize|[lL]arge|LARGE|[hH]uge|small|tiny|(?:text|display)style"
            r"|[bB]igg?[lrm]?|left|right)(?![A-Za-z]) ?",
            "",
        ),
        (r"\{ ?\\(?:rm|sf|tt|sl|it|bf) ([^{}]*)\}", r"\\text{\1}"),
        (r"\\operatorname\*? ?\{(sin|cos|tan|log|ln|gcd|lcm|max|min|det|arcsin|arccos|arctan)\}", r"\\\1 "),
        (
            r"\\(?:text(?:normal|rm|sf|tt|up|sl|sc|md|it|bf)|mbox|hbox|emph|rm|math(?:rm|sf|it|tt|normal)"
            r"|operatorname\*?) ?\{",
            r"\\text{",
        ),
        (r"\\(?:ensuremath|mathbf|boldsymbol|bm|pmb|bold|underline) ?\{([-+\d.,]*)\}", r"\1"),
        (r"^\\(?:underline|mathbf|boldsymbol|bm) ?\{([^{}]*)\}$", r"\1"),
        (r"\\text ?\{ ?([-+]?) ?\}", r"\1"),
        (r"\\text ?\{([^{}]*)\^\{([23])\}\}", r"\\text{\1}^{\2}"),
        (r"^\\text ?\{ ?([-+]?[\d.,]+) ?\}(?=.)", r"\1"),
        # one name for each thing
        (r"<=|≤|\\leq?(?:slant)?(?![A-Za-z])", r"\\le "),
        (r">=|≥|\\geq?(?:slant)?(?![A-Za-z])", r"\\ge "),
        (r"\\lt(?![A-Za-z])", "<"),
        (r"\\gt(?![A-Za-z])", ">"),
        (r"!=|\\neq?(?![A-Za-z])", r"\\ne "),
        (r"==", "="),
        (r"\\[tdc]frac(?![A-Za-z])", r"\\frac"),
        (
            r"\\varnothing(?![A-Za-z])|(?:\\text ?\{)? ?(?<![A-Za-z])(?:[Tt]he )?[Ee]mpty set ?\}?|^\\\{ ?\\\}$",
            r"\\emptyset ",
        ),
        (r"\\var(phi|epsilon|theta)(?![A-Za-z])", r"\\\1"),
        (r"\\degree(?![A-Za-z])|\^ ?\{ ?\\circ ?\}|\^ ?\\circ ?", r"^\\circ "),
        (r"\\lbrace(?![A-Za-z])", r"\\{"),
        (r"\\rbrace(?![A-Za-z])", r"\\}"),
        (r"\\(?:mathbb|mathds|Bbb) ?\{?([A-Z])(?![A-Za-z])\}?|\\([RZQNC])(?![A-Za-z])", r"\\mathbb{\1\2}"),
        (
            r"^(?:[A-Za-z] ?\\in ?)?(?:\\mathbb\{R\}|(?:\\text ?\{)? ?[Aa]ll real(?: numbers|s) ?\}?)$",
            r"(-\\infty , \\infty )",
        ),
        (r"\\text ?\{ ?[Ii]nfinity ?\}|(?<![\w\\])[Ii]nfinity(?!\w)|\\infin(?![A-Za-z])", r"\\infty "),
        (r"\\(?:text)?(?:euro|EUR|pounds|sterling|yen|dollar)(?![A-Za-z])(?:\{\})? ?", ""),
        (rf"^(?:(?:{_CODES}|US|Rs\.?) ?(?=[-+]?[\d.]))|(?<=\d) ?(?:{_CODES})$", ""),
        (r"(?<![A-Za-z\\])(sin|cos|tan|log|ln)(?![A-Za-z])", r"\\\1 "),
        (r"\\text ?\{ ?((?![CFKMSGHLmsghl])[A-Za-z]) ?\}", r" \1"),
        # numbers
        (r"(^|[(\[{,;]) ?\+ ?", r"\1"),
        (r"(?<=\d) ?(k?m)/(s|h)$", r" \\text{\1/\2}"),
        (r"(?<=\d)(?:\\?_|')(?=\d{3}(?!\d))", ","),
        (r"(?<![\w.])(?<!\{,\})[1-9]\d{0,2}(?:\{,\}\d{3})+(?!\d|\{,\})", lambda number: number[0].replace("{,}", "")),
        (r"(?<![\w.,}(\[{])([0-9]+)\{,\}([0-9]+)(?![0-9{])", r"\1.\2"),
        (r"\{,\}", ","),
        (r"\{:\}", ":"),
        (r" ?\\text ?\{ ?percent\}| ?\bpercent\b|\\%", "%"),
        (r"\{?([^{}\\]+)\\over ([^{}\\]+)\}?", r"\\frac{\1}{\2}"),
        (r"\\frac\s*(\d|\\pi(?![A-Za-z]))", r"\\frac{\1}"),
        (r"(\\frac\{[^{}]*\})\s*(\d)", r"\1{\2}"),
        (r"(?<![\d./])(\d+) +(\d+) ?/ ?(\d+)(?![\d/])", r"\1\\frac{\2}{\3}"),
        (r"\\sqrt ?(\d)(?!\d)", r"\\sqrt{\1}"),
        (
            rf"(?<=[\d}}]) ?(?:\\text ?\{{)? ?({'|'.join(_SCALES)})(?![A-Za-z-])\}}?",
            lambda scale: rf" \cdot {_SCALES[scale[1]]}",
        ),
        (r"(?<=\d) ?\^ ?(?:\{ ?\\text ?\{(?:st|nd|rd|th)\} ?\}|\\text ?\{(?:st|nd|rd|th)\})$", ""),
        (
            r"^(?:(?P<digits>\d+) ?(?=\\text ?\{ ?\(|\())?(?:\\text ?\{ ?)?"
            rf"\(?(?P<word>(?i:{'|'.join(NUMBER_WORDS)}))\)?\}}?$",
            _number_in_words,
        ),
        # what stands around all of it
        (r"^ +| +$", ""),
        (r"^\\\((.*)\\\)$|^\\\[(.*)\\\]$", r"\1\2"),
        (r"(?:\\\\|\\|[,;:]| )+$", ""),
        (r"(?<!\.)\.$", ""),
        (r"^= ?", ""),
        (r"^\{([^{}]*)\}$|^\{([-+]?[\d.,]+)\}(?!\d)", r"\1\2"),
        (r"^ +| +$", ""),
    )
]
