"""Eight processes that write numbered trials into one new store, three of which are killed and begin anew.

    store_writers.py PATH TRIALS_OF_EACH

They are forked from one process that has loaded everything, because loading it eleven times takes most of a minute.
"""

import os
import random
import signal
import sys
import time

from fusewright.autotune.key import KeyContext, TuningKey
from fusewright.autotune.stats import Comparison, Verdict
from fusewright.autotune.storage.store import Trial, TuningStore
from fusewright.capture.shapes import ShapeBucket
from fusewright.capture.variant import GraphVariant


def write(path: str, name: int, count: int) -> None:
    context = KeyContext("inference", "cpu", "off", 2, "AVX2", "highest", False, "2", "3", "exact", False, "", "s")
    store = TuningStore(path)
    for number in range(count):
        result = Comparison(1.0, 0.9, 1.1, 60, 3, Verdict.SAME)
        key = TuningKey(f"{number}", ShapeBucket(), context)
        store.add_measurement(Trial(key, GraphVariant(), "timing", result, id=f"{name}-{number}"))
        store.decide(key, GraphVariant(), {"by": name})


def start(path: str, name: int, count: int) -> int:
    pid = os.fork()
    if pid == 0:
        write(path, name, count)
        os._exit(0)
    return pid


def main(path: str, count: int) -> None:
    writers = {name: start(path, name, count) for name in range(8)}
    chance = random.Random(0)
    for name in range(3):
        time.sleep(chance.random() * 0.3)
        os.kill(writers[name], signal.SIGKILL)
        os.waitpid(writers[name], 0)
        writers[name] = start(path, name, count)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in writers.values()]
    assert codes == [0] * 8, codes


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
