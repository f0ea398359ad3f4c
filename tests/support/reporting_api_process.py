"""An API server process that writes, when it ends, which modules it has loaded and what it has set."""

import json
import os
import sys
from pathlib import Path

from tests.support.process_settings import returns_large_blocks
from tokenmill_server.api_process import main

if __name__ == "__main__":
    try:
        main()
    finally:
        facts = {
            "modules": sorted(sys.modules),
            "switch_interval_s": sys.getswitchinterval(),
            "returns_large_blocks": returns_large_blocks(),
        }
        Path(os.environ["FACTS_FILE"]).write_text(json.dumps(facts))
