"""One sync of a folder for all who wait for one."""

import threading
from collections.abc import Callable


class GroupSync:
    """Threads that made names in one folder ask for its sync: the first begins one, and those who come while it runs
    share the next."""

    def __init__(self, sync: Callable[[], None]) -> None:
        self._sync = sync
        self._changed = threading.Condition()
        self._asked = 0
        self._synced = 0
        self._running = False

    def wait(self) -> None:
        """Return once a sync that began after this call has ended. Raises what it raised, in whoever ran it; the others
        try again."""
        with self._changed:
            self._asked += 1
            mine = self._asked
            while self._synced < mine:
                if self._running:
                    self._changed.wait()
                    continue
                self._run()

    def _run(self) -> None:
        """Sync for all who have asked; the condition is held before and after, not meanwhile."""
        self._running = True
        for_all = self._asked
        self._changed.release()
        try:
            self._sync()
        except BaseException:
            self._changed.acquire()
            self._running = False
            self._changed.notify_all()
            raise
        self._changed.acquire()
        self._running = False
        self._synced = for_all
        self._changed.notify_all()
