r"""Normal forms of mathematical answers, without markup, units and shorthand that change nothing. Without torch."""

import html
import re
import string
import unicodedata

from tandemrl.rewards.math.formula import FUNCTIONS


def visible(text: str) -> str:
    """A text as it looks: characters of no width are removed, and full-width ones become plain ones."""
    if text.isascii():
        return text
    return text.translate(_VISIBLE)


def _in_latex(text: str) -> str:
    """A text whose Unicode symbols are LaTeX: x₁² as x_{1}^{2}, ⅓ as a fraction, θ as a macro, any digit as 0 to 9."""
    if text.isascii():
        return text
    text = _CURRENCY_SIGN.sub("", text.translate(_LATEX))
    text = _SCRIPT.sub(_script, text)
    text = re.sub(r"([∛∜]) ?(\d+|[A-Za-z](?![A-Za-z]))?", _cube_root, text)
    return "".join(each if each.isascii() else _character(each) for each in text)


def _script(run: re.Match[str]) -> str:
    """Raised or lowered characters in braces. Those in the text of a unit, such as cm², stay."""
    if run[1] is None:
        return run[0]
    inside = unicodedata.normalize("NFKC", run[1]).replace("\N{MINUS SIGN}", "-")
    return f"{'^' if run[1][0] in _RAISED else '_'}{{{inside}}}"


def _cube_root(root: re.Match[str]) -> str:
    return rf"\sqrt[{'34'['∛∜'.index(root[1])]}]" + (f"{{{root[2]}}}" if root[2] else "")


def _character(character: str) -> str:
    if (digit := unicodedata.decimal(character, None)) is not None:
        return str(digit)
    plain = unicodedata.normalize("NFKC", character)
    over, slash, under = plain.partition("\N{FRACTION SLASH}")
    if slash:
        return rf"\frac{{{over}}}{{{under}}}" if over and under else "/"
    if character in _BLACKBOARD:
        return rf"\mathbb{{{plain}}}"
    if unicodedata.category(plain[:1] or " ").startswith("L") and (plain.isascii() or plain in _GREEK_LETTERS):
        return _GREEK_LETTERS.get(plain, plain)
    return character


def hidden(text: str) -> bool:
    """Whether a text has characters that cannot be seen, such as one that turns the direction of the text."""
    return any(unicodedata.category(each) in _UNSEEN for each in text if not each.isspace() and each not in _ASCII)


def clean(answer: str) -> str:
    r"""An answer without markup that changes nothing. ``\frac12``, "7 3/4" and "3 million" are written out, and single
    spaces stay."""
    if _PLAIN_NUMBER.fullmatch(answer):
        return answer
    answer = without_braced_commas(_in_latex(one_text_macro(visible(_without_html(answer)))))
    for old, new in _REWRITES:
        answer = answer.replace(old, new)
    answer = _without_markup(answer)
    answer = re.sub(r"(?<!\\)\\!", "", answer)
    answer = re.sub(r"(?:(?<!\\)\\[ ,;:]|\s)+", " ", answer)
    answer = _ROW_GAP.sub(r"\\\\", answer)
    answer = _EMPHASIS.sub(r"\g<markdown>\g<latex>", answer.strip())
    if _REALS.fullmatch(answer):
        answer = r"(-\infty, \infty)"
    if _EMPTY.fullmatch(answer):
        answer = r"\emptyset"
    answer = re.sub(r"\\(?:left|right)(?![A-Za-z])", "", answer)
    answer = _STYLED_LETTER.sub(r" \1", answer) if "\\" in answer else answer
    answer = re.sub(r" ?\\(?:text|mathrm)\{ ?percent\}| ?\bpercent\b", "%", answer)
    answer = re.sub(r"\\frac\s*(\d|\\pi(?![A-Za-z]))", r"\\frac{\1}", answer)
    answer = re.sub(r"(\\frac\{[^{}]*\})\s*(\d)", r"\1{\2}", answer)
    answer = re.sub(r"(?<![\d./])(\d+) +(\d+) ?/ ?(\d+)(?![\d/])", r"\1\\frac{\2}{\3}", answer).strip()
    answer = SCALE.sub(lambda scale: rf" \cdot {_SCALES[scale[1]]}", answer)
    answer = re.sub(r"^\\\((.*)\\\)$|^\\\[(.*)\\\]$", r"\1\2", answer)
    answer = _ORDINAL.sub("", answer)
    answer = _NUMBER_IN_WORDS.sub(_number_in_words, answer)
    return without_full_stop(answer)


def _number_in_words(found: re.Match[str]) -> str:
    r"""7 for ``\text{seven}`` and "7 (seven)"; "7 (six)" stays."""
    digits = str(NUMBER_WORDS.index(found["word"].lower()))
    return digits if found["digits"] in (None, digits) else found[0]


def _without_html(answer: str) -> str:
    if "~~" in answer:
        answer = re.sub("~~(.+?)~~", r"\\sout{\1}", answer)
    if "&" in answer:
        answer = re.sub(
            r"&(?:#\d{1,6}|#x[0-9a-fA-F]{1,6}|[A-Za-z]{2,}\d*);", lambda entity: html.unescape(entity[0]), answer
        )
    if "</" in answer:
        answer = re.sub(
            r"<su([pb])>([^<>]*)</su\1>", lambda tag: f"{'^' if tag[1] == 'p' else '_'}{{{tag[2]}}}", answer
        )
        answer = re.sub(r"</?(?:b|i|em|strong|u|span|p|div|code|mark|font|answer)(?: [^<>]*)?>", "", answer)
    return answer


def _without_markup(answer: str) -> str:
    """An answer without colours, fonts, spacing, emphasis, quotation marks and currencies around what it says."""
    if "\\" in answer:
        answer = _MARKUP.sub("", answer)
        answer = _SPACING.sub(" ", answer)
        answer = re.sub(r"\\text ?\{ ?(-?) ?\}", r"\1", answer)
        answer = re.sub(r"\{?([^{}\\]+)\\over ([^{}\\]+)\}?", r"\\frac{\1}{\2}", answer)
        answer = re.sub(r"\\(?:mathbb|mathds|Bbb) ?\{?([A-Z])(?![A-Za-z])\}?", r"\\mathbb{\1}", answer)
        answer = re.sub(r"\\text ?\{ ?infinity ?\}", r"\\infty ", answer)
        answer = re.sub(r"^\\text ?\{ ?([-+]?[\d.,]+) ?\}(?=.)", r"\1", answer.strip())
    answer = re.sub(r"(?<![\w\\])[Ii]nfinity(?![\w])", r"\\infty ", answer)
    answer = re.sub(r"(?<![\w)}])\*\*(?! )([^*]+)\*\*(?!\w)", r"\1", answer)
    answer = _CURRENCY_CODE.sub("", answer.strip())
    answer = re.sub(r"(?<=\d)(?:\\?_|'|’)(?=\d{3}(?!\d))", ",", answer)
    answer = re.sub(r"(?:\\\\|\\[,;:!]?|[,;:])$", "", answer).strip()
    answer = re.sub(r"^= ?", "", answer)
    answer = re.sub(r"^\{([^{}]*)\}$|^\{([-+]?[\d.,]+)\}(?!\d)", r"\1\2", answer)
    return _QUOTED.sub(r"\g<inside>", answer)


def without_full_stop(answer: str) -> str:
    """An answer without outer spaces and without a full stop at the end. An ellipsis stays."""
    return re.sub(r"(?<!\.)\.$", "", answer.strip()).strip()


def one_text_macro(answer: str) -> str:
    r"""An answer in which every macro that sets words, such as ``\textnormal{cm}`` or ``{\rm cm}``, is ``\text``."""
    if "\\" not in answer:
        return answer
    answer = _OLD_FONT.sub(r"\\text{\1}", answer)
    answer = _OPERATOR.sub(lambda macro: f"\\{macro[1]} " if macro[1] in FUNCTIONS else rf"\text{{{macro[1]}}}", answer)
    answer = _ITALIC_LETTER.sub(r" \1", answer)
    return _MATHS_FONT.sub(r"\\mathrm{", _WORDS_FONT.sub(r"\\text{", answer))


def without_thousands(text: str) -> str:
    r"""A text without the commas between thousands.

    No number begins with 0, and a comma before a space separates entries: "0,123", "1, 234" and "(1,234)" are lists.

    Examples:
        >>> without_thousands("1,234.5"), without_thousands("1,234, 5,678"), without_thousands("0,123")
        ('1234.5', '1234, 5678', '0,123')
    """
    return _THOUSANDS.sub(lambda number: number[0].replace(",", ""), text)


def without_braced_commas(text: str) -> str:
    """A text in which "1{,}234" is written as 1,234 and the decimal comma of "3{,}14" as 3.14."""
    return _BRACED_COMMA.sub(_comma_or_point, without_braced_thousands(text)).replace("{,}", ",")


def without_braced_thousands(text: str) -> str:
    """A text in which "1{,}234" is written as 1234, also within brackets."""
    return _BRACED_THOUSANDS.sub(lambda number: number[0].replace("{,}", ""), text)


def without_thin_spaces(text: str) -> str:
    """A text without the spaces between thousands, as in "1 234"."""
    return _SPACED_THOUSANDS.sub(lambda number: number[0].replace(" ", ""), text)


def normalise(answer: str) -> str:
    """An answer without spaces, units, markup and shorthand, for comparison as a string.

    The steps are those of Hendrycks et al. (`boxed.normalise_math`), but labels such as "x =" stay, and digits with a
    space between them are kept apart: "7 3/4" is not 73/4.
    """
    return without_spaces(bare(clean(answer)))


def bare(answer: str) -> str:
    """A cleaned answer without units, degrees and percent signs."""
    answer = _TEMPERATURE.sub("", answer)
    for unwanted in (r"\%", "%", *(() if _ANGLE_FUNCTION.search(answer) else _DEGREES)):
        answer = answer.replace(unwanted, "")
    answer = UNIT.sub("", answer.strip()).strip()
    answer = re.sub(r"^\\(?:text|mathrm|mathbf)\{([^{}]*)\}$", r"\1", answer)
    return without_thin_spaces(answer).removesuffix(".").rstrip()


def without_spaces(answer: str) -> str:
    """An answer without spaces, except those between digits, which become "␣". ".5" and ``\\sqrt3`` are written out."""
    answer = re.sub(r"(?<=\d) (?=\d)", "␣", answer).replace(" ", "")
    answer = re.sub(r"(?<!\d)\.(?=\d)", "0.", answer)
    return re.sub(r"\\sqrt(\w)", r"\\sqrt{\1}", answer)


def units_differ(gold: str, answer: str) -> bool:
    """Whether both sides end in known units, and in different ones: cm and m or cm^2, but not cm and centimeters."""
    left, right = _units(gold), _units(answer)
    return bool(left and right) and left != right


def currencies(text: str) -> set[str]:
    """The currencies that a text names."""
    return {name for name, written in _CURRENCIES.items() if re.search(written, text)}


def split(answer: str, separators: str = ",;") -> tuple[str, ...]:
    """The parts of an answer between separators that are outside of brackets.

    ``]`` and ``)`` close either kind of bracket, as in intervals.
    """
    parts, depth, start = [], 0, 0
    for at, character in enumerate(answer):
        depth += (character in "([{") - (character in ")]}")
        if character in separators and depth == 0:
            parts.append(answer[start:at])
            start = at + 1
    return tuple(part.strip() for part in [*parts, answer[start:]])


# --------------------------------------------------------------------------------------------------------------------


def _units(answer: str) -> set[str]:
    """The names of the known units at the end of an answer, and the power of an area or a volume."""
    answer = answer.strip(" .").replace("°", r"^\circ")
    if answer.endswith((r"^\circ", r"^{\circ}")):
        return {"degree"}
    if answer.endswith("%"):
        return {"percent"}
    unit = UNIT.search(answer)
    if unit is None:
        return set()
    text = re.sub(r"\\[a-z]+", "", unit.group().lower()).replace("mph", "miles per hour")
    words = re.findall(r"[a-z]+", text)
    if not all(word in UNITS for word in words):
        return set()
    powers = {power for power, pattern in _POWERS.items() if re.search(pattern, text)}
    over, *under = re.split(r"/|\bper\b", text)
    names = {UNITS[word] for word in re.findall(r"[a-z]+", over)}
    names = (names | {f"per {UNITS[word]}" for part in under for word in re.findall(r"[a-z]+", part)}) - {"unit"}
    return names | powers if names else set()


_POWERS = {"^2": r"\^ ?\{?2|²|sq", "^3": r"\^ ?\{?3|³|cu"}
_VISIBLE = {
    **dict.fromkeys(map(ord, "\u200b\u200c\u200d\u2060\ufeff\u00ad")),
    **{fullwidth: fullwidth - 0xFEE0 for fullwidth in range(0xFF01, 0xFF5F)},
}
_LATEX = {
    ord(character): latex
    for characters, latex in (
        ("−–‐‑‒﹣➖", "-"),
        ("×✕✖", r"\times "),
        ("⋅·∙•", r"\cdot "),
        ("÷", r"\div "),
        ("∪⋃", r"\cup "),
        ("∩⋂", r"\cap "),
        ("∅⌀Ø", r"\emptyset "),
        ("∞", r"\infty "),
        ("∈", r"\in "),
        ("∉", r"\notin "),
        ("∖", r"\setminus "),
        ("±", r"\pm "),
        ("∓", r"\mp "),
        ("→", r"\to "),
        ("∠", r"\angle "),
        ("⊂", r"\subset "),
        ("⊆", r"\subseteq "),
        ("⌊", r"\lfloor "),
        ("⌋", r"\rfloor "),
        ("⌈", r"\lceil "),
        ("⌉", r"\rceil "),
        ("≤⩽≦", "≤"),
        ("≥⩾≧", "≥"),
        ("∕", "/"),
        ("∶", ":"),
        ("∣", "|"),
        ("′", "'"),
        ("º˚", "°"),
        ("٫", "."),
        ("٬、", ","),
        ("。", "."),
        ("٪", "%"),
        ("\N{MICRO SIGN}", r"\mu "),
    )
    for character in characters
}
_RAISED = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ⁿⁱˣʸᵃᵇᵏᵐᵗ"
_LOWERED = "₀₁₂₃₄₅₆₇₈₉₊₋₌₍₎ₐₑₒₓₕₖₗₘₙₚₛₜᵢⱼ"
_SCRIPT = re.compile(rf"\\(?:text|mathrm) ?\{{[^{{}}]*\}}|([{_RAISED}]+|[{_LOWERED}]+)")
_BLACKBOARD = "ℝℤℚℕℂ"
_GREEK_LETTERS = {
    letter: rf"\{name} "
    for letter, name in zip(
        "αβγδεζηθικλμνξπρςστυφχψωϑϕϵΓΔΘΛΞΠΣΥΦΨΩ",
        re.findall(
            "[A-Za-z]+",
            "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi pi rho sigma sigma tau upsilon "
            "phi chi psi omega theta phi epsilon Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega",
        ),
        strict=True,
    )
}
_CURRENCIES = {
    "dollar": r"\\\$|\bdollars?\b|USD",
    "cent": r"¢|\bcents?\b",
    "euro": r"€|\beuros?\b|EUR",
    "pound sterling": "£|GBP",
    "yen": r"¥|\byen\b|JPY",
    "rupee": r"₹|\brupees?\b|INR|\bRs\b",
}
_CURRENCY_SIGN = re.compile(r"[¢£¤¥֏؋৳฿៛₠-⃀﷼￠￡￥￦]")
_CURRENCY_CODE = re.compile(
    r"^(?:(?:USD|EUR|GBP|JPY|CNY|RMB|INR|CAD|AUD|CHF|US|Rs\.?) ?(?=[-+]?[\d.])"
    r"|\\(?:text)?(?:euro|EUR|pounds|sterling|yen|dollar)(?![A-Za-z])(?:\{\})? ?)"
    r"|(?<=\d) ?(?:USD|EUR|GBP|JPY|CNY|RMB|INR|CAD|AUD|CHF)$"
)
_MARKUP = re.compile(
    r"\\(?:text)?color ?(?:\[[^\[\]]*\])?\{[^{}]*\} ?"
    r"|\\(?:bf|it|rm|sf|tt|bfseries|boldmath|normalsize|[lL]arge|LARGE|[hH]uge|small|tiny|textstyle|[bB]igg?[lrm]?)"
    r"(?![A-Za-z]) ?|\\(?:ensuremath|mathbf|boldsymbol|bm|pmb|bold|underline)(?= ?\{[-+\d])"
)
_SPACING = re.compile(
    r"\\(?:q?quad|thinspace|enspace|medspace|thickspace|nobreakspace)(?![A-Za-z])|\\[hm]space ?\{[^{}]*\}|\\>"
)
_QUOTED = re.compile(r"^(?P<mark>[*_\"`]|__|“|‘)(?P<inside>[^*_\"`“”‘’]+)(?:(?P=mark)|[”’])$")
_PLAIN_NUMBER = re.compile(r"-?[0-9]+(?:\.[0-9]+)?")
_ASCII = frozenset(string.printable)
NUMBER_WORDS = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty"),
)
_ORDINAL = re.compile(r"(?<=\d) ?\^ ?(?:\{ ?\\(?:text|mathrm) ?\{(?:st|nd|rd|th)\} ?\}|\\text ?\{(?:st|nd|rd|th)\})$")
_NUMBER_IN_WORDS = re.compile(
    rf"^(?:(?P<digits>\d+) ?(?=\\text ?\{{ ?\(|\())?(?:\\text ?\{{ ?)?\(?(?P<word>{'|'.join(NUMBER_WORDS)})\)?\}}?$",
    re.IGNORECASE,
)
_UNSEEN = {"Cc", "Cf", "Co", "Cs", "Cn"}
_SCALES = {
    "dozen": "12",
    **{
        name: f"10^{{{zeros}}}"
        for name, zeros in zip(("hundred", "thousand", "million", "billion", "trillion"), (2, 3, 6, 9, 12), strict=True)
    },
}
SCALE = re.compile(rf"(?<=[\d}}]) ?(?:\\(?:text|mathrm) ?\{{)? ?({'|'.join(_SCALES)})(?![A-Za-z-])\}}?")


def _comma_or_point(comma: re.Match[str]) -> str:
    """A comma in braces stands between thousands if it can; a single one is a decimal comma otherwise."""
    written = comma[0].replace("{,}", ",")
    return written.replace(",", ".") if written.count(",") == 1 and without_thousands(written) == written else written


_THOUSANDS = re.compile(
    r"(?:(?<![\w.,(\[{])|(?<=[^\\]\{)|(?<=[(\[{])(?=[0-9,]+,[ ]))"
    r"[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9]|,[0-9])"
)
"""In brackets, "1,234" counts as a number only if a comma with a space follows, which then separates the entries."""
_SPACED_THOUSANDS = re.compile(r"(?<![\w.,^}])(?<![0-9] )[1-9][0-9]{0,2}(?: [0-9]{3})+(?! ?[0-9])")
_BRACED_COMMA = re.compile(r"(?<![\w.,}(\[{])[0-9]+(?:\{,\}[0-9]+)+(?![0-9{])")
_BRACED_THOUSANDS = re.compile(r"(?<![\w.])(?<!\{,\})[1-9][0-9]{0,2}(?:\{,\}[0-9]{3})+(?![0-9]|\{,\})")
_WORDS_FONT = re.compile(r"\\(?:text(?:normal|rm|sf|tt|up|sl|sc|md|it|bf)|mbox|hbox|emph|rm) ?\{")
_MATHS_FONT = re.compile(r"\\math(?:sf|it|tt|normal) ?\{")
_ITALIC_LETTER = re.compile(r"(?<![_^{]) ?\\math(?:sf|it|tt|normal) ?\{ ?([A-Za-z]) ?\}")
_OLD_FONT = re.compile(r"\{ ?\\(?:rm|sf|tt|sl|it|bf) ([^{}]*)\}")
_OPERATOR = re.compile(r"\\operatorname\*? ?\{([^{}]*)\}")
_ROW_GAP = re.compile(r"\\\\ ?\[-?[0-9.]+ ?(?:pt|ex|em|mm|cm)\]")
"""The end of a matrix row with the space below it."""
_EMPHASIS = re.compile(r"^\*\*(?P<markdown>.*)\*\*$|^\\(?:underline|mathbf|boldsymbol|bm) ?\{(?P<latex>[^{}]*)\}$")
_REALS = re.compile(
    r"(?:[A-Za-z] ?\\in ?)?(?:\\mathbb ?\{?R\}?|\\R|\\Reals)|(?:\\text ?\{)? ?[Aa]ll real(?: numbers|s) ?\}?"
)
_EMPTY = re.compile(r"(?:\\text ?\{)? ?(?:[Tt]he )?[Ee]mpty set ?\}?|\\\{ ?\\?\}")
_STYLED_LETTER = re.compile(r"(?<![_^{]) ?\\(?:mathrm|text) ?\{((?![CFMSGHLmsghl])[A-Za-z])\}")
"""A letter in a font of its own, unless it is a unit."""
_TEMPERATURE = re.compile(
    r"(?:\^ ?\\circ|\^ ?\{ ?\\circ ?\}|°) ?\\(?:text|mathrm) ?\{ ?[CFK] ?\}$|\\text ?\{ ?° ?[CF] ?\}$"
)
_DEGREES = (r"^\circ", r"^{\circ}", "°")
_ANGLE_FUNCTION = re.compile(r"sin|cos|tan|cot|sec|csc")
_REWRITES = (
    (r"\$", ""),
    ("$", ""),
    ("~", " "),
    ("{,}", ","),
    ("{:}", ":"),
    ("\N{MINUS SIGN}", "-"),
    ("≈", r"\approx "),
    ("≡", r"\equiv "),
    ("<=", "≤"),
    (">=", "≥"),
    ("!=", r"\ne "),
    ("≠", r"\ne "),
    (r"\neq", r"\ne"),
    ("==", "="),
    (r"\displaystyle", ""),
    (r"\varnothing", r"\emptyset"),
    (r"\varphi", r"\phi"),
    (r"\varepsilon", r"\epsilon"),
    (r"\infin ", r"\infty "),
    (r"\degree", r"^\circ "),
    (r"\lbrace", r"\{"),
    (r"\rbrace", r"\}"),
    (r"\tfrac", r"\frac"),
    (r"\dfrac", r"\frac"),
    (r"\cfrac", r"\frac"),
)

_UNIT_NAMES = (
    "cm centimeter centimeters centimetre centimetres",
    "mm millimeter millimeters millimetre millimetres",
    "km kilometer kilometers kilometre kilometres",
    "meter meters metre metres",
    "foot feet ft",
    "inch inches",
    "mile miles",
    "yard yards",
    "second seconds sec secs",
    "minute minutes min mins",
    "hour hours hr hrs",
    "day days",
    "week weeks",
    "month months",
    "year years",
    "kg kilogram kilograms",
    "gram grams",
    "mg milligram milligrams",
    "pound pounds lb lbs",
    "ounce ounces oz",
    "liter liters litre litres",
    "ml milliliter milliliters",
    "dollar dollars",
    "cent cents",
    "degree degrees",
    "radian radians rad",
    "mph",
    "unit units square sq cubic cu per",
)
UNITS = {name: names.split()[0] for names in _UNIT_NAMES for name in names.split()}
_PLAIN_UNIT = "|".join(sorted(UNITS, key=len, reverse=True))
UNITS |= {"m": "meter", "s": "second", "g": "gram", "h": "hour", "l": "liter"}
_SHORT_UNIT = "[msghl]|in|yd|mi|dm|nm"
TEXT = re.compile(r"\\(?:text|mathrm) ?\{(?P<text>[^{}]*)\}")
UNIT = re.compile(
    rf"(?<=[\w}}).\]°]) ?(?:"
    rf"\\(?:text|mathrm) ?\{{(?: ?(?:{_PLAIN_UNIT}|{_SHORT_UNIT})(?![a-z])[/.]?)+ ?[²³]?\}}(?: ?\^ ?\{{?\d\}}?|[²³])?"
    rf"|\\(?:text|mathrm) ?\{{(?:[ .]*|[ .]*(?:{_SHORT_UNIT})[ .]*|(?=[^{{}}]*[^\W\d_]{{2}})(?:[^\W\d_]|[ .,'/-])+)\}}"
    rf"|(?:(?<![A-Za-z])(?:{_PLAIN_UNIT})(?: ?\^ ?\{{?\d\}}?|[²³])?(?: ?/ ?| |$))+)$",
    re.IGNORECASE,
)
"""A unit at the end of an answer: any text macro without digits, or known names (``m`` and ``s`` in a macro only)."""
