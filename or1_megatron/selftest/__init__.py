"""``or1 selftest``: what a user runs first on a new machine or cluster.

``registry`` lists the checks, ``run`` runs each in a process of its own, ``one`` is that process,
``page`` writes what they found.
The checks call what training calls; a file of ``checks`` holds a few of them.
"""
