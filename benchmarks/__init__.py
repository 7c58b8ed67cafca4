"""Measurements of what shardqueue promises, each a script: `python -m benchmarks.<name> [--quick]`."""
