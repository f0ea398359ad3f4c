"""An API server process that writes, when it ends, the names of all modules it has loaded."""

import os
import sys
from pathlib import Path

from tokenmill_server.api_process import main

if __name__ == "__main__":
    try:
        main()
    finally:
        Path(os.environ["MODULES_FILE"]).write_text("\n".join(sorted(sys.modules)))
