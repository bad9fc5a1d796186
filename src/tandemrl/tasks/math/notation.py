r"""One way of writing for mathematical answers: LaTeX without markup, currencies and shorthand that change nothing."""

import re
import string
import unicodedata
from collections.abc import Callable

NUMBER_WORDS = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty"),
)
GREEK = (
    "alpha|beta|gamma|delta|epsilon|zeta|eta|theta|iota|kappa|lambda|mu|nu|xi|rho|sigma|tau|upsilon|phi|chi|psi|omega"
    "|Gamma|Delta|Theta|Lambda|Xi|Pi|Sigma|Upsilon|Phi|Psi|Omega"
)
LETTER = rf"(?:[A-Za-z]|\\(?:{GREEK})(?![A-Za-z]) ?)"
TEXT = re.compile(r"\\text ?\{(?P<text>[^{}]*)\}")


def clean(answer: str) -> str:
    r"""An answer in which Unicode is LaTeX, words stand in ``\text``, and single spaces are the only ones.

    Examples:
        >>> clean("x²"), clean(r"\bf €1,234"), clean(r"7\ \mathrm{cm}²"), clean("7 3/4")
        ('x^{2}', '1,234', '7 \\text{cm}^{2}', '7\\frac{3}{4}')
    """
    if not answer.isascii():
        answer = _in_latex(answer)
    for pattern, plain in _RULES:
        answer = pattern.sub(plain, answer)
    return answer.strip()


def hidden(text: str) -> bool:
    """Whether a text has characters that cannot be seen, such as one that turns the direction of the text."""
    return any(unicodedata.category(each)[0] == "C" for each in text if each not in string.whitespace)


def without_thousands(text: str) -> str:
    """A text without the commas between thousands. No number begins with 0, and "1, 234" and "(1,234)" are lists.

    Examples:
        >>> without_thousands("1,234.5"), without_thousands("1,234, 5,678"), without_thousands("0,123")
        ('1234.5', '1234, 5678', '0,123')
    """
    return _THOUSANDS.sub(lambda number: number[0].replace(",", ""), text)


def split(answer: str, separators: str = ",;") -> tuple[str, ...]:
    """The parts of an answer between separators that are outside of brackets; ``]`` and ``)`` close either kind."""
    parts, depth = [""], 0
    for character in answer:
        depth += (character in "([{") - (character in ")]}")
        if character in separators and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return tuple(part.strip() for part in parts)


def _in_latex(text: str) -> str:
    """x₁² as x_{1}^{2}, ⅓ as 1/3, θ as a macro; no currencies."""
    text = _RAISED.sub(lambda run: f"{'^' if run[1] else '_'}{{{run[0]}}}", text.translate(_SIGNS))
    text = unicodedata.normalize("NFKC", re.sub("[¼-¾⅐-⅞]", r" \g<0>", text)).translate(_SIGNS)
    text = re.sub(r"([√∛]) ?(?:\(([^()]*)\)|(\d+|[A-Za-z](?![A-Za-z])))", r"\1{\2\3}", "".join(map(_character, text)))
    return text.replace("√", r"\sqrt").replace("∛", r"\sqrt[3]")


def _character(character: str) -> str:
    name = unicodedata.name(character, "")
    if name.startswith("GREEK"):
        letter = name.split()[-1].replace("LAMDA", "LAMBDA")
        return rf"\{letter.title() if 'CAPITAL' in name else letter.lower()} "
    return "" if unicodedata.category(character) == "Sc" and character != "$" else character


def _plain(name: re.Match[str]) -> str:
    return _PLAIN.get(name[1], name[0])


_RAISED = re.compile("([²³¹⁰-ⁿ]+)|[₀-ₜ]+")
_TABLE = r"""
    −–‐‑‒﹣➖ -  ×✕✖ \times  ⋅·∙• \cdot  ÷ \div  ∕⁄ /  ∶ :  ∪⋃ \cup  ∩⋂ \cap  ∅⌀Ø \emptyset  ∈ \in  ∖ \setminus  ∣ |
    ∞ \infty  ± \pm  → \to  ∠ \angle  ≈ \approx  ≡ \equiv  ≠ \ne  ≤⩽≦ \le  ≥⩾≧ \ge  ⌊ \lfloor  ⌋ \rfloor  ⌈ \lceil
    ⌉ \rceil  ′ '  °º˚ ^\circ  。 .  “” "  ‘’ '  ℝ \mathbb{R}  ℤ \mathbb{Z}  ℚ \mathbb{Q}  ℕ \mathbb{N}  ℂ \mathbb{C}
"""
_SIGNS: dict[int, str | None] = {
    ord(character): latex + " " * latex[-1].isalpha()
    for characters, latex in zip(_TABLE.split()[::2], _TABLE.split()[1::2], strict=True)
    for character in characters
}
_SIGNS |= dict.fromkeys(map(ord, "\u200b\u200c\u200d\u2060\ufeff\u00ad"))


# ---- rules ---------------------------------------------------------------------------------------------------------


_NAMES = {
    "": "bf it bfseries boldmath displaystyle textstyle left right large Large LARGE huge Huge small big Big bigg Bigg "
    "bigl bigr Bigl Bigr biggl biggr Biggl Biggr euro pounds texteuro",
    " ": "quad qquad thinspace",
    r"\text": "textnormal textrm textsf texttt textup textsl textsc textmd textit textbf mbox hbox emph rm mathrm "
    "mathsf mathit mathtt mathnormal operatorname",
    r"\mathbf": "bold boldsymbol bm pmb underline",
    **{r"\frac": "tfrac dfrac cfrac", r"\le ": "leq leqslant le", r"\ge ": "geq geqslant ge", r"\ne ": "neq"},
    **{"<": "lt", ">": "gt", r"\emptyset ": "varnothing", r"^\circ ": "degree", r"\mathbb": "Bbb"},
    **{r"\phi": "varphi", r"\epsilon": "varepsilon", r"\theta": "vartheta", r"\{": "lbrace", r"\}": "rbrace"},
}
_PLAIN = {name: plain for plain, names in _NAMES.items() for name in names.split()}
"""What stands for a macro: one name for each thing, nothing for what only changes the looks."""
_PLAIN |= {"<=": r"\le ", ">=": r"\ge ", "!=": r"\ne ", "==": "="}
_PLAIN |= {name: str(i) for i, word in enumerate(NUMBER_WORDS) for name in (word, word.title())}
_SCALES = {"dozen": "12", "hundred": "100", "thousand": "1000", "million": "1000000", "billion": "1000000000"}
_PLAIN |= {name: rf" \cdot {number}" for name, number in _SCALES.items()}
_THOUSANDS = re.compile(
    r"(?:(?<![\w.,(\[{])|(?<=[^\\]\{)|(?<=[(\[{])(?=[0-9,]+,[ ]))[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9]|,[0-9])"
)
"""In brackets, "1,234" counts as a number only if a comma with a space follows, which then separates the entries."""

_TABLE_OF_RULES: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    # Markdown, dollars, spaces, fonts and colours
    (r"(?<![\w)}])\*\*(?! )([^*]+)\*\*(?!\w)", r"\1"),
    (r"^([*_\"`]|__)([^*_\"`]+)\1$", r"\2"),
    (r"\\\$|\$|(?<!\\)\\!|\\(?:text)?color ?(?:\[[^\[\]]*\])?\{[^{}]*\} ?|(?<=\\\\) ?\[[\d.]+ ?(?:pt|ex|em|mm)\]", ""),
    (r"(?<!\\)\\([A-Za-z]+)\*?(?![A-Za-z])", _plain),
    (r"([<>!=]=)", _plain),
    (r"(?:(?<!~)~(?!~)|(?<!\\)\\[ ,;:>]|\s)+", " "),
    (r"\\mathbf ?\{([^{}]*)\}|\\text ?\{ ?([-+]?) ?\}", r"\1\2"),
    (r"\\text ?\{(sin|cos|tan|log|ln|gcd|lcm|det)\}|(?<![A-Za-z\\])(sin|cos|tan|log|ln)(?![A-Za-z])", r"\\\1\2 "),
    (r"\\text ?\{([^{}]*)\^\{([23])\}\}", r"\\text{\1}^{\2}"),
    # one name for each thing
    (r"(?:\\text ?\{)? ?(?<![A-Za-z])(?:[Tt]he )?[Ee]mpty set ?\}?|^\\\{ ?\\\}$", r"\\emptyset "),
    (r"\^ ?(?:\{ ?\\circ ?\}|\\circ ?)", r"^\\circ "),
    (r"\\mathbb ?\{?([A-Z])(?![A-Za-z])\}?|\\([RZQNC])(?![A-Za-z])", r"\\mathbb{\1\2}"),
    (r"^[A-Za-z] ?\\in ?(?=[(\[]|\\\{|\\mathbb)", ""),
    (r"^(?:\\mathbb\{R\}|(?:\\text ?\{)? ?[Aa]ll real(?: numbers|s) ?\}?)$", r"(-\\infty , \\infty )"),
    (r"\\text ?\{ ?[Ii]nfinity ?\}|(?<![\w\\])[Ii]nfinity(?!\w)", r"\\infty "),
    (r"^(?:(?:USD|EUR|GBP|US|Rs\.?) ?(?=[-+]?[\d.]))|(?<=\d) ?(?:USD|EUR|GBP)$", ""),
    (r"\\text ?\{ ?((?![CFKMSGHLmsghl])[A-Za-z]) ?\}", r" \1"),
    # numbers
    (r"(^|[(\[{,;]) ?\+ ?", r"\1"),
    (r"(?<=\d) ?(k?m)/(s|h)$", r" \\text{\1/\2}"),
    (r"\{(,)\}(?=\d{3}(?!\d))|\{(:)\}", r"\1\2"),
    (r" ?\\text ?\{ ?percent\}| ?\bpercent\b|\\%", "%"),
    (r"\\frac\s*(\d|\\pi(?![A-Za-z]))", r"\\frac{\1}"),
    (r"(\\frac\{[^{}]*\})\s*(\d)", r"\1{\2}"),
    (r"(?<![\d./])(\d+) +(\d+) ?/ ?(\d+)(?![\d/])", r"\1\\frac{\2}{\3}"),
    (r"\\sqrt ?(\d)(?!\d)", r"\\sqrt{\1}"),
    (rf"(?<=[\d}}]) ?(?:\\text ?\{{)? ?({'|'.join(_SCALES)})(?![A-Za-z-])\}}?", _plain),
    (r"(?<=\d) ?\^ ?(?:\{ ?\\text ?\{(?:st|nd|rd|th)\} ?\}|\\text ?\{(?:st|nd|rd|th)\})$", ""),
    (rf"^(?:\\text ?\{{)? ?((?i:{'|'.join(NUMBER_WORDS)})) ?\}}?$", _plain),
    # what stands around all of it
    (r"^ *\\\((.*)\\\) *$|^ *\\\[(.*)\\\] *$", r"\1\2"),
    (r"^(?: |= )+|(?:\\\\|\\|[,;: ]|(?<!\.)\.)+$", ""),
    (r"^\{([^{}]*)\}$|^\{([-+]?[\d.,]+)\}(?!\d)", r"\1\2"),
)
_RULES = [(re.compile(pattern), plain) for pattern, plain in _TABLE_OF_RULES]
