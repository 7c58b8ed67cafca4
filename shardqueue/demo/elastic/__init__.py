"""`shardqueue demo --regime elastic`: one LightningModule under plain DDP, then in elastic steps, in the same ranks.

Both phases begin with the same parameters and have the same rows, global batch, number of steps and paces. In DDP
each rank computes an equal part of a step, and in elastic steps what it has time for. `stage` runs it; what it runs
with is in `options`.
"""
