"""Work made ready by a thread while the work before it is done."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

T = TypeVar("T")

# So many items wait at most, besides the one in use and the one in the making.
_WAITING = 2


class _End(Generic[T]):
    """Comes after the last item: what ended the thread, if it was an error."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


@contextmanager
def prefetched(items: Iterable[T]) -> Iterator[Iterator[T]]:
    """The items, taken from `items` by a thread; an error there is raised where its item would have come.

    Leaving the block ends the thread, whether or not all items were used.
    """
    ready: queue.Queue[T | _End[T]] = queue.Queue(_WAITING)
    left = threading.Event()

    def put(item: T | _End[T]) -> None:
        while not left.is_set():
            try:
                return ready.put(item, timeout=0.1)
            except queue.Full:
                continue

    def fill() -> None:
        try:
            for item in items:
                put(item)
                if left.is_set():
                    return
            put(_End(None))
        except BaseException as error:
            put(_End(error))

    def take() -> Iterator[T]:
        while not isinstance(item := ready.get(), _End):
            yield item
        if item.error is not None:
            raise item.error

    thread = threading.Thread(target=fill, name="prefetch", daemon=True)
    thread.start()
    try:
        yield take()
    finally:
        left.set()
        thread.join()
