"""Command line of the communication benchmark; ranks import `step_time`, which a `__main__` module does not allow."""

from benchmarks.comm.step_time import main

raise SystemExit(main())
