"""Other systems on the same work, measured beside shardqueue in the same run: `python -m benchmarks.peers`.

A *side* is a module here with a function from a `Work` to an `Outcome`, which it gives to `serve`. It runs as a
process of its own, in whatever environment its system needs: it reads what there is to do from standard input, and
the last line of its standard output is what came of it. `work` has the work, the consumers and the clock, which are
the same on every side. shardqueue is measured as two more sides, `ours_in_threads` and `ours_in_loaders`.

To add a system: write such a module (`gradientmail` is an example), add it to `SIDES` in `sides`, with what pip
installs for it, and to `BESIDE` in `__main__`, and say in `benchmarks/README.md` what its row means and what its
clock leaves out. A side that cannot run here is skipped with the reason; one that runs and does not train every unit
exactly once is WRONG. A row holds what was measured in that run, and nothing else.
"""
