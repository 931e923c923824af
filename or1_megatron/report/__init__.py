"""What people look at: the console during a run, its responses, its picture."""
