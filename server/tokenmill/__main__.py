"""`python -m tokenmill` is the `tokenmill` command."""

import sys

from tokenmill_server.cli.main import main

sys.exit(main())
