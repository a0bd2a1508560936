"""Commands with many options: dataclasses are groups of them, and help shows each group under its name."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import re
import sys
import typing
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from ..support._extras import NotInstalled
from ..support._option_fields import option as option, option_fields
from ..support._shared_cores import shared_cores
from ._errors import naming_options
from ._parts._examples import examples_of, write_examples
from ._parts._existing import existing_model

MEASURING = ("bench", "compare")  # what is measured waits as in the user's program


def set_threads(context: Any, parameter: Any, count: int | None) -> None:
    """The callback of `--threads`: sets PyTorch's threads while the command runs."""
    if context.resilient_parsing:
        return
    if context.info_name not in MEASURING:
        context.with_resource(shared_cores())
    if count is None:
        return
    if count < 1:
        raise ValueError(f"--threads: must be at least 1, got {count}")
    if "torch" not in sys.modules:  # which reads this when it is imported: help and usage errors need no PyTorch
        os.environ["OMP_NUM_THREADS"] = str(count)
        return
    import torch

    before = torch.get_num_threads()
    context.call_on_close(lambda: torch.set_num_threads(before))
    torch.set_num_threads(count)


DEVICE = (
    "training uses a GPU if PyTorch finds one (with ACCELERATE_USE_CPU=1 the CPU), and all other commands use the CPU"
)
WITHOUT_THREADS = ("docs", "doctor")


@dataclasses.dataclass(frozen=True)
class CommonOptions:
    """Options"""

    model: str | None = option(
        None,
        "A model folder (Saccade or transformers), or a name on the Hugging Face hub (org/name).  [default: "
        "the embedded model]",
        metavar="DIR_OR_HUB_ID",
        callback=existing_model(),
    )
    out: Path | None = option(None, "What a command writes; each says it anew, in this place.")
    force: bool = option(False, "Replace a file even if Saccade did not write it.")
    as_numbers: bool = option(False, "Print the numbers as JSON.", "--json")


def flattened(command: Callable[..., None]) -> Callable[..., None]:
    """A function for typer, in which the fields of each dataclass among the parameters of `command` are options."""
    parameters: list[inspect.Parameter] = []
    groups: dict[str, type] = {}
    defaults = inspect.signature(command).parameters
    for name, annotation in typing.get_type_hints(command, include_extras=True).items():
        if name == "return":
            continue
        if dataclasses.is_dataclass(annotation):
            assert isinstance(annotation, type)
            groups[name] = annotation
            parameters += _options(annotation)
        else:
            parameters.append(_parameter(name, annotation, defaults[name].default))

    @functools.wraps(command)
    def run(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in dataclasses.fields(group)})
        command(**given)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def from_command_line(context: typer.Context) -> set[str]:
    """The parameters that are given on the command line."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}


def _options(group: type) -> list[inspect.Parameter]:
    hints = typing.get_type_hints(group)
    parameters = []
    for field, heading in option_fields(group):
        text = field.metadata["option"]
        names = text.names or ([f"--{field.name.replace('_', '-')}"] if isinstance(field.default, bool) else [])
        info = typer.Option(*names, help=text.help, rich_help_panel=heading, **text.settings)
        parameters.append(_parameter(field.name, Annotated[hints[field.name], info], field.default))
    return parameters


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)


@functools.cache
def _threads_option() -> Any:
    """`--threads`, an option of all commands that compute; only its callback reads it."""
    app = typer.Typer(add_completion=False)

    @app.command()
    def holder(
        threads: Annotated[int | None, typer.Option(help="Threads that compute.  [default: PyTorch's setting]")] = None,
    ) -> None: ...

    made: Any = typer.main.get_command(app).params[0]
    made.expose_value, made.callback = False, set_threads
    return made


class Group(TyperGroup):
    """Commands, whose help ends with an example of each."""

    def format_epilog(self, context: Any, formatter: Any) -> None:
        write_examples(context, formatter)
        super().format_epilog(context, formatter)


class GroupedCommand(TyperCommand):
    """A command whose help lists options under the headings of their groups, as plain text.

    Error messages of the library about its arguments are changed to name the options.
    """

    columns_named_by = ""  # what follows an error about columns that no option names

    # Typed as Any: newer typer releases carry their own copy of click, older ones import it.

    def __init__(self, name: str | None, **settings: Any):
        super().__init__(name, **settings)
        if name not in WITHOUT_THREADS and not any("--threads" in one.opts for one in self.params):
            self.params.append(_threads_option())

    def parse_args(self, context: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(context, args)
        except Exception as error:
            option: Any = getattr(error, "option_name", None)
            shown = [line for line in examples_of(context.command_path.partition(" ")[2]) if option in line.split()]
            if option is not None and (reason := self.refusal(option)):
                error.message, error.possibilities = f"No such option: {option}; {reason}", None  # type: ignore[attr-defined]
            elif shown and any(option in one.opts for one in self.get_params(context)):  # it lacks a value
                error.message, error.ctx = f"{error.message.rstrip('.')}, as in: {shown[0]}", context  # type: ignore[attr-defined]
            raise

    def refusal(self, option: str) -> str:
        """Why the command does not have this option, and what replaces it; "" without a reason."""
        return DEVICE if option == "--device" else ""

    def invoke(self, context: Any) -> Any:
        try:
            return super().invoke(context)
        except NotInstalled as missing:
            missing.msg = re.sub("^this(?= needs )", context.command_path, missing.msg)
            raise
        except (ValueError, TypeError, OSError) as error:
            if len(error.args) == 1 and isinstance(error.args[0], str):
                error.args = (self._message(error, context),)
            raise

    def _message(self, error: Any, context: Any) -> str:
        """The error with the names of options, and the options to give for columns that a table lacks."""
        if hasattr(error, "option"):
            return f"{error.problem}, or give {self.option_that_skips(error.option)}"
        options = {one.name: one.opts[0] for one in self.get_params(context) if one.param_type_name == "option"}
        options.setdefault("overwrite", options.get("force", "--overwrite"))
        lacking = getattr(error, "columns", ())
        return naming_options(error.args[0], options) + (self._naming(lacking, context) if lacking else "")

    def option_that_skips(self, name: str) -> str:
        """How the command leaves out examples that cannot be used."""
        return f"--{name.replace('_', '-')}"

    def _naming(self, lacking: Collection[str], context: Any) -> str:
        """The options whose values are columns that a table lacks."""
        options = [one for one in self.get_params(context) if one.metavar in ("COLUMN", "LANGUAGE")]
        naming = [f"{one.opts[0]} {one.metavar}" for one in options if context.params.get(one.name) in lacking]
        if naming:
            return f"; name yours with {' '.join(naming)}"
        return self.columns_named_by

    def collect_usage_pieces(self, context: Any) -> list[str]:
        # Newer typer releases put braces around what is required.
        return [piece.strip("{}") for piece in super().collect_usage_pieces(context)]

    def format_options(self, context: Any, formatter: Any) -> None:
        headings: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(context):
            record = parameter.get_help_record(context)
            if record is not None:
                kind = "Arguments" if parameter.param_type_name == "argument" else "Options"
                heading = getattr(parameter, "rich_help_panel", None) or kind
                headings.setdefault(heading, []).append(record)
        # What belongs to no group (--help) comes last.
        for heading in sorted(headings, key=lambda name: name == "Options"):
            with formatter.section(heading):
                formatter.write_dl(headings[heading])

    def format_epilog(self, context: Any, formatter: Any) -> None:
        write_examples(context, formatter)
        super().format_epilog(context, formatter)
