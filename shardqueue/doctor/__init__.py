"""Can this store hold a queue? `examination` asks it, `report` tells; `command` is what the command line runs.

The examination works under one random prefix inside the URL, and takes away all it wrote there. What it looks at
is what the library relies on: an exclusive create that stands a race, readings and listings that show what was just
written, and the right to call each verb.
"""
