"""What follows from a configuration: batch arithmetic, layouts, memory; or why it cannot work."""
