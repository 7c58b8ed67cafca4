"""Removing runs: `survey` says what is under a prefix, `removal` takes a run away, `command` is the door."""
