"""Settings that every service has. The command line overrides the environment, which overrides defaults.

Unknown names are rejected.
"""

import os
import sys
from typing import TYPE_CHECKING, ClassVar, Self, get_origin

from pydantic import Field, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from fovea.runtime import credentials
from fovea.runtime.hosts import is_loopback

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

TRACE_VARIABLE = "FOVEA_TRACE_ENDPOINT"
"""Variable of the trace endpoint. It is the same for every service, because a trace spans all of them."""


class ServiceSettings(BaseSettings):
    """Base class for the settings of one service. Each service sets its `env_prefix`, such as `FOVEA_SAMPLER_`."""

    model_config = SettingsConfigDict(
        extra="forbid", cli_kebab_case=True, cli_implicit_flags=True, cli_hide_none_type=True, frozen=True
    )

    internal: ClassVar[bool] = True
    """True if only services of the same Fovea call this one, with the secret that they share."""

    host: str = Field(
        "127.0.0.1",
        description="Address to listen on. Beyond loopback, services behind the gateway need the environment variable "
        f"{credentials.SECRET_VARIABLE} or {credentials.SECRET_FILE_VARIABLE}.",
    )
    port: int = Field(0, ge=0, le=65535, description="gRPC port; 0 picks a free port.")
    metrics_port: int | None = Field(
        None, description="Port of Prometheus metrics; 0 picks a free port, none turns metrics off."
    )
    health_port: int | None = Field(
        None,
        description=f"Port for health checks only, without a certificate even if {credentials.TLS_VARIABLE} is set.",
    )
    log_level: str = Field("INFO", description="Log level: DEBUG, INFO, WARNING or ERROR.")
    drain_s: float = Field(20.0, ge=0, description="Seconds that requests in flight may take to finish on shutdown.")
    reflection: bool = Field(True, description="Whether to serve gRPC reflection.")
    trace_endpoint: str = Field(
        default_factory=lambda: os.environ.get(TRACE_VARIABLE, ""),
        validate_default=True,
        description="URL of an OTLP collector's gRPC port, such as http://host:4317; empty turns tracing off. Also "
        f"{TRACE_VARIABLE}.",
    )

    @field_validator("trace_endpoint")
    @classmethod
    def _check_trace_endpoint(cls, value: str) -> str:
        if value and not value.startswith(("http://", "https://")):
            raise ValueError(f"{value!r} is not a URL of an OTLP collector; use a form such as http://127.0.0.1:4317")
        return value

    @model_validator(mode="after")
    def _check_secret(self) -> Self:
        if self.internal and not credentials.service_secret() and (open_at := self._reached_at()):
            raise ValueError(
                f"other machines can reach {open_at}; set {credentials.SECRET_VARIABLE} or "
                f"{credentials.SECRET_FILE_VARIABLE} to the same secret for all services"
            )
        credentials.certificates()  # reports missing certificates before anything starts
        return self

    def _reached_at(self) -> str:
        """Returns the option through which other machines can reach this service; empty if they cannot."""
        return "" if is_loopback(self.host) else f"--host {self.host}"

    @classmethod
    def from_command_line(cls, program: str, arguments: list[str] | None = None) -> Self:
        """Reads `--name value` arguments (sys.argv by default), then the environment, then defaults.

        Prints help and exits for `--help`. Exits with code 2 and the reason for an unknown or invalid argument.
        """
        from pydantic import ValidationError
        from pydantic_settings import CliApp, SettingsError

        if twice := cls._given_twice(sys.argv[1:] if arguments is None else arguments):
            print(f"{program}: {_line((twice,), _TWICE)}", file=sys.stderr)
            raise SystemExit(2)
        try:
            # CliApp reads sys.argv if `arguments` is None. pydantic-settings reads the program's name from there too.
            return CliApp.run(cls, cli_args=arguments, cli_exit_on_error=True)
        except ValidationError as error:
            lines = [_line(item["loc"], _reason(item)) for item in error.errors()]
            raise SystemExit(f"{program}: " + "\n".join(lines)) from None
        except SettingsError as error:  # a list or an object that is not valid JSON
            raise SystemExit(f"{program}: {error}") from None

    @classmethod
    def find_problem(cls, arguments: list[str]) -> tuple[str, str] | None:
        """Returns the first setting that `from_command_line` would reject, and the reason; None if there is none.

        The name is empty for a problem with several settings or with an unknown argument.
        """
        from pydantic import ValidationError
        from pydantic_settings import CliApp, SettingsError

        if twice := cls._given_twice(arguments):
            return twice, _TWICE
        try:
            CliApp.run(cls, cli_args=arguments, cli_exit_on_error=False)
        except ValidationError as error:
            first = error.errors()[0]
            return str(first["loc"][0]) if first["loc"] else "", _reason(first)
        except SettingsError as error:
            return "", str(error)
        return None

    @classmethod
    def _given_twice(cls, arguments: list[str]) -> str:
        """Returns the first setting of one value that a command line gives twice; empty if there is none."""
        given = [word[2:].partition("=")[0].replace("-", "_") for word in arguments if word.startswith("--")]
        lists = {name for name, field in cls.model_fields.items() if get_origin(field.annotation) in (list, dict)}
        known = cls.model_fields.keys() - lists
        return next((name for at, name in enumerate(given) if name in known and name in given[:at]), "")


_TWICE = "it is given twice, but takes one value; remove one"
"""Without this error, the last value would replace the others silently."""


def _reason(error: "ErrorDetails") -> str:
    if error["type"] == "missing":
        return "a value is required"
    return error["msg"].removeprefix("Value error, ")


def _line(place: tuple[int | str, ...], message: str) -> str:
    name = ".".join(map(str, place)).replace("_", "-")
    return f"--{name}: {message}" if name else message
