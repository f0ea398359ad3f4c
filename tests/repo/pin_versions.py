"""Prints constraints.txt: the versions that are installed in this environment.

triton stays free, since every build of torch asks for one exact release of it.
"""

import re
import sys
from importlib.metadata import distributions

_FREE = {"tokenmill", "triton", "pip"}

_HEADER = """\
# The versions that Tokenmill is developed and tested with; `make install` uses them, `make constraints` renews them.
# triton is left free: every build of torch asks for one exact release of it.
"""


def main() -> None:
    versions = {}
    for distribution in distributions():
        name = re.sub(r"[-_.]+", "-", distribution.metadata["Name"]).lower()
        versions[name] = distribution.version.partition("+")[0]
    lines = [f"{name}=={version}\n" for name, version in sorted(versions.items()) if name not in _FREE]
    sys.stdout.write(_HEADER + "".join(lines))


if __name__ == "__main__":
    main()
