"""A process that ends when its parent does, however that ends."""

import ctypes
import os
import sys

PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def end_with_parent(number: int, parent: int | None = None) -> None:
    """Asks the kernel for a signal when the thread that started this process ends; elsewhere than on Linux it does not.

    Args:
        number: of the signal.
        parent: who must still be the parent, else this process ends now; None: nobody looks.
    """
    if _LIBC is not None:
        _LIBC.prctl(PR_SET_PDEATHSIG, number)
    if parent is not None and os.getppid() != parent:  # it ended before we asked
        os._exit(1)
