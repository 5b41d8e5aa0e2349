"""Options that several commands take: declared once, as the fields of a NamedTuple, and handed over as one value."""

import functools
from collections.abc import Callable
from inspect import Parameter, signature
from typing import Any, NamedTuple, get_type_hints

Command = Callable[..., None]


def taking(declared: type[NamedTuple]) -> Callable[[Command], Command]:
    """Give a command, in place of its argument `options`, an option of the command line for each declared field.

    A field is declared as an argument of a command is: by its type, annotated with typer's option, and its default.
    """
    types, defaults = get_type_hints(declared, include_extras=True), declared._field_defaults
    fields = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=defaults[name], annotation=types[name])
        for name in declared._fields
    ]

    def decorate(command: Command) -> Command:
        before = signature(command)
        kept = [
            argument.replace(kind=Parameter.KEYWORD_ONLY)
            for argument in before.parameters.values()
            if argument.name != "options"
        ]

        @functools.wraps(command)
        def call(**given: Any) -> None:
            options = declared._make(given.pop(name) for name in declared._fields)
            command(**given, options=options)

        arguments = [*kept, *fields]
        call.__signature__ = before.replace(parameters=arguments)  # type: ignore[attr-defined]
        call.__annotations__ = {argument.name: argument.annotation for argument in arguments}
        return call

    return decorate
