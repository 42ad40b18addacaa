"""Methods by which vLLM's workers record what they compute; vLLM imports this in each of its processes."""

from collections.abc import Callable

WORKER = f"{__name__}.ProfiledWorker"
"""Name by which vLLM adds the class to its workers."""
BEGIN, END = "begin_rollgrad_profile", "end_rollgrad_profile"
"""Names of its methods."""


class ProfiledWorker:
    """Methods of a worker; it has no other method of these names."""

    _end_rollgrad_profile: Callable[[], bytes]

    def begin_rollgrad_profile(self) -> None:
        """Begins to record."""
        from rollgrad.adapters.system.profile import begin_profile

        self._end_rollgrad_profile = begin_profile()

    def end_rollgrad_profile(self) -> bytes:
        """Ends; returns the Chrome trace."""
        return self._end_rollgrad_profile()
