"""Files that processes share by mapping them into memory."""

import errno
import os

from tokenmill_engine.errors import StartupError


def reserve(path: str | os.PathLike[str], size: int) -> None:
    """Create the file, if it is not there, and give it `size` bytes at least, which read as zeros until written.

    The space is taken now. A file that is merely made longer gets it page by page at the first write to each, and a
    process that writes through a mapping dies by SIGBUS if there is none left.

    Raises:
        StartupError: there is no space.
        OSError: the file cannot be created for another reason.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        folder = os.path.dirname(os.path.abspath(path))
        raise StartupError(f"no space in {folder}: free some or set TMPDIR to another file system") from None
    finally:
        os.close(fd)
