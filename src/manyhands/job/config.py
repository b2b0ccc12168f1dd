"""The machinery behind a job's configuration: a frozen struct whose fields describe themselves.

`TrainConfig`, `SplitConfig` and `InferConfig` are the only places where an option, its default, its checks and its help
sentence are written. Five things are derived from them:

    the command line       cli/config_options.py makes one typer option of every field that has flags
    Python's keywords      `from_keywords`; docs/making/options.py writes the TypedDict that mypy sees
    checks of a resumed run   `Option.on_resume`: `decisive` and job/resuming.py
    the run folder         `document`, which config.yaml keeps, and `from_document`
    the reference page     docs/making/configs.py

Nothing here imports torch: `manyhands train --help` must be quick.
"""

from __future__ import annotations

import dataclasses
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from manyhands.facts.errors import BadValue, unknown
from manyhands.facts.keywords import check_keywords

OnResume = Literal["free", "same", "stored"]
"""The treatment of an option when a run is resumed: "free": it may have another value; "same": it may not, since it
decides what is computed; "stored": the command line does not take it, and the run folder's value is used."""
AS_IN_PYTHON: Any = object()
_KEY = "option"
_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Option:
    """Describes one field of a configuration."""

    help: str
    """One sentence or two, without the choices and the default: `text` adds those."""
    flags: tuple[str, ...] = ()
    """The spellings on the command line, the long form first; empty: it has no option there."""
    kind: type = str
    """The type that the command line reads: str, int, float or bool."""
    is_list: bool = False
    """Whether the command line may repeat it."""
    in_python: str = ""
    """Help on further values of Python's keyword, which `--help` does not show."""
    is_keyword: bool = True
    """Whether Python functions take it as a keyword."""
    choices: Mapping[str, str] | None = None
    """Every allowed value -> a short explanation, which may be empty."""
    noun: str = ""
    """The word for a choice in an error, "There is no NOUN called 'x'"; empty: the error is a BadValue."""
    at_least: float | None = None
    more_than: float | None = None
    at_most: float | None = None
    unit: str = ""
    """Follows the limit in an error, like " seconds"."""
    on_resume: OnResume = "free"
    stored: str | None = ""
    """The key in the run folder's config.yaml; empty: the field's name; None: it is not written there."""
    default_text: str = ""
    """The default in words, where the value alone is not clear."""
    command_default: Any = AS_IN_PYTHON
    """The default on the command line, where it differs from Python's."""
    metavar: str | None = None
    variable: str | None = None
    """The environment variable that the command line reads if the option is left out."""
    is_argument: bool = False
    """Whether the command line takes it without a flag, as an optional argument."""
    other_flags: Mapping[str, Option] = dataclasses.field(default_factory=dict)
    """Other options of the command line that set the same field, by parameter name."""

    def check(self, value: Any, spelling: str, *, is_command: bool) -> None:
        """Raise BadValue or UnknownName where a value is outside the limits or not among the choices."""
        if value is None:
            return
        if self.choices is not None and str(value) not in self.choices:
            if self.noun:
                raise unknown(self.noun, str(value), self.choices)
            raise BadValue(f"{spelling} is {value!r}; it must be {_listed([*self.choices])}.")
        limits = (self.at_least, self.more_than, self.at_most)
        if all(limit is None for limit in limits):
            return
        is_number = isinstance(value, int if self.kind is int else (int, float)) and not isinstance(value, bool)
        if not is_number or not self._is_inside(value):
            whole = "a whole number of " if self.kind is int and not (is_command and is_number) else ""
            raise BadValue(f"{spelling} is {value!r}; it must be {whole}{self._limits_text()}{self.unit}.")

    def _is_inside(self, value: float) -> bool:
        return (
            (self.at_least is None or value >= self.at_least)
            and (self.more_than is None or value > self.more_than)
            and (value < float("inf") if self.at_most is None else value <= self.at_most)
        )

    def _limits_text(self) -> str:
        parts = []
        if self.at_least is not None:
            parts.append(f"at least {self.at_least:g}")
        if self.more_than is not None:
            parts.append(f"more than {self.more_than:g}")
        if self.at_most is not None:
            parts.append(f"at most {self.at_most:g}")
        return " and ".join(parts)

    def text(self, default: Any) -> str:
        """Return the help with the choices and the default."""
        text = self.help
        if self.choices:
            shown = [f"{name} ({why})" if why else name for name, why in self.choices.items() if name]
            text = f"{text.rstrip('.')}: {_listed(shown)}."
        if self.default_text:
            return f"{text} Default: {self.default_text}."
        return text if default is None or default is False or default in ("", ()) else f"{text} Default: {default}."


def _listed(words: list[str]) -> str:
    """Return "a, b or c"."""
    return f"{', '.join(words[:-1])} or {words[-1]}" if len(words) > 1 else words[0]


@dataclass(frozen=True)
class Field:
    """One field of a configuration: its name, annotation, default and description."""

    name: str
    annotation: str
    default: Any
    option: Option

    @property
    def command_default(self) -> Any:
        """The value on the command line if the option is left out."""
        return self.default if self.option.command_default is AS_IN_PYTHON else self.option.command_default

    @property
    def stored_key(self) -> str | None:
        """The key in config.yaml; None: it is not stored."""
        return self.name if self.option.stored == "" else self.option.stored

    @property
    def help(self) -> str:
        """The help as the command line shows it."""
        return self.option.text(self.command_default)

    @property
    def keyword_help(self) -> str:
        """The help as `help()` shows it in Python, where the signature has the default."""
        text = replace(self.option, default_text="").text(None)
        return f"{text} {self.option.in_python}".strip()


def option(default: Any, help: str, *flags: str, **traits: Any) -> Any:
    """Return a dataclass field that describes itself; `traits` are those of `Option`."""
    return dataclasses.field(default=default, metadata={_KEY: Option(help, flags, **traits)})


def varied(section: type[Config], name: str, default: Any, **traits: Any) -> Any:
    """Return the field of another section with a different default, or different traits."""
    described = replace(fields_of(section)[name].option, **traits)
    return dataclasses.field(default=default, metadata={_KEY: described})


def fields_of(config: type[Config]) -> dict[str, Field]:
    """Return the fields of a configuration by name, in the order of its sections."""
    return {
        field.name: Field(field.name, str(field.type), field.default, field.metadata[_KEY])
        for field in dataclasses.fields(config)
        if _KEY in field.metadata
    }


def sections_of(config: type[Config]) -> Iterator[tuple[type[Config], list[Field]]]:
    """Yield the classes that a configuration is made of, each with the fields that it declares."""
    fields = fields_of(config)
    yielded: set[str] = set()
    for section in reversed(config.__mro__):
        if not (isinstance(section, type) and issubclass(section, Config)):
            continue
        declared = [fields[name] for name in vars(section).get("__annotations__", {}) if name in fields]
        if fresh := [field for field in declared if field.name not in yielded]:
            yielded.update(field.name for field in fresh)
            yield section, fresh


def keywords_of(config: type[Config]) -> dict[str, Field]:
    """Return the fields that Python functions take as keywords."""
    return {name: field for name, field in fields_of(config).items() if field.option.is_keyword}


@dataclass(frozen=True, kw_only=True)
class Config:
    """The base of every configuration. Its values are checked when it is made."""

    is_command: bool = False
    """Whether the values are those of a command line; errors then name its options."""

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Raise BadValue or UnknownName if a value is not allowed. Sections add checks across several fields."""
        for name, field in fields_of(type(self)).items():
            field.option.check(getattr(self, name), self.spelling(name), is_command=self.is_command)

    def spelling(self, name: str) -> str:
        """Return how the user spells a field: --batch-size on the command line, batch_size in Python."""
        flags = fields_of(type(self))[name].option.flags
        return flags[0] if self.is_command and flags else name

    @classmethod
    def from_keywords(cls, function: str, keywords: Mapping[str, Any]) -> Self:
        """Return the configuration of a call of `function`, and refuse keywords that it does not have."""
        check_keywords(function, keywords, keywords_of(cls))
        return cls(**keywords)

    @classmethod
    def from_command(cls, arguments: Mapping[str, Any]) -> Self:
        """Return the configuration of a command line; arguments that are None were left out."""
        fields = fields_of(cls)
        explicit = {name: value for name, value in arguments.items() if value is not None}
        defaults = {name: field.command_default for name, field in fields.items()}
        return cls(**{**defaults, **explicit}, is_command=True)

    @property
    def decisive(self) -> dict[str, Any]:
        """The keywords that decide what is computed: a checkpoint stores them, and a resumed run has the same."""
        fields = keywords_of(type(self))
        return {name: getattr(self, name) for name, field in fields.items() if field.option.on_resume == "same"}

    def document(self) -> dict[str, Any]:
        """Return what the run folder's config.yaml stores of a command, by stored key."""
        fields = fields_of(type(self)).values()
        return {key: _plain(field, getattr(self, field.name)) for field in fields if (key := field.stored_key)}

    @classmethod
    def stored_values(cls, document: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields that a stored document holds; keys that are not known any more are left out."""
        values: dict[str, Any] = {}
        for name, field in fields_of(cls).items():
            if (key := field.stored_key) is not None and key in document:
                value = document[key]
                is_unset = value == "" and field.default is None
                values[name] = None if is_unset else tuple(value) if field.option.is_list else value
        return values


def _plain(field: Field, value: Any) -> Any:
    """Return a value as YAML stores it. A field that may be text is stored as text; if left out, it is empty."""
    if field.option.is_list:
        return [str(part) for part in value]
    if field.option.flags and "str" in field.annotation:
        return "" if value is None else str(value)
    return value


def _keyword_lines(field: Field) -> str:
    """Return a keyword and its help in two columns."""
    lines = textwrap.wrap(field.keyword_help, 100)
    return "\n".join(f"{field.name if number == 0 else '':<16}{line}" for number, line in enumerate(lines))


def takes(config: type[Config]) -> Callable[[_Function], _Function]:
    """Return a decorator for a function with `**options`: `help()` and the reference page then show every keyword."""

    def decorated(function: _Function) -> _Function:
        signature = inspect.signature(function)
        fixed = [
            parameter for parameter in signature.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD
        ]
        fixed_names = {parameter.name for parameter in fixed}
        parameters = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=field.annotation)
            for name, field in keywords_of(config).items()
            if name not in fixed_names
        ]
        lines = [_keyword_lines(field) for field in keywords_of(config).values() if field.name not in fixed_names]
        function.__signature__ = signature.replace(parameters=[*fixed, *parameters])  # type: ignore[attr-defined]
        function.__doc__ = f"{inspect.getdoc(function)}\n\n" + "\n".join(lines)
        return function

    return decorated


def full_path(text: str, names: tuple[str, ...] = ()) -> str:
    """Return the full path of a file or folder that exists; a name stays as it is."""
    path, colon, classes = text.rpartition(":")
    if colon and classes[:1].isdecimal() and Path(path).exists():  # some classes of it
        return f"{Path(path).absolute()}:{classes}"
    is_name = not text or text in names
    return text if is_name or not Path(text).exists() else str(Path(text).absolute())
