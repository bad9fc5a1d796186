"""What pyproject.toml cannot say: on PyPI the links and pictures of README.md have to lead to the repository."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
REPOSITORY = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]
RAW = REPOSITORY.replace("github.com", "raw.githubusercontent.com")


def absolute(match: re.Match[str]) -> str:
    picture, text, target = match.groups()
    return f"{picture}[{text}]({RAW if picture else f'{REPOSITORY}/blob'}/main/{target})"


LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)]+)\)")
setup(
    long_description=LINK.sub(absolute, (ROOT / "README.md").read_text(encoding="utf-8")),
    long_description_content_type="text/markdown",
)
