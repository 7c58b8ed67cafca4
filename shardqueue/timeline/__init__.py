"""Who worked on what, and when: a run's logs as bars on lanes, in the terminal, as a picture and as a page.

`reading` makes a `Chart` of what the mailbox holds; `terminal`, `picture` and `page` show one.
"""
