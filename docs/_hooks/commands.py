"""The reference of commands, from the commands themselves."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import typer

from saccade.cli._app import app
from saccade.cli._parts._examples import examples_of

_ABOUT = "`saccade COMMAND --help` prints what stands here."


def pages() -> dict[str, str]:
    """Markdown by its place on the site."""
    group: Any = typer.main.get_command(app)
    context = group.make_context("saccade", ["look"], resilient_parsing=True)
    commands = {name: group.get_command(context, name) for name in group.list_commands(context)}
    about = {name: _cell(one.get_short_help_str(200)) for name, one in commands.items()}
    rows = [f"| [`saccade {name}`]({name}.md) | {text} |" for name, text in about.items()]
    overview = ["# Commands", _ABOUT, "| command | what it does |\n|---|---|\n" + "\n".join(rows)]
    return {
        "reference/commands/README.md": "\n\n".join(overview) + "\n",
        **{f"reference/commands/{name}.md": _page(name, one, context) for name, one in commands.items()},
    }


def _page(name: str, command: Any, above: Any) -> str:
    context = type(above)(command, info_name=name, parent=above)
    parts = [f"# saccade {name}", *_described(command, context)]
    if hasattr(command, "list_commands"):
        for below in command.list_commands(context):
            one = command.get_command(context, below)
            inner = type(above)(one, info_name=below, parent=context)
            parts += [f"## saccade {name} {below}", *_described(one, inner)]
            parts += _parameters(one, inner, "###", f"{name}-{below}")
    else:
        parts += _parameters(command, context, "##", name)
    return "\n\n".join(parts) + "\n"


def _described(command: Any, context: Any) -> Iterator[str]:
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    yield f"```text\n{usage}\n```"
    for text in (command.help, command.epilog):
        if text:
            yield _text(text)
    if examples := examples_of(context.command_path.partition(" ")[2]):
        yield "```sh\n" + "\n".join(examples) + "\n```"


def _parameters(command: Any, context: Any, level: str, place: str) -> Iterator[str]:
    groups: dict[str, list[str]] = {}
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is not None:
            kind = "Arguments" if parameter.param_type_name == "argument" else "Options"
            heading = getattr(parameter, "rich_help_panel", None) or kind
            name = re.sub(r" <.*>$", "", record[0])  # a type of Python
            groups.setdefault(heading, []).append(f"| `{name}` | {_cell(record[1])} |")
    for heading in sorted(groups, key=lambda group: group == "Options"):
        anchor = re.sub(r"\W+", "-", f"{place} {heading}".lower())
        head = f"| {'argument' if heading == 'Arguments' else 'option'} | what it does |"
        yield f"{level} {heading} {{#{anchor}}}\n\n{head}\n|---|---|\n" + "\n".join(groups[heading])


def _text(text: str) -> str:
    """Help as Markdown: paragraphs as they are, lines of commands as code."""
    return _escaped("\n\n".join(" ".join(part.split()) for part in re.split(r"\n\s*\n", text.strip())))


def _cell(text: str) -> str:
    return _escaped(" ".join(text.split())).replace("|", "\\|")


def _escaped(text: str) -> str:
    return re.sub(r"([\\`*_<\[\]])", r"\\\1", text)
