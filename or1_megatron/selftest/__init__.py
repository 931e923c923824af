"""Checks whether this machine can train: ``or1 doctor``, ``or1 selftest``, ``or1 check-parity``, tests marked gpu.

``known_checks`` lists the checks, ``one_check`` defines and runs one, ``run_checks`` gives each a process, and
``outcome_report`` writes the report. The checks call the code of training; each file of ``checks`` has one or two.
"""
