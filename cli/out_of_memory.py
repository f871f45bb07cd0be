"""What a lack of memory looks like; imported before everything that needs much of it."""

import errno

OUT_OF_MEMORY = (
    "memory: expected more than the system gives this process; close other programs, or raise the "
    "limit (ulimit -v)"
)


def is_out_of_memory(error: Exception) -> bool:
    """Whether the system gave no memory: to Python, to a library that is loaded, or to a thread.

    Some functions of CPython fail for lack of memory without saying so.
    """
    signs = (
        *("failed to map segment", "cannot allocate memory", "can't start new thread"),
        *("without exception set", "without setting an exception"),
    )
    return (
        isinstance(error, MemoryError)
        or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
        or any(sign in str(error).lower() for sign in signs)
    )
