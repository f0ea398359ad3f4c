"""How every process logs: one line per event on standard error, with the process that wrote it."""

import logging

PACKAGES = ("tokenmill", "tokenmill_server", "tokenmill_engine", "tokenmill_kernels")


def configure_logging(level: str, process: str) -> None:
    """Our packages log from `level` up, libraries from WARNING up. `process` is for example `engine core 1`."""
    handler = logging.StreamHandler()
    handler.setFormatter(
        logging.Formatter(f"%(levelname)s %(asctime)s [{process}] %(name)s: %(message)s", "%m-%d %H:%M:%S")
    )
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    for package in PACKAGES:
        logging.getLogger(package).setLevel(level)
