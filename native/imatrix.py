"""An importance matrix that is collected while a trunk and a head compute."""

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ._bindings import ImatrixEntry, check, library
from ._owner import Owner
from .head import Head

Sums = NDArray[np.float32]
Counts = NDArray[np.int64]


class ImatrixCollector(Owner):
    """Adds up the squared inputs of each weight matrix. Close it, or use `with`.

    It must outlive the contexts that it listens to. with_output: collect output.weight, too.
    """

    _what = "importance matrix"

    def __init__(self, *, with_output: bool = False) -> None:
        handle = self._own(library().mtp_imatrix_free)
        check(library().mtp_imatrix_new(with_output, ctypes.byref(handle)))

    def listen(self, params: Any) -> None:
        """Make a context with these llama_context_params collect in each decode."""
        evaluate = ctypes.cast(library().mtp_imatrix_evaluate, ctypes.c_void_p)
        params.cb_eval = type(params.cb_eval)(evaluate.value)
        params.cb_eval_user_data = self.handle.value

    def listen_to_head(self, head: Head) -> None:
        """Collect in each call of a head, until that is closed."""

        def listen() -> None:
            check(library().mtp_head_set_imatrix(head.handle, self.handle))

        self._alone(listen, head)

    def entries(self) -> dict[str, tuple[Sums, Counts]]:
        """Return the sums, [matrices, columns], and the rows summed, [matrices], by tensor name.

        NativeError if an input was not finite.
        """
        size = ctypes.c_int32()
        self._call(library().mtp_imatrix_size, ctypes.byref(size))
        out = {}
        for i in range(size.value):
            entry = ImatrixEntry()
            self._call(library().mtp_imatrix_get, i, ctypes.byref(entry))
            counts = np.ctypeslib.as_array(entry.counts, (entry.n_counts,)).copy()
            sums = np.ctypeslib.as_array(entry.sums, (entry.n_sums,)).copy()
            out[entry.name.decode()] = (sums.reshape(len(counts), -1), counts)
        return out
