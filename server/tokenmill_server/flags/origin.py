"""Where a value comes from, in the words of whoever wrote it: what error messages quote."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Origin:
    """A place that gave a flag its value. `name` is how to call it; `before`, `after` and `is_code` are how it looks
    with a value in it."""

    name: str
    before: str
    after: str = ""
    is_code: bool = False
    """Whether the value is written as in Python."""

    def __str__(self) -> str:
        return self.name

    def stated(self, value: object) -> str:
        """The place with `value`, as it was written: `--port 9`, `TOKENMILL_PORT=9`, `LLM(port=9)`."""
        return f"{self.before}{value!r}{self.after}" if self.is_code else f"{self.before}{value}{self.after}"


def on_command_line(flag_name: str) -> Origin:
    """A flag; its name without dashes."""
    return Origin(f"--{flag_name}", f"--{flag_name} ")


POSITIONAL_MODEL = Origin("the model", "the model ")


def in_file(key: str, path: str) -> Origin:
    """A key of a YAML file."""
    return Origin(f"{key} in {path}", f"{key}: ", f" in {path}")


def in_environment(variable: str) -> Origin:
    """An environment variable."""
    return Origin(variable, f"{variable}=")


def in_call(owner: str, key: str) -> Origin:
    """A keyword argument of `owner`."""
    return Origin(f"{owner}({key}=...)", f"{owner}({key}=", ")", is_code=True)
