"""Checks whether this machine can train: ``or1 doctor``, ``or1 selftest``, ``or1 check-parity``, tests marked gpu.

``known_checks`` lists the checks, ``one_check`` defines and runs one check, ``run_checks`` gives each check a process,
and ``outcome_report`` writes the report. Checks call the code of training; a file in ``checks`` has one or two checks.
"""
