"""The checks of a machine: ``or1 doctor``, ``or1 selftest``, ``or1 check-parity`` and the tests marked gpu.

``known_checks`` lists the checks, ``one_check`` defines and makes one, ``run_checks`` gives each a process, and
``outcome_report`` writes the report. The checks call training's code; a file of ``checks`` has one or two of them.
"""
