"""The sandbox for untrusted programs: bubblewrap or Landlock, seccomp, cgroups and resource limits."""
