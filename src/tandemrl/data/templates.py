"""The variables that a chat template gets beside the messages (``data.template_arguments``). No torch.

The template itself is applied in ``rows.chat_tokens`` (prompts) and ``rollout.envs.rendering`` (observations).
"""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from tandemrl.config import ConfigError, DataConfig

DEFAULT_ARGUMENTS: Mapping[str, Any] = DataConfig().template_arguments
"""``data.template_arguments`` of a config that says nothing about them."""

_OURS = ("messages", "tools", "add_generation_prompt")


def template_of(tokenizer: Any, tools: Sequence[Any] = ()) -> str:
    """The chat template that a tokenizer applies, of several with names the one that fits, or "" if it has none.

    Raises:
        ConfigError: there are several, and none of them fits.
    """
    if not getattr(tokenizer, "chat_template", None):
        return ""
    try:
        return str(tokenizer.get_chat_template(tools=list(tools) or None))
    except ValueError as error:
        raise ConfigError(f"tokenizer {getattr(tokenizer, 'name_or_path', '')!r}: {error}") from error


def template_variables(tokenizer: Any, arguments: Mapping[str, Any], tools: Sequence[Any] = ()) -> dict[str, Any]:
    """The variables that a tokenizer's chat template gets: the arguments that are not None.

    Args:
        arguments: ``data.template_arguments``.
        tools: the schemas of the tools, which may choose the template.

    Raises:
        ConfigError: the template reads no such variable, so that the argument would change nothing, or the library sets
            it itself. What has its default value (`DEFAULT_ARGUMENTS`) need not be read: a template that cannot let a
            model think need not be told to keep it from thinking.
    """
    given = {name: value for name, value in arguments.items() if value is not None}
    if ours := [name for name in given if name in _OURS]:
        raise ConfigError(f"data.template_arguments.{ours[0]}: set by the library; leave it out")
    stated = [name for name, value in given.items() if (name, value) not in DEFAULT_ARGUMENTS.items()]
    if stated and (template := template_of(tokenizer, tools)):
        from jinja2 import TemplateError

        try:
            read = _variables_read(template)
        except TemplateError:
            return given  # whoever applies it reports that
        if unread := [name for name in stated if name not in read]:
            others = ", ".join(sorted(read - {*_OURS})) or "none"
            raise ConfigError(
                f"data.template_arguments.{unread[0]}: the chat template of tokenizer "
                f"{getattr(tokenizer, 'name_or_path', '')!r} reads no such variable, so it would change nothing; it "
                f"reads {others}. Leave it out (null), or use another model"
            )
    return given


@lru_cache(maxsize=16)
def _variables_read(template: str) -> frozenset[str]:
    """The variables that a chat template looks up, among them a few that it sets itself before."""
    from jinja2 import Environment, meta

    tracked = re.sub(r"{%-?\s*(end)?generation\s*-?%}", "", template)  # a statement that transformers adds to jinja
    return frozenset(meta.find_undeclared_variables(Environment(extensions=["jinja2.ext.loopcontrols"]).parse(tracked)))
