"""Whether flags about serving have what they need beside them."""

from tokenmill_engine.errors import ConfigError
from tokenmill_server.flags.values import FlagValues

_ABOUT_LINES = ("enable_log_outputs", "max_log_len", "disable_access_log_for_endpoints")


def check_serving(values: FlagValues) -> None:
    """Raises ConfigError for a flag that would do nothing."""
    for key in _ABOUT_LINES:
        is_off = values[key] is None or values[key] is False or values[key] == ()
        if not is_off and not values["enable_log_requests"]:
            raise ConfigError(f"{values.written(key)} needs --enable-log-requests: without it no request is logged")
    is_custom = values["fingerprint_mode"] == "custom"
    if is_custom and values["fingerprint_value"] is None:
        raise ConfigError("--fingerprint-mode custom needs --fingerprint-value, the text of system_fingerprint")
    if values["fingerprint_value"] is not None and not is_custom:
        raise ConfigError(f"{values.written('fingerprint_value')} needs --fingerprint-mode custom")
