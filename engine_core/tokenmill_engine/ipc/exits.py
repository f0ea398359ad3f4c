"""How the end of a child process is told."""

import signal


def describe_exit(returncode: int, moment: str = "", savers: str = "--kv-cache-memory-bytes") -> str:
    """How a child ended, as the predicate of a sentence. `returncode` is negative for a signal, as in `subprocess`.
    `moment`: when, as in `while it was starting`. `savers`: flags that save memory when they are lowered."""
    when = f" {moment}" if moment else ""
    if returncode == -signal.SIGKILL:
        return f"was killed (SIGKILL){when}; if the kernel did so for want of memory, lower {savers}"
    if returncode < 0:
        return f"was ended by {_signal_name(-returncode)}{when}"
    return f"exited with status {returncode}{when}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # most real-time signals have none
        return f"signal {number}"
