"""shardqueue: every training process claims the next piece of the dataset from a bucket or a folder."""
