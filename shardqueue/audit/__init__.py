"""`shardqueue audit`: what the logs of a run and its give-back records prove.

`expectation` says what a pass has to hand out, `evidence` reads what is in the mailbox, `accounts` judges one pass,
without I/O, and `report` shows it.
"""
