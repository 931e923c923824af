"""or1 plan: what a run will need and how long it will take, before anything starts."""
