"""Watching a run: `observing` reads the mailbox, `standing` says what it comes to, `report` shows it.

Only the newest page of each process's log is read, and never a claim, so what a look costs depends on how many
learners there are, not on how many units. Nothing is written. `command` is the door.
"""
