"""What a training reads is made before it is needed, by other processes, while the training computes."""

import collections
import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor

from jaxbuf.arguments import check_sizes

AHEAD = 3  # calls a process that are under way, so that none waits for another


def made_ahead[Given, Made](make: Callable[[Given], Made], given: Iterable[Given], processes: int) -> Iterator[Made]:
    """`map(make, given)`, in the same order, by processes.

    Args:
      make: Found by its name in a module, and the same for the same argument.
      given: What it is called with, one after the other.
      processes: How many; 0: none, everything is made here when it is asked for.

    Raises:
      ValueError: `processes` is below 0.
    """
    check_sizes(least=0, processes=processes)
    if not processes:
        yield from map(make, given)
        return
    # A process that is forked from one with JAX's threads may hang.
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        waiting: collections.deque[Future[Made]] = collections.deque()
        try:
            for each in given:
                waiting.append(pool.submit(make, each))
                if len(waiting) > AHEAD * processes:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:  # whoever reads may stop before the end
            for future in waiting:
                future.cancel()
