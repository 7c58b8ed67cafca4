"""`shardqueue demo`: processes of unequal speed, one small model, and the units handed out in two ways.

The nodes train the same units from the same parameters twice: first with a fixed split, each node its equal
slice, then with the shared queue over a mailbox. The result is a timeline of every node, a table, and a JSON file
with every batch. `stage` runs it; what it runs with is in `options`.
"""
